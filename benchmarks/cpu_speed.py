"""How much faster a step is without padding, on a CPU: the stock Trainer and memfit in one run.

    python benchmarks/cpu_speed.py --table ChnSentiCorp_htl_all.csv --model m3e-small --out F.json

The same batches in the same order, each trainer in turn, twice; the ratio is taken step by step.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import itertools

from _machine import stamp
from bert_large import collate

WARM_STEPS = 2


def rows_of(table: Path, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """The first reviews, as they come."""
    with table.open(encoding="utf-8", newline="") as file:
        kept = [row for row in csv.DictReader(file) if row["review"]]
    kept = kept[:: max(len(kept) // count, 1)][:count]
    encoded = tokenizer([row["review"] for row in kept], max_length=128, truncation=True)
    return [
        {"input_ids": ids, "labels": int(row["label"])}
        for ids, row in zip(encoded["input_ids"], kept, strict=True)
    ]


def step_seconds(kind: str, folder: str, rows: list[dict[str, Any]], steps: int) -> list[float]:
    """The seconds of each step of one training."""
    import torch
    import transformers
    from transformers import AutoModelForSequenceClassification

    from memfit import BudgetTrainer
    from memfit.strategies import Packing

    transformers.set_seed(0)
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    args = transformers.TrainingArguments(
        "/tmp/cpu-speed", per_device_train_batch_size=32, max_steps=steps, learning_rate=2e-5,
        use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, seed=0,
        dataloader_pin_memory=False, logging_steps=10_000,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    common: dict[str, Any] = {
        "model": model, "args": args, "train_dataset": rows, "data_collator": collate,
        "callbacks": [Clock()],
    }  # fmt: skip
    if kind == "stock":
        trainer: Any = transformers.Trainer(**common)
    else:
        trainer = BudgetTrainer(**common, strategies=[Packing()])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [later - earlier for earlier, later in itertools.pairwise(ends)][WARM_STEPS:]


def main() -> None:
    import torch
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("cpu_speed.json"))
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    rows = rows_of(options.table, tokenizer, 32 * options.steps)
    seconds: dict[str, list[float]] = {"stock": [], "memfit": []}
    for _ in range(2):
        for kind, found in seconds.items():
            found += step_seconds(kind, options.model, rows, options.steps)
    ratios = [a / b for a, b in zip(seconds["stock"], seconds["memfit"], strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    result = {
        "machine": stamp(), "model": Path(options.model).name, "threads": torch.get_num_threads(),
        "steps": len(ratios), "ratio_median": statistics.median(ratios),
        "ratio_quartiles": [quarters[0], quarters[2]], "step_seconds": seconds,
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1))
    print(
        f"{result['ratio_median']:.2f} times as fast ({quarters[0]:.2f} to {quarters[2]:.2f}), "
        f"{result['threads']} threads, {len(ratios)} paired steps"
    )


if __name__ == "__main__":
    main()
