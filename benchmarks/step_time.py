"""Seconds of a training step on this GPU, measured and as the planner's time model says.

    python benchmarks/step_time.py --table ChnSentiCorp_htl_all.csv --vocab vocab.txt --out F.json
    python benchmarks/step_time.py --table … --vocab … --out F.json --predict

The first measures (about four minutes on an H200), each case in a process of its own; cases found
in the file are not run again. The second prints measured against predicted and needs no GPU.
Random weights, real text lengths, effective batch 32, length 128. The last steps of a case run
under the profiler: how many kernels there were and what they took, without the host.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _machine import stamp
from bert_large import BATCH, LENGTH, collate, made, rows_of

SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
              "intermediate_size": 2048},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
              "intermediate_size": 4096},
}  # fmt: skip
_LOWBIT = ["Packing()", "FusedLayers()", "LowBitAdamW()"]

# name -> shape, trainer's arguments, strategies, rows of a micro-batch; the most telling first
CASES: dict[str, dict[str, Any]] = {
    "large fp32 padded": {"shape": "large", "steps": 28},
    "large bf16 packed": {"shape": "large", "bf16": True, "strategies": ["Packing()"]},
    "large 24-bit fused graphs": {"shape": "large", "strategies": [*_LOWBIT, "CudaGraphs()"]},
    "large 24-bit fused": {"shape": "large", "strategies": _LOWBIT},
    "large kept8 recompute graphs": {
        "shape": "large",
        "strategies": [*_LOWBIT, "Checkpointing()", "GradientRelease('kept8')", "CudaGraphs()"],
    },
    "large bf16 weights offloaded": {
        "shape": "large", "steps": 24,
        "strategies": ["Packing()", "OptimizerOffload(weights=True, dtype='bfloat16')"],
    },
    "base fp32 packed": {"shape": "base", "strategies": ["Packing()"]},
    "base 24-bit fused graphs": {"shape": "base", "strategies": [*_LOWBIT, "CudaGraphs()"]},
    "small fp32 packed": {"shape": "small", "strategies": ["Packing()"]},
    "small 24-bit fused graphs": {"shape": "small", "strategies": [*_LOWBIT, "CudaGraphs()"]},
    "large recompute offloaded 16-bit": {
        "shape": "large", "steps": 32,
        "strategies": [
            "Packing()", "FusedLayers()", "Checkpointing()", "ActivationOffload()",
            "LowBitAdamW(16)", "GradientRelease('kept8')",
        ],
    },
    "base bf16 recompute in fours": {
        "shape": "base", "bf16": True, "rows": 4, "steps": 24,
        "strategies": ["Packing()", "Checkpointing()"],
    },
    "large fp32 optimizer offloaded": {
        "shape": "large", "steps": 24, "strategies": ["Packing()", "OptimizerOffload()"],
    },
    "large 24-bit graphs": {
        "shape": "large", "strategies": ["Packing()", "LowBitAdamW()", "CudaGraphs()"],
    },
    "large host gradients": {
        "shape": "large", "steps": 24, "strategies": [*_LOWBIT, "GradientRelease('host')"],
    },
    "base bf16 padded": {"shape": "base", "bf16": True},
    "small bf16 padded": {"shape": "small", "bf16": True},
}  # fmt: skip
STEPS, WARM_STEPS, PROFILED_STEPS, BLOCK = 48, 16, 2, 4
CASE_SECONDS = 75
"""A case that takes longer is given up."""


def config_of(case: dict[str, Any]) -> Any:
    from transformers import BertConfig

    return BertConfig(vocab_size=21128, num_labels=2, **SHAPES[case["shape"]])


def make_clock(case: dict[str, Any], steps: int, sizes: list[tuple[int, int, int]]) -> Any:
    """Waits for the device between blocks of steps; afterwards profiles a few more."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        marks: list[float]
        profiler: Any = None

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.marks = []

        def on_step_end(self, _args: Any, state: Any, _control: Any, **__: Any) -> None:
            done = state.global_step
            if done < WARM_STEPS or done > steps or (done - WARM_STEPS) % BLOCK:
                return
            torch.cuda.synchronize()
            self.marks.append(time.perf_counter())
            if done == steps:
                # Said now: should the profiler fail, the times are kept.
                print("RESULT " + json.dumps(times(case, self.marks, sizes)), flush=True)
                self.profiler = torch.profiler.profile(
                    activities=[torch.profiler.ProfilerActivity.CUDA]
                )
                self.profiler.start()

    return Clock()


