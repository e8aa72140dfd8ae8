"""What each strategy does to F1, on really pre-trained models, with paired seeds and splits.

    python benchmarks/quality.py --out F.json --jobs 8 \
        --model m3e-small=FOLDER:2e-5:ChnSentiCorp_htl_all.csv \
        --model albert-tiny=FOLDER:1e-4:ChnSentiCorp_htl_all.csv \
        --model minilm=FOLDER:5e-5:movies.csv

A table has the columns `label` (0 or 1) and `review`.

For every model and seed one split (stratified, `--test-share` of the rows to score) and one order
of batches serve all variants, so that differences are paired. Two epochs, effective batch 32,
length 128, linear decay. A run found in the result file is not run again, and the file is written
after every training: what a `--deadline` ends is taken up by the next call.

What cards without bfloat16 do, against the stock Trainer in fp32, scored on half of the rows:

    MEMFIT_ACT_AS=T4 python benchmarks/quality.py --variants no-bf16 --test-share 0.5 --seeds 0-4 \
        --narrow 0.6 --most-seeds 12 --jobs 8 --deadline 300 --out F.json --model …

`--narrow` adds seeds to a model until no interval is wider.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _machine import stamp
from bert_large import collate, made

BASELINE = "fp32 AdamW"
STOCK = "fp32 AdamW, stock Trainer"
# name -> training arguments, strategies, and what the planner calls it
VARIANTS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "fp32 AdamW, packed": {"strategies": ["Packing()"]},
    "bf16 autocast, packed": {"args": {"bf16": True}, "strategies": ["Packing()"]},
    "24-bit masters, clipped": {"strategies": ["Packing()", "LowBitAdamW()"]},
    "24-bit masters, 8-bit gradients, clipped": {
        "strategies": ["Packing()", "LowBitAdamW()", "GradientRelease('kept8')"],
    },
    "24-bit masters, 8-bit gradients, clipped, fused, graphs": {
        "strategies": [
            "Packing()", "FusedLayers()", "LowBitAdamW()", "GradientRelease('kept8')",
            "CudaGraphs()",
        ],
    },
    "24-bit masters, gradients on the host, clipped": {
        "strategies": ["Packing()", "LowBitAdamW()", "GradientRelease('host')"],
    },
    "24-bit masters of fp16, clipped": {
        "strategies": ["Packing()", "LowBitAdamW(dtype='float16')"],
    },
    "optimizer on the host, bf16 weights": {
        "strategies": ["Packing()", "OptimizerOffload(dtype='bfloat16')"],
    },
    "16-bit stochastic, clipped": {"strategies": ["Packing()", "LowBitAdamW(16)"]},
    "16-bit stochastic, 8-bit gradients, clipped": {
        "strategies": ["Packing()", "LowBitAdamW(16)", "GradientRelease('kept8')"],
    },
    "fp32 AdamW, not clipped": {"args": {"max_grad_norm": 0.0}},
    "Adafactor": {"args": {"optim": "adafactor"}},
    "frozen encoder, 2e-5": {"freeze": True, "args": {"learning_rate": 2e-5}},
    "frozen encoder, 1e-3": {"freeze": True, "args": {"learning_rate": 1e-3}},
    "length 32": {"length": 32},
    # What cards without bfloat16 do.
    STOCK: {"stock": True},
    "fp16 autocast, packed": {"args": {"fp16": True}, "strategies": ["Packing()"]},
    "24-bit masters of fp16, clipped, fused": {
        "strategies": ["Packing()", "FusedLayers()", "LowBitAdamW(dtype='float16')"],
    },
    "16-bit stochastic of fp16, 8-bit gradients, clipped, fused, graphs": {
        "strategies": [
            "Packing()", "FusedLayers()", "LowBitAdamW(16, 'float16')", "GradientRelease('kept8')",
            "CudaGraphs()",
        ],
    },
}  # fmt: skip
GROUPS: dict[str, tuple[str, ...]] = {
    "no-bf16": (
        STOCK, "24-bit masters of fp16, clipped, fused", "fp16 autocast, packed",
        "fp32 AdamW, packed", "16-bit stochastic of fp16, 8-bit gradients, clipped, fused, graphs",
    ),
}  # fmt: skip
"""Names for several variants."""
T_95 = {
    1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23,
    11: 2.20, 12: 2.18, 13: 2.16, 14: 2.14, 15: 2.13, 16: 2.12, 17: 2.11, 18: 2.10, 19: 2.09,
}  # fmt: skip
"""Student's t for a 95 % interval, by degrees of freedom."""


