"""Rows for every task, and collators that bring them together as people do."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from differential.models import LABELS, LONGEST, MAX_LENGTH, VOCABULARY

Row = dict[str, Any]
Collator = Callable[[Sequence[Row]], dict[str, torch.Tensor]]
CHOICES = 3
_IGNORED = -100
_LABEL_NAMES = ("labels", "start_positions", "end_positions")


def rows_of(task: str, count: int, seed: int, *, ignored: bool = False) -> list[Row]:
    """Texts of 3 to 20 tokens; where `ignored`, some labels are -100."""
    draw = random.Random(seed)
    made = [_row(task, draw) for _ in range(count)]
    if ignored and task == "single":
        for row in made[1::3]:
            row["labels"] = _IGNORED
    return made


def _row(task: str, draw: random.Random) -> Row:
    def text() -> list[int]:
        return [draw.randrange(4, VOCABULARY) for _ in range(draw.randint(3, LONGEST))]

    ids = text()
    if task == "choice":
        return {"input_ids": [text() for _ in range(CHOICES)], "labels": draw.randrange(CHOICES)}
    if task == "question":
        start, end = sorted(draw.choices(range(len(ids)), k=2))
        return {"input_ids": ids, "start_positions": start, "end_positions": end}
    if task == "multi":
        return {"input_ids": ids, "labels": [float(draw.random() < 0.5) for _ in range(LABELS)]}
    if task == "regression":
        return {"input_ids": ids, "labels": draw.gauss(0, 1)}
    if task == "token":
        return {"input_ids": ids, "labels": [token % LABELS for token in ids]}
    if task == "masked_lm":
        hidden = draw.sample(range(len(ids)), max(len(ids) // 3, 1))
        labels = [token if place in hidden else _IGNORED for place, token in enumerate(ids)]
        return {"input_ids": ids, "labels": labels}
    if task == "causal_lm":
        prompt = draw.randint(0, len(ids) // 2)
        return {"input_ids": ids, "labels": [_IGNORED] * prompt + ids[prompt:]}
    return {"input_ids": ids, "labels": draw.randrange(LABELS)}


class Stream(IterableDataset[Row]):
    """Rows that come one after the other, nobody knows how many."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def collator_of(kind: str, pad: int) -> Collator:
    """dynamic, max_length, left, multiple (of eight) or maskless."""
    return functools.partial(collate, kind=kind, pad=pad)


def collate(rows: Sequence[Row], *, kind: str, pad: int) -> dict[str, torch.Tensor]:
    """Padded texts, with a mask unless the collator is maskless."""
    flat = [ids for row in rows for ids in _texts(row)]
    width = max(map(len, flat))
    if kind == "max_length":
        width = MAX_LENGTH
    if kind == "multiple":
        width = -(-width // 8) * 8
    left = kind == "left"
    batch = {"input_ids": _padded(flat, width, pad, left=left)}
    if kind != "maskless":
        batch["attention_mask"] = _padded([[1] * len(ids) for ids in flat], width, 0, left=left)
    if isinstance(rows[0]["input_ids"][0], list):
        batch = {name: value.view(len(rows), -1, width) for name, value in batch.items()}
    for name in _LABEL_NAMES:
        if name in rows[0]:
            labels = [row[name] for row in rows]
            per_token = isinstance(labels[0], list) and isinstance(labels[0][0], int)
            batch[name] = (
                _padded(labels, width, _IGNORED, left=left) if per_token else torch.tensor(labels)
            )
    return batch


def _texts(row: Mapping[str, Any]) -> list[list[int]]:
    ids = row["input_ids"]
    return ids if isinstance(ids[0], list) else [ids]


def _padded(rows: Sequence[list[int]], width: int, fill: int, *, left: bool) -> torch.Tensor:
    padding = [[fill] * (width - len(row)) for row in rows]
    return torch.tensor(
        [pad + row if left else row + pad for row, pad in zip(rows, padding, strict=True)]
    )
