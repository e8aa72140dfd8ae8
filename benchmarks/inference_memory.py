"""Peak memory of `memfit predict --file`, which must not grow with the rows of the file.

    python benchmarks/inference_memory.py --out benchmarks/results/inference_memory.json

Each case is a command of its own, with a classifier of one layer of 8 and random weights: what it
takes is the libraries, the windows of rows and nothing else, and two million rows take minutes.
Parquet files are one row group, which is what fills the memory of a reader that reads groups.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _machine import stamp

CHARACTERS = "服务人员都很亲切不早餐难吃房间干净位置方便"
ENDINGS = ("csv", "parquet")
MOST_CHARACTERS = 12


def texts() -> Iterator[str]:
    """Endless short texts, the same in every run."""
    chance = random.Random(0)
    while True:
        yield "".join(chance.choices(CHARACTERS, k=chance.randint(3, MOST_CHARACTERS)))


def write_table(path: Path, count: int) -> None:
    """Numbered texts, in the format that the ending names."""
    rows = enumerate(itertools.islice(texts(), count))
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        numbers, written = zip(*rows, strict=True)
        table = pyarrow.table({"id": numbers, "text": written})
        parquet.write_table(table, path, row_group_size=count)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.writer(file)
            writer.writerow(("id", "text"))
            writer.writerows(rows)
        else:
            file.writelines(
                json.dumps({"id": number, "text": text}, ensure_ascii=False) + "\n"
                for number, text in rows
            )


def write_model(folder: Path) -> None:
    """A classifier that answers as fast as rows can be read."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    tokens = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *CHARACTERS)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=8, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)
    BertTokenizer(vocab=vocabulary, model_max_length=32).save_pretrained(folder)


def predict(model: Path, table: Path, target: Path) -> dict[str, Any]:
    """The command's peak resident memory and its seconds.

    `ru_maxrss` of a child begins with what its parent held when it was started, so the peak is read
    from the child's own counter while it runs; that counter only rises.
    """
    words = ["predict", str(model), "--file", str(table), "--output", str(target)]
    began, peak_bytes = time.perf_counter(), 0
    with subprocess.Popen(
        [sys.executable, "-m", "memfit", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
            peak_bytes = int(found[1]) * 1024 if found else peak_bytes
            time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"memfit {' '.join(words)} ended with {process.returncode}")
    return {
        "peak_bytes": peak_bytes,
        "wall_seconds": time.perf_counter() - began,
        "file_bytes": table.stat().st_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000, 2_000_000])
    parser.add_argument("--endings", nargs="+", default=ENDINGS)
    parser.add_argument("--out", type=Path, default=Path("inference_memory.json"))
    options = parser.parse_args()
    cases = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        for count, ending in itertools.product(options.rows, options.endings):
            table = folder / f"rows.{ending}"
            write_table(table, count)
            found = predict(folder / "model", table, folder / "labelled.csv")
            cases.append({"ending": ending, "rows": count, **found})
            peak = found["peak_bytes"] / 2**20
            print(
                f"{ending}, {count:,} rows: {peak:.0f} MiB, {found['wall_seconds']:.0f} s",
                flush=True,
            )
            result = {"machine": stamp(), "load": os.getloadavg()[0], "cases": cases}
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