def split(
    table: Path, seed: int, share: float = 0.2, most: int | None = None
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows to train on and a `share` to score, each class in the same proportion."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["review"]]
    if most:
        rows = rows[:: max(len(rows) // most, 1)][:most]
    draw = random.Random(seed)
    train: list[dict[str, str]] = []
    test: list[dict[str, str]] = []
    for label in ("0", "1"):
        of_class = [row for row in rows if row["label"] == label]
        draw.shuffle(of_class)
        cut = int(len(of_class) * share)
        test += of_class[:cut]
        train += of_class[cut:]
    draw.shuffle(train)
    return train, test


def run_seed(folder: str, rate: float, seed: int, table: Path, options: argparse.Namespace) -> None:
    """Every variant of one model and seed, one after the other, a line of JSON each."""
    import torch
    import transformers
    from sklearn.metrics import accuracy_score, f1_score
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from memfit import BudgetTrainer

    transformers.utils.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = split(table, seed, options.test_share, options.rows)

    def encode(rows: list[dict[str, str]], length: int) -> list[dict[str, Any]]:
        ids = tokenizer([r["review"] for r in rows], max_length=length, truncation=True)
        return [
            {"input_ids": one, "labels": int(row["label"])}
            for one, row in zip(ids["input_ids"], rows, strict=True)
        ]

    for name in options.variants:
        variant = VARIANTS[name]
        train, test = (encode(part, variant.get("length", 128)) for part in parts)
        transformers.set_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        if variant.get("freeze"):
            model.base_model.requires_grad_(False)
        arguments = {
            "output_dir": "/tmp/quality", "per_device_train_batch_size": 32, "seed": seed,
            "num_train_epochs": options.epochs, "learning_rate": rate, "weight_decay": 0.01,
            "report_to": "none", "save_strategy": "no", "logging_steps": 10_000,
            "per_device_eval_batch_size": 128, "disable_tqdm": True, **variant.get("args", {}),
        }  # fmt: skip
        started = time.perf_counter()
        given: dict[str, Any] = {
            "model": model, "args": transformers.TrainingArguments(**arguments),
            "train_dataset": train, "data_collator": collate,
        }  # fmt: skip
        if variant.get("stock"):
            trainer: Any = transformers.Trainer(**given)
        else:
            strategies = [made(text) for text in variant.get("strategies", [])]
            trainer = BudgetTrainer(**given, strategies=strategies)
        trainer.train()
        predicted = trainer.predict(test).predictions.argmax(-1)
        labels = [row["labels"] for row in test]
        found = {
            "variant": name, "seed": seed, "f1": f1_score(labels, predicted),
            "accuracy": accuracy_score(labels, predicted),
            "seconds": time.perf_counter() - started, "skipped_steps": skipped_steps(trainer),
        }  # fmt: skip
        print("RESULT " + json.dumps(found), flush=True)


def skipped_steps(trainer: Any) -> int | None:
    """The steps that an overflow of float16 left out; None without a loss scale of memfit's."""
    scale = getattr(getattr(getattr(trainer, "setup", None), "sink", None), "loss_scale", None)
    return None if scale is None else int(scale.skipped_steps)


def interval(differences: list[float]) -> dict[str, float]:
    """Mean of paired differences and its 95 % interval, in points of F1."""
    count = len(differences)
    mean = sum(differences) / count
    if count < 2:
        return {"mean": 100 * mean}
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / (count - 1))
    half = T_95.get(count - 1, 1.96) * spread / math.sqrt(count)
    return {"mean": 100 * mean, "low": 100 * (mean - half), "high": 100 * (mean + half)}


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """F1 by model and variant, and the paired difference to fp32 AdamW, the stock Trainer's if
    it was run.
    """
    table = []
    reference = STOCK if any(run["variant"] == STOCK for run in runs) else BASELINE
    for model in dict.fromkeys(run["model"] for run in runs):
        of_model = [run for run in runs if run["model"] == model]
        base = {run["seed"]: run["f1"] for run in of_model if run["variant"] == reference}
        for variant in VARIANTS:
            found = {run["seed"]: run["f1"] for run in of_model if run["variant"] == variant}
            if not found:
                continue
            paired = [found[seed] - base[seed] for seed in found if seed in base]
            row: dict[str, Any] = {"model": model, "variant": variant, "seeds": len(found)}
            row["f1"] = sum(found.values()) / len(found)
            row["points_from_baseline"] = interval(paired) if paired else None
            table.append(row)
    return table


def is_wide(row: dict[str, Any], points: float) -> bool:
    """Whether the interval of a difference is wider than that."""
    found = row["points_from_baseline"]
    return found is not None and found.get("high", points) - found.get("low", 0.0) > points


class Go:
    """One call: what is due, what was found, until when."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.until = time.monotonic() + options.deadline if options.deadline else None
        self.result: dict[str, Any] = {"machine": stamp(), "test_share": options.test_share}
        self.result["runs"] = []
        if options.out.exists():
            self.result = json.loads(options.out.read_text())
        self._lock = threading.Lock()

    def job(self, model: str, seed: int) -> None:
        """The variants of one model and seed that are not in the file yet, in a process."""
        name, _, where = model.partition("=")
        options, left = self.options, self.left_seconds()
        done = {(run["model"], run["seed"], run["variant"]) for run in self.result["runs"]}
        due = [v for v in options.variants if (name, seed, v) not in done]
        if not due or left <= 0:
            return
        words = ["--one", *where.rsplit(":", 2), str(seed), "--variants", *due]
        words += ["--test-share", str(options.test_share), "--epochs", str(options.epochs)]
        words += ["--rows", str(options.rows)] if options.rows else []
        threads = max((os.cpu_count() or 1) // options.jobs, 1)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                [sys.executable, __file__, *words], env=environment, stdout=subprocess.PIPE,
                stderr=errors, text=True,
            ) as process,
        ):  # fmt: skip
            assert process.stdout is not None
            limit = threading.Timer(min(left, threading.TIMEOUT_MAX), process.kill)
            limit.start()
            for line in process.stdout:
                if line.startswith("RESULT "):
                    self.add({"model": name, **json.loads(line.removeprefix("RESULT "))})
            limit.cancel()
            process.wait()
            errors.seek(0)
            if process.returncode > 0:
                print(f"{name} seed {seed} FAILED\n{errors.read()[-1500:]}", flush=True)

    def left_seconds(self) -> float:
        """Until the deadline."""
        return math.inf if self.until is None else self.until - time.monotonic()

    def add(self, run: dict[str, Any]) -> None:
        """Writes the file anew, whole or not at all."""
        with self._lock:
            self.result["runs"].append(run)
            self.result["summary"] = summarize(self.result["runs"])
            part = self.options.out.with_name(self.options.out.name + ".part")
            part.write_text(json.dumps(self.result, indent=1))
            part.replace(self.options.out)
        print("{model} seed {seed} {variant}: {f1:.4f}".format(**run), flush=True)

    def wide_models(self) -> list[str]:
        """The models with an interval that is too wide."""
        wide = {
            row["model"]
            for row in summarize(self.result["runs"])
            if is_wide(row, self.options.narrow) and row["variant"] in self.options.variants
        }
        return [model for model in self.options.model if model.partition("=")[0] in wide]


def seeds_of(text: str) -> range:
    """'5' is the first five, '3-6' is four of them."""
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(int(first))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", action="append", default=[], help="NAME=FOLDER:RATE:TABLE")
    add("--seeds", type=seeds_of, default=range(5), help="how many, or first-last")
    add("--variants", nargs="*", default=[one for one in VARIANTS if one != STOCK])
    add("--test-share", type=float, default=0.2, help="of the rows, to score")
    add("--epochs", type=float, default=2)
    add("--rows", type=int, help="of the table, for a try")
    add("--narrow", type=float, help="more seeds while an interval is wider, in points")
    add("--most-seeds", type=int, default=12)
    add("--deadline", type=float, help="seconds after which nothing runs any more")
    add("--jobs", type=int, default=1)
    add("--out", type=Path, default=Path("quality.json"))
    add("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.variants = [one for name in options.variants for one in GROUPS.get(name, (name,))]
    if options.one:
        folder, rate, table, seed = options.one
        run_seed(folder, float(rate), int(seed), Path(table), options)
        return
    go = Go(options)
    with ThreadPoolExecutor(options.jobs) as pool:

        def train(models: list[str], seeds: range) -> None:
            list(pool.map(lambda one: go.job(*one), [(m, s) for s in seeds for m in models]))

        train(options.model, options.seeds)
        seed = options.seeds.stop
        while options.narrow and seed < options.most_seeds and go.left_seconds() > 0:
            if not (models := go.wide_models()):
                break
            more = range(seed, min(seed + max(options.jobs // 3, 1), options.most_seeds))
            train(models, more)
            seed = more.stop
    for row in summarize(go.result["runs"]):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
