"""BERT-Large with the stock Trainer and with memfit, side by side, each in its own process.

    python benchmarks/bert_large.py --table ChnSentiCorp_htl_all.csv --vocab vocab.txt --out F.json

Random weights: only memory and time are measured here, quality is benchmarks/quality.py's. One
epoch is 6,988 reviews, effective batch 32, length 128: 219 steps. Runs found in the result file
are not run again. A run of fewer steps than an epoch is marked as extrapolated.

    python benchmarks/bert_large.py --table … --vocab … --out F.json --counts

adds to each run what an average step does, from its trace, without a GPU: arithmetic, bytes read
and written, kernels, bytes across the bus (other cards have other ratios of these), and the memory
that is predicted for it.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import itertools

from _machine import stamp

TRAIN_ROWS, BATCH, LENGTH = 6_988, 32, 128
CONFIG = {
    "vocab_size": 21128, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "num_labels": 2,
}  # fmt: skip
XLMR = {**CONFIG, "vocab_size": 250002, "max_position_embeddings": 514, "pad_token_id": 1}
WARM_STEPS = 20
"""Kernels are compiled and graphs captured before the clock starts."""

# name -> (trainer's arguments, strategies, steps, cap in bytes with the context, model)
RUNS: dict[str, dict[str, Any]] = {
    "stock fp32": {"steps": 45},
    "stock bf16": {"args": {"bf16": True}, "steps": 219},
    "stock bf16 + checkpointing": {
        "args": {"bf16": True, "gradient_checkpointing": True}, "steps": 60,
    },
    "stock bf16 + checkpointing + Adafactor": {
        "args": {"bf16": True, "gradient_checkpointing": True, "optim": "adafactor"}, "steps": 60,
    },
    "bf16, packed": {"args": {"bf16": True}, "strategies": ["Packing()"], "steps": 80},
    "24-bit, 8-bit gradients clipped, recompute, graphs, not fused": {
        "strategies": [
            "Packing()", "Checkpointing()", "LowBitAdamW()", "GradientRelease('kept8')",
            "CudaGraphs()",
        ],
    },
    "24-bit, kept and clipped, graphs": {
        "strategies": ["Packing()", "FusedLayers()", "LowBitAdamW()", "CudaGraphs()"],
    },
    "24-bit, 8-bit gradients clipped, recompute, graphs": {
        "strategies": [
            "Packing()", "FusedLayers()", "Checkpointing()", "LowBitAdamW()",
            "GradientRelease('kept8')", "CudaGraphs()",
        ],
    },
    "everything offloaded": {
        "steps": 45,
        "strategies": [
            "Packing()", "Checkpointing()", "ActivationOffload()",
            "OptimizerOffload(weights=True, dtype='bfloat16')", "SmallWorkspace()",
        ],
    },
}  # fmt: skip


def rows_of(table: Path, vocab: Path) -> list[dict[str, Any]]:
    """The reviews as token ids, in the order of the file."""
    from transformers import BertTokenizerFast

    tokenizer = BertTokenizerFast(vocab_file=str(vocab), vocab=str(vocab))
    with table.open(encoding="utf-8", newline="") as file:
        kept = [row for row in csv.DictReader(file) if row["review"]]
    encoded = tokenizer([row["review"] for row in kept], max_length=LENGTH, truncation=True)
    labels = [int(row["label"]) for row in kept]
    rows = [
        {"input_ids": ids, "labels": label}
        for ids, label in zip(encoded["input_ids"], labels, strict=True)
    ]
    return rows[:TRAIN_ROWS]


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Padded to the longest row of the batch."""
    import torch

    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[index, : len(row["input_ids"])] = 1
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def make_model(kind: str) -> Any:
    """Random weights, made on the GPU, since that is faster."""
    import torch
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        XLMRobertaConfig,
        XLMRobertaForSequenceClassification,
    )

    torch.manual_seed(0)
    with torch.device("cuda"):
        if kind == "xlmr":
            model: Any = XLMRobertaForSequenceClassification(XLMRobertaConfig(**XLMR))
        else:
            model = BertForSequenceClassification(BertConfig(**CONFIG))
    model = model.cpu()
    torch.cuda.empty_cache()
    return model


