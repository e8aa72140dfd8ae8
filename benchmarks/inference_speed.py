"""Rows a second of memfit's answers and of transformers' pipeline, on a CPU, in one run.

    python benchmarks/inference_speed.py --table waimai_10k.csv --model albert-tiny-zh --out F.json

The same model, rows and truncation. Each round takes all of them forwards and backwards (A B B A),
so that a machine that gets slower is unfair to none; a ratio is of two times of the same round.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _machine import stamp

BATCH_SIZES = (1, 8, 32, 64)


def write_rows(table: Path, count: int, target: Path) -> list[str]:
    """Writes reviews from the whole table, evenly; returns their texts."""
    with table.open(encoding="utf-8", newline="") as file:
        kept = [row for row in csv.DictReader(file) if row["review"].strip()]
    kept = kept[:: max(len(kept) // count, 1)][:count]
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ("label", "review"))
        writer.writeheader()
        writer.writerows(kept)
    return [row["review"] for row in kept]


def ways(model: str, table: Path, count: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """What is timed, by name; each answers all rows."""
    import torch
    import transformers

    import memfit
    from memfit.config import DataConfig
    from memfit.run.inference import evaluate_table

    rows = folder / "rows.csv"
    texts = write_rows(table, count, rows)
    transformers.set_seed(0)
    made = transformers.AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=2, dtype=torch.float32
    )
    made.config.id2label = {0: "0", 1: "1"}
    made.save_pretrained(folder / "model")
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder / "model")
    classifier = memfit.load(folder / "model", device="cpu", max_length=128)
    pipe = transformers.pipeline(
        "text-classification", model=classifier.model, tokenizer=classifier.tokenizer, device="cpu"
    )

    def stock(batch_size: int) -> list[Any]:
        return list(pipe(texts, batch_size=batch_size, truncation=True, max_length=128))

    config = DataConfig.build(path=str(rows))
    timed: dict[str, Callable[[], Any]] = {
        "predict --file": lambda: classifier.predict_file(rows, folder / "answers.csv"),
        "evaluate": lambda: evaluate_table(classifier, config),
    }
    for size in BATCH_SIZES:
        timed[f"pipeline, {size}"] = lambda size=size: stock(size)
    check(classifier.predict(texts[:50]), stock(1)[:50])
    return timed


def check(ours: list[Any], theirs: list[dict[str, Any]]) -> None:
    """Both answer the same."""
    for one, other in zip(ours, theirs, strict=True):
        if one.label != other["label"] or abs(one.score - other["score"]) > 1e-4:
            raise SystemExit(f"memfit says {one}, the pipeline {other}")


def measure(timed: dict[str, Callable[[], Any]], rounds: int) -> list[dict[str, Any]]:
    """Seconds of each by the clock and of the processor, both times of a round added."""
    found = []
    for _ in range(rounds):
        seconds = {name: [0.0, 0.0] for name in timed}
        for name in (*timed, *reversed(timed)):
            start, used = time.perf_counter(), time.process_time()
            timed[name]()
            seconds[name][0] += time.perf_counter() - start
            seconds[name][1] += time.process_time() - used
        found.append({name: {"wall": wall, "cpu": cpu} for name, (wall, cpu) in seconds.items()})
    return found


def main() -> None:
    import torch
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True, help="with columns label and review")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("inference_speed.json"))
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        timed = ways(options.model, options.table, options.rows, Path(folder))
        for run in timed.values():  # the first run of each loads and compiles
            run()
        rounds = measure(timed, options.rounds)
    result = {
        "machine": stamp(), "load": os.getloadavg()[0], "model": Path(options.model).name,
        "table": options.table.name, "rows": options.rows, "threads": torch.get_num_threads(),
        "rounds": rounds,
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in timed:
        ratio = statistics.median(one[name]["cpu"] / one["predict --file"]["cpu"] for one in rounds)
        rate = 2 * options.rows / min(one[name]["wall"] for one in rounds)
        print(f"{name}: {rate:.0f} rows/s, {ratio:.2f} times the time of predict --file")


if __name__ == "__main__":
    main()
