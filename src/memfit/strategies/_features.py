"""What a classification head reads of its encoder: found out, computed once, and handed back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from memfit.errors import DataError, ModelError
from memfit.messages import Message
from memfit.packing.families import FAMILIES
from memfit.parts import base_of
from memfit.strategies._layers import wrap

if TYPE_CHECKING:
    from memfit.runtime.batching import MicroBatch

FEATURES = "frozen_features"
"""The model input that features travel under."""
_TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
_COLLATED_ROWS = 1024
"""Rows that are sorted by length together: enough for even batches, few enough to hold padded."""
_TOLERANCE = 1e-4
_PROBE_LENGTHS = (5, 9, 3)


class Reading(StrEnum):
    """Which vector of the encoder's output the head reads."""

    POOLED = "the pooled output"
    FIRST = "the first token"
    MEAN = "the mean over the tokens"


def reading_of(model: PreTrainedModel) -> Reading:
    """By the structure of the model; `head_problem` then tries it."""
    if getattr(base_of(model), "pooler", None) is not None:
        return Reading.POOLED
    mean = getattr(model.config, "classifier_pooling", "cls") == "mean"
    return Reading.MEAN if mean else Reading.FIRST


class FeatureDataset(Dataset[dict[str, Any]]):
    """One vector a row in host memory, beside the labels and whatever else the collator gave.

    Load it with its own `collate`.
    """

    def __init__(self, features: Tensor, columns: Mapping[str, Any], reading: Reading) -> None:
        self.features = features
        self.columns = dict(columns)
        self.reading = reading

    @property
    def column_names(self) -> list[str]:
        """As a dataset of `datasets` has them."""
        return [FEATURES, *self.columns]

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, row: int) -> dict[str, Any]:
        values = {name: column[row] for name, column in self.columns.items()}
        return {FEATURES: self.features[row], **values}

    def __getitems__(self, rows: list[int]) -> dict[str, Any]:
        """A whole batch at once: a DataLoader asks for this where it is there."""
        batch: dict[str, Any] = {FEATURES: self.features[rows]}
        for name, column in self.columns.items():
            is_tensor = isinstance(column, Tensor)
            batch[name] = column[rows] if is_tensor else [column[row] for row in rows]
        return batch

    @staticmethod
    def collate(rows: Any) -> dict[str, Any]:
        """A batch of rows; a batch made by `__getitems__` is one already."""
        if isinstance(rows, Mapping):
            return dict(rows)
        batch: dict[str, Any] = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            batch[name] = torch.stack(values) if isinstance(values[0], Tensor) else values
        return batch


