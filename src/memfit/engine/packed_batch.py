"""A padded batch with its padding taken out: all texts one after another, and where each begins."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from memfit.errors import DataError

IGNORED_LABEL = -100
"""The label that losses leave out of the sum and out of the mean; dummy rows have it."""


@dataclass(frozen=True, slots=True)
class PackSpec:
    """What a model family wants of a packed batch; small and picklable, for loader workers."""

    padding_idx: int | None = None
    """RoBERTa and XLM-R count positions from padding_idx + 1, without that token; others from 0."""
    token_types: bool = False
    """Whether token types must be there even when the collator gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """The texts of a batch without padding.

    Segment r of `cu_seqlens` is row r, for all `rows` rows; segments after these hold dummy
    tokens that only fill the token count up to a bucket. Rows from `real_rows` on are dummies
    as well: weight 0, label -100 (or 0.0).
    """

    tokens: Mapping[str, Tensor]
    """Flat [T] tensors by name: input_ids, position_ids, token_type_ids, …"""
    cu_seqlens: Tensor
    """Where each segment begins, and the end of the last: int32 [segments + 1]."""
    max_seqlen: int
    lengths: tuple[int, ...]
    """The segments' lengths as numbers, so that nothing has to be read from the device."""
    rows: int
    real_rows: int
    row_weight: Tensor
    """1 for a real row, 0 for a dummy: float32 [rows]."""
    labels: Tensor | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the collator gave, passed on; what has one entry a row has one a dummy, too."""

    @property
    def input_ids(self) -> Tensor:
        return self.tokens["input_ids"]

    @property
    def total_tokens(self) -> int:
        """Tokens the model computes on, dummies included."""
        return self.input_ids.shape[0]

    def inputs(self, *, labels: bool = True) -> dict[str, Any]:
        """Keyword arguments for the model, under the names transformers itself uses for packing."""
        inputs: dict[str, Any] = {name: flat.unsqueeze(0) for name, flat in self.tokens.items()}
        inputs.update(self.extras)
        inputs.update(
            cu_seq_lens_q=self.cu_seqlens,
            cu_seq_lens_k=self.cu_seqlens,
            max_length_q=self.max_seqlen,
            max_length_k=self.max_seqlen,
            packed_rows=self.rows,
        )
        if labels and self.labels is not None:
            if self.rows != self.real_rows and self.labels.is_floating_point():
                raise ValueError(
                    "the model's own loss would count the dummy rows of this batch; "
                    "take inputs(labels=False) and weighted_loss()"
                )
            inputs["labels"] = self.labels
        return inputs

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedBatch:
        """The same batch on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """The same batch in page-locked memory; a DataLoader calls this by its name.

        What is on a device already stays there: accelerate sends whole batches of a stream.
        """
        return self._map(lambda tensor: tensor.pin_memory() if tensor.is_cpu else tensor)

    @property
    def signature(self) -> Hashable | None:
        """What a captured graph takes for granted beside the number of tokens and rows.

        Shapes and types of all tensors, and the values of what is no tensor. None where such a
        value cannot be told from another.
        """
        parts = (tuple(self.tokens), _signature(self.labels), _signature(self.extras))
        return None if any(part is None for part in parts) else parts

    def copy_from(self, other: PackedBatch) -> None:
        """Overwrite this batch's tensors, which a captured graph reads, by those of another."""
        if self.cu_seqlens.shape != other.cu_seqlens.shape or self.max_seqlen != other.max_seqlen:
            raise ValueError("the two batches are not padded to the same rows, tokens and length")
        for name, flat in self.tokens.items():
            flat.copy_(other.tokens[name], non_blocking=True)
        self.cu_seqlens.copy_(other.cu_seqlens, non_blocking=True)
        self.row_weight.copy_(other.row_weight, non_blocking=True)
        if self.labels is not None and other.labels is not None:
            self.labels.copy_(other.labels, non_blocking=True)
        if self.extras:
            if self.signature is None or self.signature != other.signature:
                raise ValueError("the two batches have other inputs beside their tokens")
            _overwrite(self.extras, other.extras)

    def _map(self, change: Any) -> PackedBatch:
        def changed(value: Any) -> Any:
            return _mapped(value, change)

        return replace(
            self,
            tokens={name: change(flat) for name, flat in self.tokens.items()},
            cu_seqlens=change(self.cu_seqlens),
            row_weight=change(self.row_weight),
            labels=changed(self.labels),
            extras=changed(self.extras),
        )


