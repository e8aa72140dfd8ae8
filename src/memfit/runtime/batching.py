"""One effective batch into micro-batches: which rows together, and without their padding.

Nothing here changes what is computed. Rows are sorted by their real length so that short texts
do not carry the padding of long ones, and columns that are padding in every row of a
micro-batch are left out wherever the model cannot see them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from memfit.errors import ConfigError

Batch = dict[str, Any]
Span = tuple[int, int]

IGNORED_LABEL = -100
"""The label that torch's and transformers' losses leave out."""

_SEQUENCE_INPUTS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds"}
)


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """What may be on the device at once; without a limit, the whole effective batch.

    Tokens count padding (rows x the longest row), unless rows are packed and have none.
    A single row is never refused.
    """

    max_rows: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ConfigError(f"{name} of a micro-batch must be at least 1, not {limit}")


class Trim(StrEnum):
    """Which padding columns may be left out without the model noticing."""

    NONE = "none"
    RIGHT = "right"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of the effective batch, by their index there, and their inputs."""

    rows: tuple[int, ...]
    inputs: Batch


def trimming_for(model: nn.Module) -> Trim:
    """What padding this architecture cannot see.

    A convolution looks at its neighbours, padding included. A table of absolute positions
    counts from the first column, so what is cut on the left would renumber the text.
    """
    if any(isinstance(module, nn.Conv1d | nn.Conv2d) for module in model.modules()):
        return Trim.NONE
    for name, module in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if isinstance(module, nn.Embedding) and ("position" in last or last == "wpe"):
            return Trim.RIGHT
    return Trim.BOTH


def split(
    batch: Mapping[str, Any],
    micro_batching: MicroBatching,
    trim: Trim = Trim.RIGHT,
    *,
    packed: bool = False,
) -> list[MicroBatch]:
    """The effective batch as micro-batches, the longest rows first.

    A batch that fits whole keeps its order and only loses columns that are all padding.
    Where micro-batches are `packed`, short rows do not count as long as the longest one.
    """
    count = row_count(batch)
    spans = _spans(batch, trim)
    groups = group_rows([stop - start for start, stop in spans], micro_batching, packed=packed)
    if len(groups) <= 1:
        groups = [list(range(count))]
    return [_micro_batch(batch, count, group, spans) for group in groups]


def lengths_of(batch: Mapping[str, Any], trim: Trim) -> list[int]:
    """Columns that each row of a batch needs."""
    return [stop - start for start, stop in _spans(batch, trim)]