class FeatureHead:
    """Lets a model take `frozen_features` in place of texts; `remove()` undoes it.

    Batches without features go through the whole model as ever.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._reading = reading_of(model)
        self._given: Tensor | None = None
        unwrap_base = wrap(base_of(model), self._encoder)
        hook = model.register_forward_pre_hook(self._take, with_kwargs=True)
        self._undo: list[Callable[[], None]] = [unwrap_base, hook.remove]

    def remove(self) -> None:
        """Give the model back as it was; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def _take(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        del module
        self._given = kwargs.get(FEATURES)
        return args, {name: value for name, value in kwargs.items() if name != FEATURES}

    def _encoder(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        del module
        features, self._given = self._given, None
        if features is None:
            return call(*args, **kwargs)
        # A text of one token: its first token and its mean are the vector itself.
        hidden: Any = features.unsqueeze(1)
        if self._reading is Reading.POOLED:
            pooled: Any = features
            return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)
        return BaseModelOutput(last_hidden_state=hidden)


def cached_features(
    model: PreTrainedModel,
    dataset: Any,
    collate: Callable[[list[Any]], Mapping[str, Any]],
    *,
    max_tokens: int = 4096,
    label_names: Sequence[str] = ("labels",),
    autocast_dtype: torch.dtype | None = None,
) -> FeatureDataset:
    """Every row of the dataset through the encoder once, on the model's device, longest together.

    What the collator gives besides tokens is kept a row at a time; it is asked once, so one that
    changes its rows at random does so once.
    """
    from memfit.data.workspace import progress_bar
    from memfit.runtime.batching import MicroBatching, split, trimming_for

    if not len(dataset):
        raise DataError(Message("there is no row to compute features of"))
    limits, trim = MicroBatching(max_tokens=max_tokens), trimming_for(model)
    bar = progress_bar("encoding", total_rows=len(dataset))
    chunks: list[Tensor] = []
    columns: dict[str, list[Any]] = {}
    with _Encoder(model, autocast_dtype) as encoder, contextlib.closing(bar):
        for start in range(0, len(dataset), _COLLATED_ROWS):
            rows = _rows(dataset, start, min(start + _COLLATED_ROWS, len(dataset)))
            batch = dict(collate(rows))
            texts = {name: batch[name] for name in batch if name not in label_names}
            parts = []
            for part in split(texts, limits, trim):
                parts.append((part, encoder.features(part.inputs)))
                bar.update(len(part.rows))
            chunks.append(_in_order(parts))
            _keep(columns, batch, len(rows))
    joined = {name: _joined(name, pieces) for name, pieces in columns.items()}
    return FeatureDataset(torch.cat(chunks), joined, encoder.reading)


def _rows(dataset: Any, start: int, stop: int) -> list[Any]:
    at_once = getattr(dataset, "__getitems__", None)  # as `datasets` and torch's subsets have it
    rows = list(range(start, stop))
    return list(at_once(rows)) if at_once is not None else [dataset[row] for row in rows]


class _Encoder:
    """The model in evaluation mode, and the one vector a row that its head reads."""

    def __init__(self, model: PreTrainedModel, autocast_dtype: torch.dtype | None = None) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.autocast_dtype = autocast_dtype
        self.reading = reading_of(model)
        self._output: Any = None
        self._modes: list[tuple[nn.Module, bool]] = []

    def __enter__(self) -> _Encoder:
        # Each module's own mode is put back: some may have been in evaluation mode already.
        self._modes = [(module, module.training) for module in self.model.modules()]
        self.model.train(False)
        self._hook = base_of(self.model).register_forward_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        for module, training in self._modes:
            module.training = training

    def features(self, inputs: Mapping[str, Any]) -> Tensor:
        """Of each row, in host memory."""
        return self.run(inputs)[0].cpu()

    def run(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """The vectors the head reads, and what the whole model made of the batch."""
        moved = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        half = self.autocast_dtype
        with (
            torch.no_grad(),
            torch.autocast(self.device.type, dtype=half, enabled=half is not None),
        ):
            result = self.model(**moved)
        output, self._output = self._output, None
        return _vector(output, self.reading, moved.get("attention_mask")), result

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        self._output = output


def _vector(output: Any, reading: Reading, mask: Tensor | None) -> Tensor:
    if reading is Reading.POOLED:
        pooled: Tensor = output.pooler_output
        return pooled
    hidden: Tensor = output[0]
    if reading is Reading.FIRST:
        return hidden[:, 0]
    if mask is None:
        mask = torch.ones(hidden.shape[:2], device=hidden.device, dtype=torch.bool)
    return (hidden * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True)


def _in_order(parts: list[tuple[MicroBatch, Tensor]]) -> Tensor:
    rows = torch.tensor([row for part, _ in parts for row in part.rows])
    return torch.cat([vectors for _, vectors in parts])[rows.argsort()]


def _keep(columns: dict[str, list[Any]], batch: Mapping[str, Any], rows: int) -> None:
    for name, value in batch.items():
        if name in _TOKEN_INPUTS:
            continue
        is_single = not hasattr(value, "__len__") or (isinstance(value, Tensor) and not value.dim())
        if is_single or len(value) != rows:
            raise DataError(
                Message(
                    "the collator's {name} has not one entry for each of {rows} rows",
                    name=repr(name),
                    rows=rows,
                )
            )
        columns.setdefault(name, []).append(value)


def _joined(name: str, pieces: list[Any]) -> Any:
    if not isinstance(pieces[0], Tensor):
        return [value for piece in pieces for value in piece]
    if len({piece.shape[1:] for piece in pieces}) > 1:
        raise DataError(
            Message("the collator's {name} is not equally wide for all rows", name=repr(name))
        )
    return torch.cat(pieces)


def head_problem(model: PreTrainedModel) -> str:
    """Why features cannot stand for texts in this model, by trying; empty where they can.

    A model without real weights (meta or fake tensors) is judged by its family.
    """
    name = type(model).__name__
    if not _has_values(model):
        known = model.config.model_type in FAMILIES
        return (
            ""
            if known
            else Message(
                "what the head of {name} reads is not known without its weights", name=name
            )
        )
    try:
        difference = _difference(model)
    except Exception as error:
        # A head we have never seen can fail in any way.
        return Message(
            "{name} cannot be run on features: {kind}: {error}",
            name=name,
            kind=type(error).__name__,
            error=error,
        )
    if difference <= _TOLERANCE:
        return ""
    return Message("the head of {name} reads more of the encoder than one vector a text", name=name)


def _difference(model: PreTrainedModel) -> float:
    """Between the logits of three texts and of their features, of the largest logit."""
    with _Encoder(model) as encoder:
        vectors, result = encoder.run(_probe_batch(model))
        head = FeatureHead(model)
        try:
            with torch.no_grad():
                logits = model(**{FEATURES: vectors}).logits
        finally:
            head.remove()
    expected: Tensor = result.logits
    if logits.shape != expected.shape:
        raise ModelError(
            Message(
                "logits of shape {shape}, not {expected}",
                shape=list(logits.shape),
                expected=list(expected.shape),
            )
        )
    if bool(expected.eq(expected[:1]).all()) and model.config.model_type not in FAMILIES:
        raise ModelError(
            Message("its logits are the same for every text, so nothing can be compared")
        )
    return float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def _probe_batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Three texts of different lengths and tokens, padded on the right."""
    config: Any = model.config
    pad, width = config.pad_token_id or 0, max(_PROBE_LENGTHS)
    mask = torch.arange(width) < torch.tensor(_PROBE_LENGTHS)[:, None]
    ids = torch.arange(mask.numel()).view(mask.shape) * 97 % config.vocab_size
    ids = torch.where(ids == pad, (ids + 1) % config.vocab_size, ids)
    return {"input_ids": torch.where(mask, ids, pad), "attention_mask": mask.long()}


def _has_values(model: nn.Module) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return not any(one.is_meta or isinstance(one, FakeTensor) for one in model.parameters())
