"""How long the rows of a dataset are, whatever kind of dataset it is."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

_CHUNK_ROWS = 10_000


def has_rows(dataset: Any) -> bool:
    """Whether rows can be looked at by their number; a stream may have a length, and no rows."""
    if isinstance(dataset, IterableDataset):
        return False
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and len(dataset) > 0


def row_lengths(dataset: Any) -> list[int]:
    """Tokens of every row; empty where rows cannot be looked at."""
    if hasattr(dataset, "column_names") and hasattr(dataset, "__len__"):
        dataset = _as_python(dataset)
        if "length" in dataset.column_names:
            return [int(length) for length in dataset["length"]]
        if "input_ids" in dataset.column_names:
            chunks = range(0, len(dataset), _CHUNK_ROWS)
            return [
                len(row)
                for start in chunks
                for row in dataset[start : start + _CHUNK_ROWS]["input_ids"]
            ]
    elif has_rows(dataset):
        rows = (dataset[index] for index in range(len(dataset)))
        return [len(row["input_ids"]) for row in rows if isinstance(row, Mapping)]
    return []


def _as_python(dataset: Any) -> Any:
    """Rows as lists, whatever tensors they are made into; a transform of the user's stays."""
    kind = getattr(dataset, "format", {}).get("type")
    return dataset.with_format(None) if kind not in (None, "custom") else dataset


def longest_row(dataset: Any, model: nn.Module) -> int:
    """Tokens of the longest row; what the model can take at most where rows cannot be looked at."""
    if lengths := row_lengths(dataset):
        return max(lengths)
    config = getattr(model, "config", None)
    return int(getattr(config, "max_position_embeddings", None) or 512)


def largest_batch(dataset: Any, model: nn.Module, rows: int) -> int:
    """Tokens of the largest batch of so many rows that the shuffle can draw."""
    if lengths := row_lengths(dataset):
        return sum(heapq.nlargest(rows, lengths))
    return rows * longest_row(dataset, model)
