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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from memfit.engine.micro_batches import TOKEN_INPUTS
from memfit.errors import ConfigError, DataError
from memfit.i18n import N_, Message, t
from memfit.models.layer_stack import unwrap, wrap
from memfit.models.layers import base_of
from memfit.strategies.base import (
    Collator,
    Fidelity,
    PlanFigures,
    Setup,
    Strategy,
    change_arguments,
)
from memfit.strategies.packing.packed_model import FAMILIES, evaluating, has_values, probe_batch

FEATURES = "frozen_features"
"""The model input that features travel under."""

_COLLATED_ROWS = 1024
"""Rows that are sorted by length together: enough for even batches, few enough to hold padded."""

_TOLERANCE = 1e-4


class FeatureDataset(Dataset[dict[str, Any]]):
    """One vector a row in host memory, beside the labels and whatever else the collator gave.

    Load it with its own `collate`.
    """

    def __init__(self, features: Tensor, columns: Mapping[str, Any]) -> None:
        self.features = features
        self.columns = dict(columns)

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
        return self.collate([self[row] for row in rows])

    @staticmethod
    def collate(rows: Any) -> dict[str, Any]:
        """A batch of rows; a batch made by `__getitems__` is one already."""
        if isinstance(rows, Mapping):
            return dict(rows)
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        return {
            name: torch.stack(values) if isinstance(values[0], Tensor) else values
            for name, values in columns.items()
        }


class FeatureHead:
    """Lets a model take `frozen_features` in place of texts; `remove()` undoes it.

    Batches without features go through the whole model as ever.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._given: Tensor | None = None
        unwrap_base = wrap(base_of(model), self._encoder)
        hook = model.register_forward_pre_hook(self._take, with_kwargs=True)
        self._undo: list[Callable[[], None]] = [unwrap_base, hook.remove]

    def remove(self) -> None:
        """Give the model back as it was; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def _take(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._given = kwargs.get(FEATURES)
        return args, {name: value for name, value in kwargs.items() if name != FEATURES}

    def _encoder(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        features, self._given = self._given, None
        if features is None:
            return call(*args, **kwargs)
        # A text of one token: its first token and its mean are the vector itself.
        hidden: Any = features.unsqueeze(1)
        if getattr(module, "pooler", None) is None:
            return BaseModelOutput(last_hidden_state=hidden)
        pooled: Any = features
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)


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
        raise DataError("there is no row to compute features of")
    limits, trim = MicroBatching(max_tokens=max_tokens), trimming_for(model)
    vectors: list[Tensor] = []
    columns: dict[str, list[Any]] = {}
    at_once = getattr(dataset, "__getitems__", None)  # as `datasets` and torch's subsets have it
    bar = progress_bar("encoding", total_rows=len(dataset))
    with evaluating(model), contextlib.closing(bar):
        for start in range(0, len(dataset), _COLLATED_ROWS):
            numbers = list(range(start, min(start + _COLLATED_ROWS, len(dataset))))
            rows = list(at_once(numbers)) if at_once else [dataset[row] for row in numbers]
            batch = dict(collate(rows))
            texts = {name: batch[name] for name in batch if name not in label_names}
            found: dict[int, Tensor] = {}
            for part in split(texts, limits, trim):
                encoded, _ = _encoded(model, part.inputs, autocast_dtype)
                found |= dict(zip(part.rows, encoded.cpu(), strict=True))
                bar.update(len(part.rows))
            vectors += [found[row] for row in range(len(rows))]
            for name, values in batch.items():
                if name not in TOKEN_INPUTS:
                    columns.setdefault(name, []).extend(_by_row(name, values, len(rows)))
    return FeatureDataset(
        torch.stack(vectors), {name: _joined(name, values) for name, values in columns.items()}
    )


def _by_row(name: str, values: Any, rows: int) -> list[Any]:
    is_single = not hasattr(values, "__len__") or (isinstance(values, Tensor) and not values.dim())
    if is_single or len(values) != rows:
        raise DataError(
            "the collator's {name} has not one entry for each of {rows} rows",
            name=repr(name),
            rows=rows,
        )
    return list(values)


def _joined(name: str, values: list[Any]) -> Any:
    if not isinstance(values[0], Tensor):
        return values
    if len({value.shape for value in values}) > 1:
        raise DataError("the collator's {name} is not equally wide for all rows", name=repr(name))
    return torch.stack(values)


def _encoded(
    model: PreTrainedModel, inputs: Mapping[str, Any], half: torch.dtype | None = None
) -> tuple[Tensor, Any]:
    """Returns the vector that the head reads of each row, and what the whole model made of them.

    That is the pooled output, the mean over the tokens or the first one; `head_problem` tries it.
    """
    device = next(model.parameters()).device
    moved = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    outputs: list[Any] = []
    base: nn.Module = base_of(model)
    hook = base.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype=half, enabled=half is not None):
            result = model(**moved)
    finally:
        hook.remove()
    if getattr(base, "pooler", None) is not None:
        return outputs[-1].pooler_output, result
    hidden: Tensor = outputs[-1][0]
    if getattr(model.config, "classifier_pooling", "cls") != "mean":
        return hidden[:, 0], result
    mask = moved.get("attention_mask")
    if mask is None:
        mask = torch.ones(hidden.shape[:2], device=hidden.device, dtype=torch.bool)
    return (hidden * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True), result