def row_count(batch: Mapping[str, Any]) -> int:
    """How many rows a batch has, read from its first tensor that has rows."""
    for value in (batch.get("input_ids"), batch.get("labels"), *batch.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return len(value)
    return 0


def group_rows(lengths: Sequence[int], limits: MicroBatching, *, packed: bool) -> list[list[int]]:
    """Rows in groups within the limits, longest first: the first row of a group is its width.

    Packed groups are of about the same size, in as few of them as there must be: a small rest would
    cost a whole pass of kernels, and a graph of its own.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups = _filled(order, lengths, limits, packed=packed)
    if packed and len(groups) > 1:
        return _even(order, lengths, limits, len(groups)) or groups
    return groups


def _filled(
    order: Sequence[int], lengths: Sequence[int], limits: MicroBatching, *, packed: bool
) -> list[list[int]]:
    """One group after the other, each until it is full."""
    groups: list[list[int]] = []
    width = tokens = 0
    for row in order:
        size = len(groups[-1]) + 1 if groups else 0
        tokens = tokens + lengths[row] if packed else size * width
        full = (limits.max_rows is not None and size > limits.max_rows) or (
            limits.max_tokens is not None and tokens > limits.max_tokens
        )
        if not groups or full:
            groups.append([])
            width = tokens = lengths[row]
        groups[-1].append(row)
    return groups


def _even(
    order: Sequence[int], lengths: Sequence[int], limits: MicroBatching, count: int
) -> list[list[int]] | None:
    """So many groups, each row in the smallest of them; None where one would be too large."""
    groups: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for row in order:
        least = min(range(count), key=tokens.__getitem__)
        groups[least].append(row)
        tokens[least] += lengths[row]
    most_tokens, most_rows = max(tokens), max(map(len, groups))
    if limits.max_tokens is not None and most_tokens > limits.max_tokens:
        return None
    return None if limits.max_rows is not None and most_rows > limits.max_rows else groups


def _spans(batch: Mapping[str, Any], trim: Trim) -> list[Span]:
    """For every row the columns [start, stop) outside of which nothing is lost."""
    mask, width = batch.get("attention_mask"), _width(batch)
    whole = [(0, width)] * row_count(batch)
    if trim is Trim.NONE or not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return whole
    if not _only_padding_is_cut(batch, mask):
        return whole
    real = mask.ne(0).int()
    starts = real.argmax(dim=1).tolist() if trim is Trim.BOTH else [0] * len(real)
    stops = (width - real.flip(1).argmax(dim=1)).tolist()
    # A row without a single real token keeps its width: what a model makes of it may depend on it.
    empty = real.sum(dim=1).eq(0).tolist()
    return [
        (0, width) if nothing else (start, stop)
        for start, stop, nothing in zip(starts, stops, empty, strict=True)
    ]


def _width(batch: Mapping[str, Any]) -> int:
    for name in ("attention_mask", "input_ids", "inputs_embeds"):
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            return value.shape[1]
    return 1


def _only_padding_is_cut(batch: Mapping[str, Any], mask: torch.Tensor) -> bool:
    """Whether every tensor as wide as the texts is one whose columns are known to be tokens.

    Sixteen labels beside texts of sixteen tokens, or an input we do not know: the width stays.
    """
    for name, value in batch.items():
        if name in _SEQUENCE_INPUTS or not isinstance(value, torch.Tensor):
            continue
        if value.dim() < 2 or value.shape[1] != mask.shape[1]:
            continue
        token_labels = name == "labels" and value.shape == mask.shape
        if not token_labels or bool((value[mask.eq(0)] != IGNORED_LABEL).any()):
            return False
    return True


def _micro_batch(
    batch: Mapping[str, Any], count: int, rows: list[int], spans: list[Span]
) -> MicroBatch:
    width = _width(batch)
    start = min((spans[row][0] for row in rows), default=0)
    stop = max((spans[row][1] for row in rows), default=width)
    inputs = dict(batch)
    if rows != list(range(count)):
        inputs = {name: _rows_of(value, rows, count) for name, value in inputs.items()}
    if (start, stop) != (0, width):
        inputs = {
            name: _columns_of(name, value, start, stop, width) for name, value in inputs.items()
        }
    return MicroBatch(tuple(rows), inputs)


def _rows_of(value: Any, rows: list[int], count: int) -> Any:
    """These rows of whatever has one entry a row, however nested; the rest is passed on whole."""
    if isinstance(value, torch.Tensor):
        return value[rows] if value.dim() > 0 and len(value) == count else value
    if isinstance(value, Mapping):
        return {name: _rows_of(part, rows, count) for name, part in value.items()}
    if isinstance(value, list | tuple):
        whole = list(value)
        if _has_tensor(whole):
            whole = [_rows_of(part, rows, count) for part in whole]
        elif len(whole) == count:
            whole = [whole[row] for row in rows]
        return tuple(whole) if isinstance(value, tuple) else whole
    return value


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(_has_tensor(part) for part in value)
    return isinstance(value, torch.Tensor)


def _columns_of(name: str, value: Any, start: int, stop: int, width: int) -> Any:
    is_tokens = name in _SEQUENCE_INPUTS or name == "labels"
    if not is_tokens or not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    return value[:, start:stop] if value.shape[1] == width else value
