"""Plans against reality: predicted peak and step of the chosen plan, and of others that fit too.

    python benchmarks/plan_gpu.py --table T.csv --vocab V.txt --plan plans.json     # no GPU needed
    python benchmarks/plan_gpu.py --table T.csv --vocab V.txt --run plans.json --out F.json

    python benchmarks/plan_gpu.py --table T.csv --vocab V.txt --predict F.json      # no GPU needed

First every (model, budget) is planned for the card, and the fastest plans of other kinds that fit
are noted. Then, a process for each pair, the chosen plan runs inside its budget, capped there with
the CUDA context, for an epoch or as long as there is time, and the others for some steps. The third
gives the runs in a result what is predicted for them today: the chosen ones traced, the others
composed. Nothing is evaluated here, so it is the training's peak that is compared.
Random weights; ChnSentiCorp's lengths, effective batch 32, length 128, clipped at 1.0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _machine import stamp
from bert_large import BATCH, collate, made, rows_of
from step_time import SHAPES

# name -> shape of the model, budget, --exact, steps of the chosen plan, other plans to try
PAIRS: dict[str, dict[str, Any]] = {
    "large 4GB": {"shape": "large", "gb": 4, "steps": 219, "others": 4},
    "large 3GB": {"shape": "large", "gb": 3, "steps": 219, "others": 3},
    "base 2GB": {"shape": "base", "gb": 2, "steps": 219, "others": 3},
    "base 1.5GB": {"shape": "base", "gb": 1.5, "steps": 219, "others": 3},
    "large 2GB": {"shape": "large", "gb": 2, "steps": 219, "others": 3},
    "large 16GB exact": {"shape": "large", "gb": 16, "exact": True, "steps": 219, "others": 0},
}  # fmt: skip
OTHER_STEPS, WARM_STEPS = 44, 20
HOST_BYTES = 100 * 10**9


def config_of(pair: dict[str, Any]) -> Any:
    from transformers import BertConfig

    return BertConfig(vocab_size=21128, num_labels=2, **SHAPES[pair["shape"]])


def workload_of(pair: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    from transformers import TrainingArguments

    from memfit.planner.task import Task

    args = TrainingArguments("unused", per_device_train_batch_size=BATCH, report_to="none")
    lengths = tuple(len(row["input_ids"]) for row in rows)
    return Task(config=config_of(pair), lengths=lengths, args=args)


def predict(result: dict[str, Any], rows: list[dict[str, Any]], gpu: str) -> None:
    """What is predicted today for every run of a result, in its place."""
    from memfit.engine.micro_batches import MicroBatching
    from memfit.memory.cards import find_card
    from memfit.planner.price import Pricer

    pricers: dict[str, Any] = {}
    for run in result["runs"]:
        shape = PAIRS[run["pair"]]["shape"]
        if shape not in pricers:
            workload = workload_of(PAIRS[run["pair"]], rows)
            pricers[shape] = Pricer(replace(workload, card=find_card(gpu)))
        strategies = tuple(made(text) for text in run["strategies"])
        limits = MicroBatching(run["max_rows"], run["max_tokens"])
        run.update(_noted(pricers[shape].price(strategies, limits)))
        print(told(run))


def planned(pair: dict[str, Any], rows: list[dict[str, Any]], gpu: str) -> dict[str, Any]:
    """The chosen plan, and the fastest of each other kind that fits."""
    from memfit.memory.cards import find_card
    from memfit.planner.search import plan_for
    from memfit.units import Budget

    budget_bytes = round(pair["gb"] * 1e9)
    started = time.perf_counter()
    task = workload_of(pair, rows).placed(
        Budget(bytes=budget_bytes), find_card(gpu), exact=pair.get("exact", False)
    )
    planning = plan_for(task, fresh=True, host_bytes_free=HOST_BYTES)
    seconds = time.perf_counter() - started
    chosen = planning.chosen.price
    others = [_noted(one.price) for one in planning.candidates]
    return {
        **pair, "budget_bytes": budget_bytes, "seconds": seconds, "chosen": _noted(chosen),
        "candidates": planning.considered, "rest": others[: pair["others"]],
    }  # fmt: skip


def _noted(price: Any) -> dict[str, Any]:
    limits = price.micro_batching
    peak = price.phases["training"]
    return {
        "strategies": [repr(one) for one in price.strategies],
        "max_tokens": limits.max_tokens, "max_rows": limits.max_rows,
        "fidelity": str(price.fidelity),
        "predicted": {
            "allocated_bytes": peak.allocated_bytes,
            "reserved_bytes": peak.reserved_bytes,
            "device_bytes": peak.device_bytes, "step_seconds": price.step_seconds,
            "components": {str(name): size for name, size in peak.components.items()},
        },
    }  # fmt: skip


def run_one(
    noted: dict[str, Any], pair: dict[str, Any], rows: list[dict[str, Any]], steps: int
) -> dict[str, Any]:
    """Train with one plan inside the budget; what it took."""
    import gc

    import torch
    import transformers

    from bert_large import make_clock
    from memfit import BudgetTrainer
    from memfit.engine.micro_batches import MicroBatching

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.BertForSequenceClassification(config_of(pair))
    model = model.cpu()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    clock = make_clock(steps)
    arguments = transformers.TrainingArguments(
        "/tmp/plan-gpu", per_device_train_batch_size=BATCH, max_steps=steps, learning_rate=2e-5,
        weight_decay=0.01, report_to="none", save_strategy="no", logging_steps=1000,
        disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = BudgetTrainer(
        model, arguments, train_dataset=rows, data_collator=collate, callbacks=[clock],
        budget=f"{pair['budget_bytes']}B",
        micro_batching=MicroBatching(noted["max_rows"], noted["max_tokens"]),
        strategies=[made(text) for text in noted["strategies"]],
    )  # fmt: skip
    ooms = torch.cuda.memory_stats().get("num_ooms", 0)
    trainer.train()
    free, total = torch.cuda.mem_get_info()
    per_step = [
        (later - earlier) / (after - before)
        for (before, earlier), (after, later) in zip(clock.blocks, clock.blocks[1:], strict=False)
    ]
    found = {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "context_bytes": total - free - torch.cuda.memory_reserved(),
        "step_seconds": sorted(per_step)[len(per_step) // 2],
        "step_seconds_mean": (clock.blocks[-1][1] - clock.blocks[0][1])
        / (clock.blocks[-1][0] - clock.blocks[0][0]),
        "steps": steps,
        "num_ooms": torch.cuda.memory_stats().get("num_ooms", 0) - ooms,
        "adjustments": [entry for entry in trainer.state.log_history if "adjustment" in str(entry)],
    }
    found["device_bytes"] = found["reserved_bytes"] + found["context_bytes"]
    trainer.setup.restore()
    del trainer, model, clock
    gc.collect()
    torch.cuda.empty_cache()
    return {**noted, "measured": found}


def run_pair(name: str, options: argparse.Namespace) -> None:
    """The chosen plan of a pair first, in a process that has done nothing else; then the rest."""
    pair = json.loads(options.run.read_text())["pairs"][name]
    rows = rows_of(options.table, options.vocab)
    todo = [(pair["chosen"], pair["steps"]), *((one, OTHER_STEPS) for one in pair["rest"])]
    for index, (noted, steps) in enumerate(todo):
        try:
            found = run_one(noted, pair, rows, steps)
        except Exception as error:
            found = {**noted, "error": f"{type(error).__name__}: {error}"[:500]}
        line = {"pair": name, "chosen": index == 0, **found}
        print("RESULT " + json.dumps(line), flush=True)


def told(line: dict[str, Any]) -> str:
    """One run in a line."""
    where = f"{line['pair']} {'chosen' if line['chosen'] else 'other'}"
    if "error" in line:
        return f"{where}: FAILED {line['error'][:200]}"
    found, said = line["measured"], line["predicted"]
    parts = [
        f"{key.split('_')[0]} {found[key] / 1e9:.3f} ({found[key] / said[key] - 1:+.1%})"
        for key in ("allocated_bytes", "reserved_bytes", "device_bytes")
    ]
    took, expected = found["step_seconds"], said["step_seconds"]
    step = f"{took * 1e3:.1f} ms ({took / expected - 1:+.0%})"
    notes = f", {found['num_ooms']} OOM" if found["num_ooms"] else ""
    return (
        f"{where}: {', '.join(parts)}, step {step}{notes} {line['strategies']} {line['max_tokens']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--plan", type=Path, help="plan, and write what to run here")
    parser.add_argument("--run", type=Path, help="run what was planned")
    parser.add_argument("--predict", type=Path, help="predict anew what was run")
    parser.add_argument("--out", type=Path, default=Path("plan_gpu.json"))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=75, help="the most for one pair")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_pair(options.one, options)
        return
    if options.predict:
        result = json.loads(options.predict.read_text())
        predict(result, rows_of(options.table, options.vocab), options.gpu)
        options.predict.write_text(json.dumps(result, indent=1) + "\n")
        return
    if options.plan:
        rows = rows_of(options.table, options.vocab)
        pairs = {}
        for name, pair in PAIRS.items():
            pairs[name] = planned(pair, rows, options.gpu)
            chosen = pairs[name]["chosen"]
            print(f"{name}: {chosen['predicted']} {chosen['strategies']} {chosen['max_tokens']}")
        options.plan.write_text(json.dumps({"gpu": options.gpu, "pairs": pairs}, indent=1))
        return
    plans = json.loads(options.run.read_text())
    result = {"machine": stamp(), "plans": plans, "runs": []}
    for name in options.only or plans["pairs"]:
        command = [sys.executable, __file__, "--one", name, "--run", str(options.run)]
        command += ["--table", str(options.table), "--vocab", str(options.vocab)]
        with subprocess.Popen(
            ["timeout", str(options.seconds), *command],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for text in process.stdout:
                if text.startswith("RESULT "):
                    run = json.loads(text.removeprefix("RESULT "))
                    result["runs"].append({**run, "date": stamp()["date"]})
                    print(told(result["runs"][-1]), flush=True)
                    options.out.write_text(json.dumps(result, indent=1))
            errors = process.stderr.read() if process.stderr else ""
        if process.returncode:
            print(f"{name}: ended with {process.returncode}\n{errors[-800:]}", flush=True)


if __name__ == "__main__":
    main()