def head_problem(model: PreTrainedModel) -> str:
    """Why features cannot stand for texts in this model, by trying; empty where they can.

    A model without real weights (meta or fake tensors) is judged by its family.
    """
    name, known = type(model).__name__, model.config.model_type in FAMILIES
    if not has_values(model):
        unknown = Message(
            "what the head of {name} reads is not known without its weights", name=name
        )
        return "" if known else unknown
    try:
        with evaluating(model):
            vectors, result = _encoded(model, probe_batch(model))
            head = FeatureHead(model)
            try:
                with torch.no_grad():
                    logits, expected = model(**{FEATURES: vectors}).logits, result.logits
            finally:
                head.remove()
        difference = (logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        alike = bool(expected.eq(expected[:1]).all())
    except Exception as error:
        # A head we have never seen can fail in any way.
        return Message(
            "{name} cannot be run on features: {kind}: {error}",
            name=name,
            kind=type(error).__name__,
            error=error,
        )
    if alike and not known:
        return Message(
            "the logits of {name} are the same for every text, so nothing can be compared",
            name=name,
        )
    if logits.shape == expected.shape and difference <= _TOLERANCE:
        return ""
    return Message("the head of {name} reads more of the encoder than one vector a text", name=name)


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

    max_tokens: int = 4096

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(
                "at least 1 token must go through at once, not {max_tokens}",
                max_tokens=self.max_tokens,
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.CAPACITY

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
        taken = frozenset({*inspect.signature(model.forward).parameters, *_LABEL_COLUMNS})
        columns = taken if setup.args.remove_unused_columns else None
        cache = _FeatureCache(setup, model, self.max_tokens, columns)
        setup.undo.append(FeatureHead(model).remove)
        setup.replace_data.append(cache.replace)
        setup.undo.append(lambda: setup.replace_data.remove(cache.replace))
        # Rows of features have the columns they need; the model's signature does not name them.
        # Nor have they a length to group by.
        grouped = setup.args.train_sampling_strategy not in ("random", "sequential")
        sampling = {"train_sampling_strategy": "random"} if grouped else {}
        change_arguments(setup, remove_unused_columns=False, **sampling)


@dataclass(frozen=True, slots=True)
class _FeatureCache:
    """The features of the datasets seen last; each dataset goes through the encoder once."""

    setup: Setup
    model: PreTrainedModel
    max_tokens: int
    columns: frozenset[str] | None
    """What the model takes, if the Trainer removes all else; it is told not to for features."""
    known: list[tuple[Any, FeatureDataset]] = field(default_factory=list)

    def replace(self, dataset: Any, collator: Collator) -> tuple[Any, Collator]:
        """The dataset's features, and the collator that stacks them."""
        if self.columns is not None:
            collator = _OnlyColumns(collator, self.columns)
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            _say(t("a streamed dataset goes through the frozen encoder in every epoch"))
            return dataset, collator
        if learning := _first_that_learns(base_of(self.model)):
            _say(
                t(
                    "{learning} is trainable again: texts go through the whole model",
                    learning=learning,
                )
            )
            return dataset, collator
        features = next((made for of, made in self.known if of is dataset), None)
        if features is None:
            args, device = self.setup.args, self.setup.device
            half = args.bf16 or (args.fp16 and device.type != "cpu")
            features = cached_features(
                self.model.to(device),  # type: ignore[arg-type]
                dataset,
                collator,
                max_tokens=self.max_tokens,
                label_names=args.label_names or _LABEL_COLUMNS,
                autocast_dtype=(torch.bfloat16 if args.bf16 else torch.float16) if half else None,
            )
            self.known.append((dataset, features))
            del self.known[:-_KEPT_DATASETS]
        return features, features.collate


@dataclass(frozen=True, slots=True)
class _OnlyColumns:
    """What the Trainer does with `remove_unused_columns`, which is off for features."""

    collator: Collator
    columns: frozenset[str]

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        return self.collator(
            [{name: row[name] for name in row if name in self.columns} for row in rows]
        )


def _first_that_learns(module: nn.Module) -> str:
    return next((name for name, one in module.named_parameters() if one.requires_grad), "")


def _say(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=4)
