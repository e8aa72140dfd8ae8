"""What each strategy does to F1, on really pre-trained models, with paired seeds and splits.

    python benchmarks/quality.py --out F.json --jobs 8 \
        --model m3e-small=FOLDER:2e-5:ChnSentiCorp_htl_all.csv \
        --model albert-tiny=FOLDER:1e-4:ChnSentiCorp_htl_all.csv \
        --model minilm=FOLDER:5e-5:movies.csv

A table has the columns `label` (0 or 1) and `review`.

For every model and seed one split (80/20, stratified) and one order of batches serve all variants,
so that differences are paired. Two epochs, effective batch 32, length 128, linear decay. A run
found in the result file is not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _machine import stamp
from bert_large import collate, made

BASELINE = "fp32 AdamW"
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
    "24-bit masters, two passes, clipped": {
        "strategies": ["Packing()", "LowBitAdamW()", "GradientRelease('two_pass')"],
    },
    "24-bit masters of fp16, clipped": {
        "strategies": ["Packing()", "LowBitAdamW(dtype='float16')"],
    },
    "optimizer on the host, bf16 weights": {
        "strategies": ["Packing()", "OptimizerOffload(dtype='bfloat16')"],
    },
    "24-bit masters, release": {
        "args": {"max_grad_norm": 0.0},
        "strategies": ["Packing()", "LowBitAdamW()", "GradientRelease()"],
    },
    "24-bit masters, release, clipped by a predicted norm": {
        "strategies": ["Packing()", "LowBitAdamW()", "GradientRelease(clip='predicted')"],
    },
    "16-bit stochastic, clipped": {"strategies": ["Packing()", "LowBitAdamW(16)"]},
    "16-bit stochastic, 8-bit gradients, clipped": {
        "strategies": ["Packing()", "LowBitAdamW(16)", "GradientRelease('kept8')"],
    },
    "16-bit stochastic, release": {
        "args": {"max_grad_norm": 0.0},
        "strategies": ["Packing()", "LowBitAdamW(16)", "GradientRelease()"],
    },
    "fp32 AdamW, not clipped": {"args": {"max_grad_norm": 0.0}},
    "Adafactor": {"args": {"optim": "adafactor"}},
    "frozen encoder, 2e-5": {"freeze": True, "args": {"learning_rate": 2e-5}},
    "frozen encoder, 1e-3": {"freeze": True, "args": {"learning_rate": 1e-3}},
    "length 32": {"length": 32},
}  # fmt: skip
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Student's t for a 95 % interval, by degrees of freedom."""


def split(table: Path, seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Four fifths to train on, a fifth to test, each class in the same proportion."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["review"]]
    draw = random.Random(seed)
    train: list[dict[str, str]] = []
    test: list[dict[str, str]] = []
    for label in ("0", "1"):
        of_class = [row for row in rows if row["label"] == label]
        draw.shuffle(of_class)
        cut = len(of_class) // 5
        test += of_class[:cut]
        train += of_class[cut:]
    draw.shuffle(train)
    return train, test


def run_seed(folder: str, rate: float, seed: int, table: Path, names: list[str]) -> None:
    """Every variant of one model and seed, one after the other, a line of JSON each."""
    import torch
    import transformers
    from sklearn.metrics import accuracy_score, f1_score
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from memfit import BudgetTrainer

    transformers.utils.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = split(table, seed)

    def encode(rows: list[dict[str, str]], length: int) -> list[dict[str, Any]]:
        ids = tokenizer([r["review"] for r in rows], max_length=length, truncation=True)
        return [
            {"input_ids": one, "labels": int(row["label"])}
            for one, row in zip(ids["input_ids"], rows, strict=True)
        ]

    for name in names:
        variant = VARIANTS[name]
        train, test = (encode(part, variant.get("length", 128)) for part in parts)
        transformers.set_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        if variant.get("freeze"):
            model.base_model.requires_grad_(False)
        arguments = {
            "output_dir": "/tmp/quality", "per_device_train_batch_size": 32, "seed": seed,
            "num_train_epochs": 2, "learning_rate": rate, "weight_decay": 0.01,
            "report_to": "none", "save_strategy": "no", "logging_steps": 10_000,
            "per_device_eval_batch_size": 128, "disable_tqdm": True, **variant.get("args", {}),
        }  # fmt: skip
        started = time.perf_counter()
        trainer = BudgetTrainer(
            model, transformers.TrainingArguments(**arguments), train_dataset=train,
            data_collator=collate,
            strategies=[made(text) for text in variant.get("strategies", [])],
        )  # fmt: skip
        trainer.train()
        predicted = trainer.predict(test).predictions.argmax(-1)
        labels = [row["labels"] for row in test]
        found = {
            "variant": name, "seed": seed, "f1": f1_score(labels, predicted),
            "accuracy": accuracy_score(labels, predicted),
            "seconds": time.perf_counter() - started,
        }  # fmt: skip
        print("RESULT " + json.dumps(found), flush=True)


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
    """F1 by model and variant, and the paired difference to fp32 AdamW."""
    table = []
    for model in dict.fromkeys(run["model"] for run in runs):
        of_model = [run for run in runs if run["model"] == model]
        base = {run["seed"]: run["f1"] for run in of_model if run["variant"] == BASELINE}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", default=[], help="NAME=FOLDER:RATE:TABLE")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("quality.json"))
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        folder, rate, table, seed = options.one
        run_seed(folder, float(rate), int(seed), Path(table), options.variants)
        return
    result: dict[str, Any] = {"machine": stamp(), "runs": []}
    if options.out.exists():
        result = json.loads(options.out.read_text())
    done = {(run["model"], run["seed"], run["variant"]) for run in result["runs"]}

    def job(model: str, seed: int) -> None:
        name, _, where = model.partition("=")
        folder, rate, table = where.rsplit(":", 2)
        due = [v for v in options.variants if (name, seed, v) not in done]
        command = [sys.executable, __file__, "--variants", *due]
        if not due:
            return
        with subprocess.Popen(
            [*command, "--one", folder, rate, table, str(seed)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("RESULT "):
                    run = json.loads(line.removeprefix("RESULT "))
                    result["runs"].append({"model": name, **run})
                    print(f"{name} seed {seed} {run['variant']}: {run['f1']:.4f}", flush=True)
                    result["summary"] = summarize(result["runs"])
                    options.out.write_text(json.dumps(result, indent=1))
            errors = process.stderr.read() if process.stderr else ""
        if process.returncode:
            print(f"{name} seed {seed} FAILED\n{errors[-1500:]}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        for seed in range(options.seeds):
            for model in options.model:
                pool.submit(job, model, seed)
    for row in summarize(result["runs"]):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
