"""Cuts an effective batch into micro-batches by rows or tokens, and joins their predictions.

Nothing here changes what is computed. For heads that are known not to see padding
(models/layer_stack.py) rows are sorted by their real length, so that short texts do not carry the
padding of long ones, and columns that are padding in every row of a micro-batch are left out. For
any other model a batch is cut by rows only, as wide as the collator made it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import nested_concat
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

from memfit.engine.packed_batch import IGNORED_LABEL
from memfit.errors import ConfigError
from memfit.models.layer_stack import reads_last_token, sees_padding

Batch = dict[str, Any]

Span = tuple[int, int]

TOKEN_INPUTS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds"}
)
"""Model inputs with one entry a token."""


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
                raise ConfigError(
                    "{name} of a micro-batch must be at least 1, not {limit}",
                    name=name,
                    limit=limit,
                )


class Trim(StrEnum):
    """Which padding columns may be left out without the model noticing."""

    NONE = "none"
    RIGHT = "right"
    BOTH = "both"
    COUNTED = "counted"
    """None is left out, but rows count by their real length: the model packs them inside."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of the effective batch, by their index there, and their inputs."""

    rows: tuple[int, ...]
    inputs: Batch


def trimming_for(model: nn.Module) -> Trim:
    """What padding this model is known not to see.

    A table of absolute positions counts from the first column, so what is cut on the left would
    renumber the text; and only heads that read the last token leave the first one alone.
    """
    if sees_padding(model):
        return Trim.NONE
    if not reads_last_token(model):
        return Trim.RIGHT
    for name, module in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if isinstance(module, nn.Embedding) and ("position" in last or last == "wpe"):
            return Trim.RIGHT
    return Trim.BOTH


