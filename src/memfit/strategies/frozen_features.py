"""A frozen encoder's features, computed once: every epoch after that trains the head alone.

A frozen encoder gives the same vector for the same text in every epoch. So the texts go through
it once, in evaluation mode, and the vector the head reads (the pooled output, the first token's or
the mean) is kept in host memory: 4 KiB a row for a model 1024 wide. The model stays whole: texts
still go through all of it, batches of features enter beneath the head.

Dropout inside the frozen encoder is noise that features computed once do not have. It is the same
training as with the encoder in evaluation mode, not the tutorials' with it in training mode.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from memfit.config.training_fields import HEAD_LEARNING_RATE
from memfit.engine.micro_batches import TOKEN_INPUTS
from memfit.errors import ConfigError, DataError, ModelError
from memfit.i18n import N_, Message, t
from memfit.models.layer_stack import unwrap, wrap
from memfit.models.layers import base_of
from memfit.strategies.base import Collator, Fidelity, Setup, Strategy, change_arguments
from memfit.strategies.freezing import Freezing
from memfit.strategies.packing.packed_model import FAMILIES, has_values, probe_batch
from memfit.strategies.planning import (
    Axis,
    Combination,
    Effects,
    Half,
    Option,
    PlanFigures,
    PlanQuestion,
    widened,
)

if TYPE_CHECKING:
    from memfit.engine.micro_batches import MicroBatch

FEATURES = "frozen_features"
"""The model input that features travel under."""

_COLLATED_ROWS = 1024
"""Rows that are sorted by length together: enough for even batches, few enough to hold padded."""

_TOLERANCE = 1e-4


class HeadReading(StrEnum):
    """Which vector of the encoder's output the head reads."""

    POOLED = "the pooled output"
    FIRST = "the first token"
    MEAN = "the mean over the tokens"


def reading_of(model: PreTrainedModel) -> HeadReading:
    """By the structure of the model; `head_problem` then tries it."""
    if getattr(base_of(model), "pooler", None) is not None:
        return HeadReading.POOLED
    mean = getattr(model.config, "classifier_pooling", "cls") == "mean"
    return HeadReading.MEAN if mean else HeadReading.FIRST


class FeatureDataset(Dataset[dict[str, Any]]):
    """One vector a row in host memory, beside the labels and whatever else the collator gave.

    Load it with its own `collate`.
    """

    def __init__(self, features: Tensor, columns: Mapping[str, Any], reading: HeadReading) -> None:
        self.features = features
        self.columns = dict(columns)
        self.reading = reading

    @property
    def column_names(self) -> list[str]:
        """The columns, under the name that `datasets` uses."""
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
        if self._reading is HeadReading.POOLED:
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
    from memfit.data.working_files import progress_bar
    from memfit.engine.micro_batches import MicroBatching, split, trimming_for

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
        """The features of each row, in host memory."""
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


def _vector(output: Any, reading: HeadReading, mask: Tensor | None) -> Tensor:
    if reading is HeadReading.POOLED:
        pooled: Tensor = output.pooler_output
        return pooled
    hidden: Tensor = output[0]
    if reading is HeadReading.FIRST:
        return hidden[:, 0]
    if mask is None:
        mask = torch.ones(hidden.shape[:2], device=hidden.device, dtype=torch.bool)
    return (hidden * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True)


def _in_order(parts: list[tuple[MicroBatch, Tensor]]) -> Tensor:
    rows = torch.tensor([row for part, _ in parts for row in part.rows])
    return torch.cat([vectors for _, vectors in parts])[rows.argsort()]


def _keep(columns: dict[str, list[Any]], batch: Mapping[str, Any], rows: int) -> None:
    for name, value in batch.items():
        if name in TOKEN_INPUTS:
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
    if not has_values(model):
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
        vectors, result = encoder.run(probe_batch(model))
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


_LABEL_COLUMNS = ("labels", "label", "label_ids")

_KEPT_DATASETS = 8
"""How many datasets keep their features: a loop of predictions must not fill the memory."""


