"""Small tables for the data tests."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from memfit.config import DataConfig

GOOD = ["房间很大，床也舒服", "服務人員都很親切", "早餐好吃，下次再来", "位置方便，价格不贵"]
BAD = ["房间很脏，再也不来", "服務人員都不親切", "早餐难吃，空调太吵", "位置偏僻，价格很贵"]


def reviews(copies: int = 5) -> list[tuple[Any, str]]:
    """(label, text) rows, all texts different, half of them good."""
    rows = []
    for copy in range(copies):
        rows += [(1, f"{text}{copy}") for text in GOOD] + [(0, f"{text}{copy}") for text in BAD]
    return rows


def write_csv(
    path: Path,
    rows: Iterable[Sequence[Any]],
    header: Sequence[str] = ("label", "review"),
    encoding: str = "utf-8",
    delimiter: str = ",",
) -> Path:
    """As the csv module and Excel write it."""
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """One object a line."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def config(path: Path | str, **options: Any) -> DataConfig:
    """The defaults of a run, for one file."""
    return DataConfig(path=str(path), **options)