def split(
    batch: Any,
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
    cut = spans if trim in (Trim.RIGHT, Trim.BOTH) else []
    return [_micro_batch(batch, count, group, cut) for group in groups]


def lengths_of(batch: Any, trim: Trim) -> list[int]:
    """Columns that each row of a batch needs."""
    return [stop - start for start, stop in _spans(batch, trim)]


def row_count(batch: Any) -> int:
    """How many rows a batch has, read from its first tensor that has rows."""
    named = _named(batch)
    for value in (named.get("input_ids"), named.get("labels"), *named.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return len(value)
        if isinstance(value, Mapping | list | tuple) and (count := row_count(value)):
            return count
    return 0


def _named(batch: Any) -> Mapping[Any, Any]:
    """A batch by the names of its parts; a tuple's are their places."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, list | tuple):
        return dict(enumerate(batch))
    return {0: batch}


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
    """Deals rows to this many groups, each to the smallest; None if a group gets too large."""
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


def _spans(batch: Any, trim: Trim) -> list[Span]:
    """The columns [start, stop) of each row; outside there is only padding."""
    named = _named(batch)
    mask, width = named.get("attention_mask"), _width(named)
    whole = [(0, width)] * row_count(batch)
    if trim is Trim.NONE or not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return whole
    if trim is not Trim.COUNTED and not _only_padding_is_cut(named, mask):
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


def _width(batch: Mapping[Any, Any]) -> int:
    """Tokens of a row with its padding: all of them where a row has several texts."""
    for name in ("attention_mask", "input_ids", "inputs_embeds"):
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            shape = value.shape[1:-1] if name == "inputs_embeds" else value.shape[1:]
            return math.prod(shape)
    return 1


def _only_padding_is_cut(batch: Mapping[Any, Any], mask: torch.Tensor) -> bool:
    """Whether every tensor as wide as the texts is one whose columns are known to be tokens.

    A label for every token, sixteen labels beside texts of sixteen tokens, or an input we do not
    know: the width stays.
    """
    for name, value in batch.items():
        if name in TOKEN_INPUTS or not isinstance(value, torch.Tensor):
            continue
        if value.dim() > 1 and value.shape[1] == mask.shape[1]:
            return False
    return True


def rows_of(batch: Any, rows: list[int]) -> Any:
    """These rows of a batch."""
    return _rows_of(batch, rows, row_count(batch))


def _micro_batch(batch: Any, count: int, rows: list[int], spans: list[Span]) -> MicroBatch:
    """These rows, cut to the columns of `spans` where there are any."""
    inputs = batch
    if rows != list(range(count)):
        inputs = _rows_of(inputs, rows, count)
    if not spans:
        return MicroBatch(tuple(rows), inputs)
    width = _width(_named(batch))
    start = min((spans[row][0] for row in rows), default=0)
    stop = max((spans[row][1] for row in rows), default=width)
    if (start, stop) != (0, width):
        inputs = {
            name: value[:, start:stop]
            if name in TOKEN_INPUTS
            and isinstance(value, torch.Tensor)
            and value.dim() > 1
            and value.shape[1] == width
            else value
            for name, value in inputs.items()
        }
    return MicroBatch(tuple(rows), inputs)


def _rows_of(value: Any, rows: list[int], count: int) -> Any:
    """These rows of whatever has one entry a row, however nested; the rest is passed on whole."""
    if isinstance(value, torch.Tensor):
        return value[rows] if value.dim() > 0 and len(value) == count else value
    if isinstance(value, Mapping):
        kind: Any = type(value)  # as the Trainer does when it moves a batch
        return kind({name: _rows_of(part, rows, count) for name, part in value.items()})
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


_CHUNK_ROWS = 10_000


def has_rows(dataset: Any) -> bool:
    """Whether rows can be looked at by their number; a stream may have a length, and no rows."""
    if isinstance(dataset, IterableDataset):
        return False
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and len(dataset) > 0


def row_lengths(dataset: Any) -> list[int]:
    """Tokens of every row; empty where rows cannot be looked at."""
    if hasattr(dataset, "column_names") and hasattr(dataset, "__len__"):
        kind = getattr(dataset, "format", {}).get("type", "custom")
        if kind not in (None, "custom"):  # rows as lists; a transform of the user's stays
            dataset = dataset.with_format(None)
        if "length" in dataset.column_names:
            return [int(length) for length in dataset["length"]]
        if "input_ids" in dataset.column_names:
            # As rows lie in Arrow no list is made to count them.
            plain = dataset if kind == "custom" else dataset.with_format("arrow")
            starts = range(0, len(plain), _CHUNK_ROWS)
            chunks = (plain[start : start + _CHUNK_ROWS]["input_ids"] for start in starts)
            return [length for chunk in chunks for length in _lengths(chunk)]
    elif has_rows(dataset):
        rows = (dataset[index] for index in range(len(dataset)))
        return [len(row["input_ids"]) for row in rows if isinstance(row, Mapping)]
    return []


def _lengths(column: Any) -> list[int]:
    if hasattr(column, "combine_chunks"):
        import pyarrow.compute

        found: list[int] = pyarrow.compute.list_value_length(column).to_pylist()
        return found
    return [len(row) for row in column]


def longest_row(dataset: Any, model: nn.Module) -> int:
    """Tokens of the longest row; what the model can take at most where rows cannot be looked at."""
    if lengths := row_lengths(dataset):
        return max(lengths)
    config = getattr(model, "config", None)
    return int(getattr(config, "max_position_embeddings", None) or 512)


def largest_batch(dataset: Any, model: nn.Module, rows: int) -> int:
    """Tokens of the largest batch of this many rows that the shuffle can draw."""
    if lengths := row_lengths(dataset):
        return sum(heapq.nlargest(rows, lengths))
    return rows * longest_row(dataset, model)


Prediction = tuple[torch.Tensor | None, Any, Any]
"""Loss, logits and labels as `Trainer.prediction_step` returns them."""


def merged_predictions(
    parts: Sequence[MicroBatch], weights: Sequence[float], predictions: Sequence[Prediction]
) -> Prediction:
    """One prediction in the batch's own row order; the loss is the mean over all rows."""
    order = [row for part in parts for row in part.rows]
    position = {row: index for index, row in enumerate(order)}
    back = [position[row] for row in range(len(order))]
    losses, logits, labels = zip(*predictions, strict=True)
    counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight > 0]
    total = sum(weight for _, weight in counted)
    terms = [loss * (weight / total) for loss, weight in counted if loss is not None]
    mean = torch.stack(terms).sum() if terms else losses[0]
    return mean, _joined(logits, back), _joined(labels, back)


def to_cpu(prediction: Prediction) -> Prediction:
    """Moves predictions off the device, where an evaluation keeps only one batch."""
    loss, logits, labels = (send_to_device(part, "cpu") for part in prediction)
    return loss, logits, labels


def logits_and_labels(output: EvalLoopOutput | PredictionOutput) -> tuple[Any, Any]:
    """Without the hidden states that some heads return after the logits."""
    logits = output.predictions
    return logits[0] if isinstance(logits, tuple) else logits, output.label_ids


def _joined(pieces: Sequence[Any], back: list[int]) -> Any:
    whole = pieces[0]
    for piece in pieces[1:]:
        if piece is not None:
            whole = nested_concat(  # type: ignore[no-untyped-call]
                whole, piece, padding_index=IGNORED_LABEL
            )
    return _rows_of(whole, back, len(back))