def pack(
    batch: Mapping[str, Any],
    spec: PackSpec | None = None,
    *,
    pad_to_tokens: int | None = None,
    pad_to_rows: int | None = None,
    max_seqlen: int | None = None,
) -> PackedBatch:
    """Strip the padding of a batch by its attention mask, wherever the padding is.

    `pad_to_tokens`, `pad_to_rows` and `max_seqlen` fix every shape, as a captured graph needs:
    the tokens are filled up by segments of dummies, at most `max_seqlen` long each.
    """
    spec = spec or PackSpec()
    ids, mask = _ids_and_mask(batch)
    columns = {"input_ids": ids, "position_ids": _positions(batch, ids, mask, spec)}
    extras = {}
    for name, value in batch.items():
        if name in ("input_ids", "attention_mask", "position_ids", "labels"):
            continue
        if isinstance(value, Tensor) and value.shape == ids.shape:
            columns[name] = value
        else:
            extras[name] = value
    if spec.token_types and "token_type_ids" not in columns:
        columns["token_type_ids"] = torch.zeros_like(ids)

    lengths: list[int] = mask.sum(dim=1).tolist()
    longest = max(lengths)
    if max_seqlen is not None and longest > max_seqlen:
        raise ValueError(f"a text of {longest} tokens does not fit max_seqlen={max_seqlen}")
    segments = _segments(lengths, pad_to_tokens, pad_to_rows, max_seqlen or longest)
    total = sum(segments)
    rows = pad_to_rows or len(lengths)
    if rows > len(lengths):
        # A dummy row gets the entries of the first real one: values the model is used to.
        first = [*range(len(lengths)), *[0] * (rows - len(lengths))]
        extras = _mapped(
            extras, lambda one: one[first] if one.dim() and len(one) == len(lengths) else one
        )
    labels = batch.get("labels")
    dummy = 0 if labels is None or labels.is_floating_point() else IGNORED_LABEL
    # Dummies take a position every family has: the one of a text's first token.
    fill = {"position_ids": 0 if spec.padding_idx is None else spec.padding_idx + 1}
    cu_seqlens = torch.zeros(len(segments) + 1, dtype=torch.int32, device=ids.device)
    cu_seqlens[1:] = torch.tensor(segments, dtype=torch.int32).cumsum(0)
    return PackedBatch(
        tokens={n: _padded(c[mask], total, fill.get(n, 0)) for n, c in columns.items()},
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen or longest,
        lengths=tuple(segments),
        rows=rows,
        real_rows=len(lengths),
        row_weight=_padded(torch.ones(len(lengths), device=ids.device), rows, 0),
        labels=None if labels is None else _padded(labels, rows, dummy),
        extras=extras,
    )


def padded_on_the_right(batch: Mapping[str, Any]) -> bool:
    """Whether every text begins in the first column and its padding follows it.

    Other padding has a part in what the stock model computes: its heads read the first column, and
    its positions count from there.
    """
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return True  # `pack` says what is wrong with a mask that is no mask
    real = mask.bool()
    begins_late = ~real[:, :1]
    goes_on = real[:, 1:] & ~real[:, :-1]
    return not bool(torch.cat([begins_late, goes_on], dim=1).any())


def text_lengths(batch: Mapping[str, Any]) -> list[int]:
    """Tokens of each row as `pack` counts them."""
    _, mask = _ids_and_mask(batch)
    lengths: list[int] = mask.sum(dim=1).tolist()
    return lengths