def make_clock(steps: int) -> Any:
    """A callback that waits for the device only at the start and at the end of each block."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        blocks: list[tuple[int, float]]

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.blocks = []
            torch.cuda.reset_peak_memory_stats()

        def on_step_end(self, _args: Any, state: Any, _control: Any, **__: Any) -> None:
            done = state.global_step - WARM_STEPS
            size = max((steps - WARM_STEPS) // 5, 1)
            if done >= 0 and (done % size == 0 or state.global_step == steps):
                torch.cuda.synchronize()
                self.blocks.append((state.global_step, time.perf_counter()))

    return Clock()


def measure(name: str, table: Path, vocab: Path) -> dict[str, Any]:
    """One run, in this process."""
    import torch
    import transformers

    run = RUNS[name]
    rows = rows_of(table, vocab)
    steps = run.get("steps") or -(-len(rows) // BATCH)
    if cap := run.get("cap_bytes"):
        cap_process(cap)
    arguments = {
        "output_dir": "/tmp/bert-large", "per_device_train_batch_size": BATCH, "max_steps": steps,
        "learning_rate": 2e-5, "weight_decay": 0.01, "report_to": "none", "save_strategy": "no",
        "logging_steps": 1000, "disable_tqdm": True, "seed": 0, **run.get("args", {}),
    }  # fmt: skip
    model, clock = make_model(run.get("model", "bert")), make_clock(steps)
    common: dict[str, Any] = {
        "model": model, "train_dataset": rows, "data_collator": collate, "callbacks": [clock],
    }  # fmt: skip
    if "strategies" in run:
        from memfit import BudgetTrainer

        strategies = [made(text) for text in run["strategies"]]
        args = transformers.TrainingArguments(**arguments)
        trainer: Any = BudgetTrainer(args=args, strategies=strategies, **common)
        fidelity = str(max(strategy.fidelity for strategy in strategies))
    else:
        trainer = transformers.Trainer(args=transformers.TrainingArguments(**arguments), **common)
        fidelity = "optimizer" if "optim" in arguments else "exact"
    output = trainer.train()
    used = torch.cuda.mem_get_info()
    return summary(name, run, clock.blocks, steps, used, len(rows)) | {
        "fidelity": fidelity,
        "train_loss": output.training_loss,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def made(text: str) -> Any:
    """A strategy from how it is written in the table above."""
    from memfit import strategies

    return eval(text, {name: getattr(strategies, name) for name in strategies.__all__})


def cap_process(cap_bytes: int) -> None:
    """Behave as a card of this size: the context counts."""
    import torch

    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    # Libraries load later: the context of a training process, measured by memory_gpu.py.
    context = max(total - free - torch.cuda.memory_reserved(), 785 * 2**20)
    torch.cuda.set_per_process_memory_fraction((cap_bytes - context) / total)


def summary(
    name: str,
    run: dict[str, Any],
    blocks: list[tuple[int, float]],
    steps: int,
    used: tuple[int, int],
    rows: int,
) -> dict[str, Any]:
    """Memory and time of one run."""
    import torch

    free, total = used
    per_step = sorted(
        (later - earlier) / (after - before)
        for (before, earlier), (after, later) in itertools.pairwise(blocks)
    )
    timed = blocks[-1][0] - blocks[0][0]
    mean = (blocks[-1][1] - blocks[0][1]) / timed
    epoch_steps = -(-rows // BATCH)
    return {
        "name": name, "run": run, "steps": steps, "timed_steps": timed,
        "extrapolated": timed < epoch_steps,
        "step_seconds": mean, "step_seconds_median": per_step[len(per_step) // 2],
        "step_seconds_range": [per_step[0], per_step[-1]],
        "epoch_seconds": mean * epoch_steps, "samples_per_second": BATCH / mean,
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
        "context_bytes": total - free - torch.cuda.memory_reserved(),
        "num_ooms": torch.cuda.memory_stats().get("num_ooms", 0),
        "num_alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
    }  # fmt: skip


def traced(run: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What a step of average size does, and what the largest one is predicted to hold."""
    from transformers import BertConfig, TrainingArguments, XLMRobertaConfig

    from memfit.engine.micro_batches import MicroBatching
    from memfit.memory.cards import find_card
    from memfit.memory.phases import TRAINING
    from memfit.planner.price import Pricer
    from memfit.planner.task import Task

    args = TrainingArguments("unused", per_device_train_batch_size=BATCH, report_to="none")
    for name, value in run.get("args", {}).items():
        setattr(args, name, value)  # bf16 is refused where there is no GPU
    config = XLMRobertaConfig(**XLMR) if run.get("model") == "xlmr" else BertConfig(**CONFIG)
    lengths = tuple(len(row["input_ids"]) for row in rows)
    task = Task(config=config, lengths=lengths, args=args, card=find_card("H200"))
    strategies = tuple(made(text) for text in run.get("strategies", []))
    pricer = Pricer(task)
    # Stock batches are padded to their longest row, which is cut in nearly all of them.
    tokens = round(task.mean_tokens) if "strategies" in run else BATCH * LENGTH
    counts = pricer.tracer.step(strategies, MicroBatching(), tokens=tokens).counts
    peak = pricer.memory(strategies, MicroBatching()).phases[TRAINING]
    per_step = {
        "flops": counts.half_flops + counts.full_flops + counts.tf32_flops
        + counts.half_attention_flops + counts.full_attention_flops,
        "bytes": counts.bytes_moved + counts.product_bytes,
        "kernels": counts.launches + counts.replayed,
        "bus_bytes": counts.to_host_bytes + counts.to_device_bytes,
    }  # fmt: skip
    predicted = {
        "components": {str(name): size for name, size in peak.components.items()},
        "allocated_bytes": peak.allocated_bytes,
        "reserved_bytes": peak.reserved_bytes,
        "device_bytes": peak.device_bytes,
    }
    return {"per_step": per_step, "predicted": predicted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("bert_large.json"))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after")
    parser.add_argument("--counts", action="store_true", help="add what steps do; needs no GPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.counts:
        result = json.loads(options.out.read_text())
        rows = rows_of(options.table, options.vocab)
        for run in result["runs"]:
            run |= traced(run["run"], rows)
            device_bytes = run["max_memory_reserved"] + run["context_bytes"]
            off = run["predicted"]["device_bytes"] / device_bytes - 1
            print(run["name"], {key: f"{value:.3g}" for key, value in run["per_step"].items()},
                  f"predicted {off:+.1%}")  # fmt: skip
        options.out.write_text(json.dumps(result, indent=1))
        return
    if options.one:
        print("RESULT " + json.dumps(measure(options.one, options.table, options.vocab)))
        return
    result: dict[str, Any] = {"machine": stamp(), "runs": []}
    if options.out.exists():
        result = json.loads(options.out.read_text())
    started = time.perf_counter()
    done = {run["name"] for run in result["runs"] if "error" not in run}
    for name in options.only or RUNS:
        if name in done or time.perf_counter() - started > options.seconds:
            continue
        command = [sys.executable, __file__, "--one", name, "--table", str(options.table)]
        process = subprocess.run(
            [*command, "--vocab", str(options.vocab)], capture_output=True, text=True
        )
        lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
        if lines:
            run = json.loads(lines[-1].removeprefix("RESULT "))
            print(
                f"{name}: {run['max_memory_allocated'] / 2**30:.2f} GiB allocated, "
                f"{run['max_memory_reserved'] / 2**30:.2f} reserved, "
                f"{run['epoch_seconds']:.2f} s an epoch, loss {run['train_loss']:.3f}",
                flush=True,
            )
        else:
            run = {"name": name, "error": process.stderr[-3000:]}
            print(f"{name}: FAILED\n{process.stderr[-1500:]}", flush=True)
        result["runs"] = [r for r in result["runs"] if r["name"] != name] + [run]
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