def times(
    case: dict[str, Any], marks: list[float], sizes: list[tuple[int, int, int]]
) -> dict[str, Any]:
    """Seconds a step, and the batches they were for: rows, tokens, width."""
    import torch

    blocks = [(later - earlier) / BLOCK for earlier, later in itertools.pairwise(marks)]
    timed = sizes[WARM_STEPS:]
    return {
        "case": case,
        "step_seconds": statistics.mean(blocks),
        "step_seconds_median": statistics.median(blocks),
        "step_seconds_range": [min(blocks), max(blocks)],
        "timed_steps": len(blocks) * BLOCK,
        "tokens": statistics.mean(size[1] for size in timed),
        "padded_tokens": statistics.mean(size[0] * size[2] for size in timed),
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
    }


def kernels_of(profiler: Any) -> dict[str, Any]:
    """Kernels a step and their seconds, by kind; and the ten that take most."""
    kinds: dict[str, list[float]] = {}
    longest: list[tuple[float, float, str]] = []
    for row in profiler.key_averages():
        seconds = getattr(row, "self_device_time_total", 0) / 1e6 / PROFILED_STEPS
        if not seconds:
            continue
        count = row.count / PROFILED_STEPS
        kind = kinds.setdefault(kind_of(row.key), [0.0, 0.0])
        kind[0] += count
        kind[1] += seconds
        longest.append((seconds, count, row.key[:120]))
    return {"kinds": kinds, "longest": sorted(longest, reverse=True)[:10]}


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    if name.startswith("memcpy"):
        return name.split(" (")[0]
    if any(word in name for word in ("flash", "fmha", "sdpa", "attention", "_sdp_")):
        return "attention"
    if any(word in name for word in ("gemm", "nvjet", "cutlass", "xmma", "splitk", "wgmma")):
        return "product"
    return "other"