def weighted_loss(
    logits: Tensor, labels: Tensor, row_weight: Tensor, problem_type: str | None = None
) -> Tensor:
    """sum_r weight_r * loss_r with the losses of transformers' heads; one shape for any batch.

    Weights of 1 / N over all rows of an effective batch of N give the mean the heads would.
    """
    width = logits.shape[-1]
    if problem_type is None:
        if width == 1:
            problem_type = "regression"
        else:
            multi = labels.is_floating_point()
            problem_type = "multi_label_classification" if multi else "single_label_classification"
    if problem_type == "single_label_classification":
        per_row = F.cross_entropy(
            logits, labels.view(-1), reduction="none", ignore_index=IGNORED_LABEL
        )
    elif problem_type == "regression":
        target = labels.view(logits.shape).to(logits.dtype)
        per_row = F.mse_loss(logits, target, reduction="none").mean(dim=-1)
    else:
        target = labels.to(logits.dtype)
        per_row = F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(dim=-1)
    return (per_row * row_weight.to(per_row.dtype)).sum()


def _ids_and_mask(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or "inputs_embeds" in batch:
        raise DataError("a batch is packed from input_ids of shape [rows, tokens]; it has none")
    mask = batch.get("attention_mask")
    if mask is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    if mask.shape != ids.shape:
        raise DataError(
            "the attention mask has shape {shape} and the tokens {expected}; packing "
            "needs one mask value a token",
            shape=list(mask.shape),
            expected=list(ids.shape),
        )
    mask = mask.bool()
    # A row without any token still is a row with a label: keep its first cell.
    empty = ~mask.any(dim=1)
    if bool(empty.any()):
        mask = mask.clone()
        mask[empty, 0] = True
    return ids, mask


def _positions(batch: Mapping[str, Any], ids: Tensor, mask: Tensor, spec: PackSpec) -> Tensor:
    """The positions the stock model would use were the text alone and padded on the right."""
    given: Tensor | None = batch.get("position_ids")
    if given is not None:
        return given.expand_as(ids)
    if spec.padding_idx is None:
        first = mask.int().argmax(dim=1, keepdim=True)
        return torch.arange(ids.shape[1], device=ids.device) - first
    counted = ids != spec.padding_idx
    return counted.cumsum(dim=1) * counted + spec.padding_idx


def _segments(
    lengths: list[int], pad_to_tokens: int | None, pad_to_rows: int | None, max_seqlen: int
) -> list[int]:
    """Lengths of all segments: real rows, empty dummy rows, then dummies that fill the bucket."""
    tokens, rows = sum(lengths), len(lengths)
    if pad_to_rows is not None and rows > pad_to_rows:
        raise ValueError(f"{rows} rows do not fit pad_to_rows={pad_to_rows}")
    segments = lengths + [0] * ((pad_to_rows or rows) - rows)
    if pad_to_tokens is None:
        return segments
    if tokens > pad_to_tokens:
        raise ValueError(f"{tokens} tokens do not fit pad_to_tokens={pad_to_tokens}")
    # As many slots as an empty bucket would need, so that their number never changes.
    slots = -(-pad_to_tokens // max_seqlen)
    spare = pad_to_tokens - tokens
    return segments + [min(max(spare - i * max_seqlen, 0), max_seqlen) for i in range(slots)]


def _padded(flat: Tensor, size: int, fill: float) -> Tensor:
    if flat.shape[0] == size:
        return flat
    padded = flat.new_full((size, *flat.shape[1:]), fill)
    padded[: flat.shape[0]] = flat
    return padded


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a nested value with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(part, change) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_mapped(part, change) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def _signature(value: Any) -> Hashable | None:
    """What tells two values apart that a graph cannot be handed in turn."""
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        parts = [(name, _signature(part)) for name, part in sorted(value.items())]
        return None if any(part is None for _, part in parts) else ("mapping", *parts)
    if isinstance(value, list | tuple):
        members = [_signature(part) for part in value]
        return None if any(part is None for part in members) else ("list", *members)
    if value is None or isinstance(value, bool | int | float | str):
        return "value", type(value), value
    return None


def _overwrite(target: Any, source: Any) -> None:
    """Copy every tensor into its place in a value of the same signature."""
    if isinstance(target, Tensor):
        target.copy_(source, non_blocking=True)
    elif isinstance(target, Mapping):
        for name, part in target.items():
            _overwrite(part, source[name])
    elif isinstance(target, list | tuple):
        for part, new in zip(target, source, strict=True):
            _overwrite(part, new)


class PacksBatches(Protocol):
    """Packs batches for one model: strategies/packing has such models."""

    def pack(self, batch: Any, **shapes: int | None) -> PackedBatch:
        """Packs a padded batch with this model's positions and token types."""