@dataclass(frozen=True, slots=True)
class FrozenFeatures(Strategy):
    """Every dataset is replaced by its features; `max_tokens` go through the encoder at once."""

    name = "frozen_features"
    title = N_("frozen features")
    reason = "a frozen encoder gives the same vectors in every epoch, so it is run only once"
    shrinks = ("activations", "time")
    # These work on the texts of a training step, and there are none left.
    conflicts = frozenset({"packing", "lora", "cuda_graphs"})
    axis = Axis.LEARNING
    permission = "freeze"

    max_tokens: int = 4096

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(
                Message(
                    "at least 1 token must go through at once, not {max_tokens}",
                    max_tokens=self.max_tokens,
                )
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.CAPACITY

    @property
    def effects(self) -> Effects:
        return Effects(
            few_learn=True,
            keeps_nothing=True,
            wraps_layers=True,
            feature_tokens=self.max_tokens,
        )

    @classmethod
    def as_used(cls, half: Half) -> Option:  # noqa: ARG003
        return (Freezing("encoder", head_learning_rate=HEAD_LEARNING_RATE), cls())

    @classmethod
    def options(cls, asked: PlanQuestion, so_far: list[Option]) -> list[Option]:
        if not asked.allows(cls):
            return so_far

        def with_features(option: Option) -> list[Option]:
            frozen = Combination(option).effects.keeps_nothing
            frozen = frozen or (not option and asked.workload.freeze == "encoder")
            return asked.usable([(*option, cls())]) if frozen else []

        return widened(so_far, with_features)

    def traced_inputs(self, config: Any, rows: int) -> dict[str, Tensor]:
        return {FEATURES: torch.zeros(rows, config.hidden_size)}

    def explain(self, plan: PlanFigures) -> str:  # noqa: ARG002
        return Message(
            "the frozen encoder runs once over all texts, every epoch trains the head alone"
        )

    def unavailable(self, setup: Setup) -> str:
        if hasattr(setup.model, "peft_config"):
            return Message("adapters change the encoder's features in every step")
        model = unwrap(setup.model)
        if not isinstance(model, PreTrainedModel):
            return Message("{name} is no transformers model", name=type(model).__name__)
        if learning := _first_that_learns(base_of(model)):
            return Message(
                "{learning} of the encoder is still trainable; freeze the whole encoder first",
                learning=learning,
            )
        if setup.args.neftune_noise_alpha is not None:
            return Message("neftune_noise_alpha asks for new noise in the encoder in every step")
        if "inputs" in (setup.args.include_for_metrics or ()):
            return Message("the metrics ask for the texts' tokens, which are not kept")
        return head_problem(model)

    def change(self, setup: Setup) -> None:
        model = unwrap(setup.model)
        assert isinstance(model, PreTrainedModel)
        columns = _columns_of(model) if setup.args.remove_unused_columns else None
        cache = _FeatureCache(setup, model, self.max_tokens, columns)
        setup.undo.append(FeatureHead(model).remove)
        setup.replace_data.append(cache.replace)
        setup.undo.append(lambda: setup.replace_data.remove(cache.replace))
        # Rows of features have the columns they need; the model's signature does not name them.
        # Nor have they a length to group by.
        grouped = setup.args.train_sampling_strategy not in ("random", "sequential")
        sampling = {"train_sampling_strategy": "random"} if grouped else {}
        change_arguments(setup, remove_unused_columns=False, **sampling)


class _FeatureCache:
    """The features of the datasets seen last; each dataset goes through the encoder once."""

    def __init__(
        self, setup: Setup, model: PreTrainedModel, max_tokens: int, columns: frozenset[str] | None
    ) -> None:
        self._setup = setup
        self._model = model
        self._max_tokens = max_tokens
        self._columns = columns
        # The dataset is held too, so that its id is not given to another one meanwhile.
        self._known: OrderedDict[int, tuple[Any, FeatureDataset]] = OrderedDict()

    def replace(self, dataset: Any, collator: Collator) -> tuple[Any, Collator]:
        """The dataset's features, and the collator that stacks them."""
        collator = _OnlyColumns(collator, self._columns) if self._columns else collator
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            _say(t("a streamed dataset goes through the frozen encoder in every epoch"))
            return dataset, collator
        if learning := _first_that_learns(base_of(self._model)):
            _say(
                t(
                    "{learning} is trainable again: texts go through the whole model",
                    learning=learning,
                )
            )
            return dataset, collator
        if id(dataset) not in self._known:
            self._known[id(dataset)] = (dataset, self._features(dataset, collator))
        self._known.move_to_end(id(dataset))
        if len(self._known) > _KEPT_DATASETS:
            self._known.popitem(last=False)
        features = self._known[id(dataset)][1]
        return features, features.collate

    def _features(self, dataset: Any, collator: Collator) -> FeatureDataset:
        args = self._setup.args
        half = torch.bfloat16 if args.bf16 else torch.float16
        is_half = args.bf16 or (args.fp16 and self._setup.device.type != "cpu")
        return cached_features(
            self._model.to(self._setup.device),  # type: ignore[arg-type]
            dataset,
            collator,
            max_tokens=self._max_tokens,
            label_names=args.label_names or _LABEL_COLUMNS,
            autocast_dtype=half if is_half else None,
        )


@dataclass(frozen=True, slots=True)
class _OnlyColumns:
    """What the Trainer does with `remove_unused_columns`, which is off for features."""

    collator: Collator
    columns: frozenset[str]

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        return self.collator(
            [{name: row[name] for name in row if name in self.columns} for row in rows]
        )


def _columns_of(model: nn.Module) -> frozenset[str]:
    return frozenset({*inspect.signature(model.forward).parameters, *_LABEL_COLUMNS})


def _first_that_learns(module: nn.Module) -> str:
    return next((name for name, one in module.named_parameters() if one.requires_grad), "")


def _say(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=4)
