"""A frozen encoder's features, computed once: every epoch after that trains the head alone.

A frozen encoder gives the same vector for the same text in every epoch. So the texts go through
it once, in evaluation mode, and the vector the head reads (the pooled output, the first token's or
the mean) is kept in host memory: 4 KiB a row for a model 1024 wide. The model stays whole: texts
still go through all of it, batches of features enter beneath the head.

Dropout inside the frozen encoder is noise that features computed once do not have. It is the same
training as with the encoder in evaluation mode, not the tutorials' with it in training mode.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel

from memfit.errors import ConfigError
from memfit.messages import N_, Message, t
from memfit.packing.families import unwrap
from memfit.parts import base_of
from memfit.strategies._arguments import change_arguments
from memfit.strategies._features import FeatureDataset, FeatureHead, cached_features, head_problem
from memfit.strategies.base import Collator, Fidelity, Setup, Strategy

__all__ = ["FeatureDataset", "FeatureHead", "FrozenFeatures", "cached_features"]

_LABEL_COLUMNS = ("labels", "label", "label_ids")
_KEPT_DATASETS = 8
"""Of how many datasets features are kept; a loop of predictions must not fill the memory."""


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
                Message(
                    "at least 1 token must go through at once, not {max_tokens}",
                    max_tokens=self.max_tokens,
                )
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.CAPACITY

    def unavailable(self, setup: Setup) -> str:
        if hasattr(setup.model, "peft_config"):
            return Message("adapters change the encoder's features in every step")
        model = unwrap(setup.model)
        if not isinstance(model, PreTrainedModel):
            return Message("{name} is no transformers model", name=type(model).__name__)
        if learning := _first_that_learns(base_of(model)):
            return Message(
                "{learning} of the encoder still learns; freeze the whole encoder first",
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
            _say(t("{learning} learns again: texts go through the whole model", learning=learning))
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