def measure(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One case, in this process."""
    import torch
    import transformers

    from memfit import BudgetTrainer
    from memfit.engine.micro_batches import MicroBatching

    case = CASES[name]
    steps = case.get("steps", STEPS)
    sizes: list[tuple[int, int, int]] = []

    def counted(batch: list[dict[str, Any]]) -> dict[str, Any]:
        lengths = [len(row["input_ids"]) for row in batch]
        sizes.append((len(batch), sum(lengths), max(lengths)))
        return collate(batch)

    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = transformers.BertForSequenceClassification(config_of(case))
    model = model.cpu()
    torch.cuda.empty_cache()
    clock = make_clock({"name": name, **case}, steps, sizes)
    trainer: Any = BudgetTrainer(
        model=model,
        args=transformers.TrainingArguments(**arguments_of(case, steps + PROFILED_STEPS)),
        strategies=[made(text) for text in case.get("strategies", [])],
        micro_batching=MicroBatching(max_rows=case["rows"]) if "rows" in case else None,
        train_dataset=rows,
        data_collator=counted,
        callbacks=[clock],
    )
    trainer.train()
    torch.cuda.synchronize()
    clock.profiler.stop()
    sizes = sizes[:steps]
    return times({"name": name, **case}, clock.marks, sizes) | {
        "kernels": kernels_of(clock.profiler)
    }


def arguments_of(case: dict[str, Any], steps: int) -> dict[str, Any]:
    return {
        "output_dir": f"{tempfile.gettempdir()}/step-time", "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 2e-5, "weight_decay": 0.01, "report_to": "none", "save_strategy": "no",
        "logging_steps": 1000, "disable_tqdm": True, "seed": 0, "bf16": case.get("bf16", False),
    }  # fmt: skip


def probe() -> dict[str, Any]:
    """What the calibration measures here, and how long it takes."""
    import dataclasses

    from memfit.planner.step_time import calibrate

    started = time.perf_counter()
    profile = calibrate("cuda")
    return {
        "calibration": dataclasses.asdict(profile), "seconds": time.perf_counter() - started,
    }  # fmt: skip


def run_in_child(arguments: list[str]) -> dict[str, Any]:
    """The last result a child process says; its error where it says none."""
    command = [sys.executable, __file__, *arguments]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=CASE_SECONDS)
        output, errors = process.stdout, process.stderr
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        errors = f"not done after {CASE_SECONDS} s"
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"error": errors[-3000:]}
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


def measure_all(options: argparse.Namespace) -> None:
    result: dict[str, Any] = {"machine": stamp(), "runs": {}}
    if options.out.exists():
        result = json.loads(options.out.read_text())
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        rows.write_text(json.dumps(rows_of(options.table, options.vocab)))
        for name in options.only or ["probe", *CASES]:
            done = result["runs"].get(name, {"error": ""})
            if "error" not in done or time.perf_counter() - started > options.seconds:
                continue
            began = time.perf_counter()
            run = run_in_child(["--one", name, "--rows", str(rows)])
            result["runs"][name] = run
            options.out.write_text(json.dumps(result, indent=1))
            said = run.get("error") or (
                f"{run['step_seconds_median'] * 1e3:.1f} ms a step"
                if "step_seconds_median" in run
                else json.dumps(run)
            )
            print(f"{name} ({time.perf_counter() - began:.0f} s): {said}", flush=True)


def predict_all(options: argparse.Namespace) -> None:
    """Measured against predicted, case by case."""
    from memfit.planner.step_time import seconds_by_cause

    result = json.loads(options.out.read_text())
    card = card_of(result)
    rows = rows_of(options.table, options.vocab)
    print(f"{'case':36}{'measured ms':>12}{'predicted':>10}{'error':>8}  parts in ms")
    for name, run in result["runs"].items():
        if "step_seconds_median" not in run:
            continue
        counts = counts_of(run, rows, card)
        seconds, measured = clocked_seconds(counts, card), run["step_seconds_median"]
        parts = " ".join(f"{k} {v * 1e3:.1f}" for k, v in seconds_by_cause(counts, card).items())
        error = seconds / measured - 1
        print(f"{name:36}{measured * 1e3:12.1f}{seconds * 1e3:10.1f}{error:+8.0%}  {parts}")
        if "kernels" in run:
            print(f"{'':36}{reached(run['kernels']['kinds'], counts)}")


def card_of(result: dict[str, Any]) -> Any:
    """The card with the speeds, its host's too, that were measured beside the cases."""
    import dataclasses

    from memfit.memory.cards import Speeds, find_card

    card = find_card(result["machine"]["gpu"]["name"])
    probed = result["runs"].get("probe", {}).get("calibration")
    return dataclasses.replace(card, reached=Speeds(**probed["reached"])) if probed else card


def clocked_seconds(counts: Any, card: Any) -> float:
    """As the clock sees it: once a block it waits, and the host's part is not hidden."""
    from memfit.planner.step_time import seconds_by_cause, step_seconds

    hidden = seconds_by_cause(counts, card)["host"] if counts.replayed > counts.launches else 0.0
    return step_seconds(counts, card) + hidden / BLOCK


def reached(kinds: dict[str, list[float]], counts: Any) -> str:
    """What the profiled kernels reached, and their number beside the counted one."""
    products = counts.half_flops + counts.tf32_flops + counts.full_flops
    attention = counts.half_attention_flops + counts.full_attention_flops
    amounts = {
        "product": (products, 1e12, "TFLOP/s"),
        "attention": (attention, 1e12, "TFLOP/s"),
        "other": (counts.bytes_moved, 1e9, "GB/s"),
    }
    said = [
        f"{kind} {kinds[kind][1] * 1e3:.1f} ms at {amount / kinds[kind][1] / unit:,.0f} {name}"
        for kind, (amount, unit, name) in amounts.items()
        if kind in kinds
    ]
    profiled = sum(number for number, _ in kinds.values())
    counted = counts.launches + counts.replayed
    return f"profiled: {', '.join(said)}; {profiled:,.0f} kernels, {counted:,.0f} counted"


def counts_of(run: dict[str, Any], rows: list[dict[str, Any]], card: Any) -> Any:
    """The counts of one traced step of the batches that were measured."""
    import transformers

    from memfit.engine.micro_batches import MicroBatching
    from memfit.planner.task import Task
    from memfit.planner.trace import Tracer

    case = run["case"]
    strategies = tuple(made(text) for text in case.get("strategies", []))
    task = Task(
        config=config_of(case),
        lengths=tuple(min(len(row["input_ids"]), LENGTH) for row in rows),
        args=transformers.TrainingArguments(**{**arguments_of(case, 1), "use_cpu": True}),
        card=card,
    )
    packed = any(one.name == "packing" for one in strategies)
    tokens = run["tokens"] if packed else run["padded_tokens"]
    micro_batches = -(-BATCH // case["rows"]) if "rows" in case else 1
    limits = MicroBatching(max_rows=case.get("rows"))
    return Tracer(task).step(strategies, limits, tokens=round(tokens / micro_batches)).counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--vocab", type=Path)
    parser.add_argument("--out", type=Path, default=Path("step_time.json"))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=230.0, help="start no case after")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one == "probe":
        print("RESULT " + json.dumps(probe()))
    elif options.one:
        rows = json.loads(options.rows.read_text())
        print("RESULT " + json.dumps(measure(options.one, rows)))
    elif options.predict:
        predict_all(options)
    else:
        measure_all(options)


if __name__ == "__main__":
    main()
