"""The model that was handed over, without its weights: what is traced is what is trained.

transformers' own sequence classifiers are built from their configuration. Any other model, with
another head, another task or modules of the user's own, is copied with shapes only; for a shallow
trace its list of layers is cut. Its batches have the shapes of one that its collator made.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from memfit.errors import TraceError
from memfit.memory.depth import cut_layers
from memfit.messages import Message
from memfit.packing.heads import sees_padding
from memfit.parts import base_of, layers_of
from memfit.runtime.lengths import row_lengths

Collate = Callable[[list[Any]], Any]
_TOKENS = ("input_ids", "inputs_embeds", "attention_mask")


@dataclass(frozen=True, eq=False)
class GivenModel:
    """An architecture and the shapes of its batches."""

    model: nn.Module
    """On the meta device, of full depth."""
    batch: Mapping[str, Any]
    """As its collator makes it."""
    rows: int
    width: int
    texts: int
    """In one row: several where one is to be chosen."""

    def build(self, layers: int) -> Any:
        """The model with its first layers only; all its weights learn."""
        model = copy.deepcopy(self.model)
        stack = layers_of(model)  # type: ignore[arg-type]
        if layers < len(stack):
            _cut(model, len(stack), layers)
        return model.requires_grad_(True).train()

    def make_batch(self, lengths: Sequence[int]) -> dict[str, Any]:
        """So many rows, as wide as the longest of them: real tensors."""
        width = max(max(lengths) // self.texts, 1)
        made = {name: self._sized(value, len(lengths), width) for name, value in self.batch.items()}
        mask = made.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            inside = torch.arange(width) < torch.tensor(lengths)[:, None]
            made["attention_mask"] = inside.to(mask.dtype)
        return made

    def _sized(self, value: Any, rows: int, width: int) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or len(value) != self.rows:
            return value
        inner = [width if size == self.width else size for size in value.shape[1:]]
        return torch.ones((rows, *inner), dtype=value.dtype).clamp(max=_largest(value))


def is_built_from_config(model: Any) -> bool:
    """Whether transformers makes the same model of its configuration alone."""
    if not isinstance(model, PreTrainedModel) or sees_padding(model):
        return False
    built: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model.config), None)
    return built is type(model)


def given_model(model: Any, dataset: Any, collate: Collate | None) -> tuple[GivenModel, list[int]]:
    """The model's architecture, and the tokens of every row as its batches are padded."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TraceError(Message("{name} is no transformers model", name=name))
    if collate is None or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TraceError(Message("the batches of {name} cannot be looked at beforehand", name=name))
    if not len(dataset):
        raise TraceError(Message("there are no rows to train on"))
    lengths = _lengths(dataset)
    order = sorted(range(len(dataset)), key=lambda row: lengths[row] if lengths else 0)
    narrow = collate([dataset[row] for row in order[:2]])
    batch = collate([dataset[row] for row in order[-2:]])
    rows = min(2, len(order))
    if not isinstance(batch, Mapping):
        raise TraceError(Message("its batches have no names"))
    shape = _shape(batch, name)
    width, texts = shape[-1], math.prod(shape[:-1])
    if not lengths or texts > 1 or _shape(narrow, name)[-1] >= width:
        lengths = [width * texts] * len(dataset)  # however short the rows are
    given = GivenModel(on_meta(model), dict(batch), rows, width, texts)
    return given, lengths


def on_meta(model: nn.Module) -> nn.Module:
    """A copy with shapes only: no memory is taken."""
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        bare = torch.empty_like(tensor, device="meta")
        is_weight = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_weight else bare
    return copy.deepcopy(model, memo)


def _cut(model: Any, count: int, layers: int) -> None:
    """Take the upper layers out of the stack, and their number out of every configuration."""
    for parent in base_of(model).modules():
        for name, child in parent._modules.items():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                parent._modules[name] = nn.ModuleList(list(child)[:layers])
    found = (getattr(part, "config", None) for part in model.modules())
    for config in {id(one): one for one in found if one is not None}.values():
        cut_layers(config, layers)


def _lengths(dataset: Any) -> list[int]:
    try:
        lengths = row_lengths(dataset)
    except (KeyError, TypeError):  # rows of something else than tokens
        return []
    return lengths if len(lengths) == len(dataset) else []


def _shape(batch: Any, name: str) -> tuple[int, ...]:
    """Of a row's tokens: how many texts, and how long they are padded."""
    for key in _TOKENS:
        value = batch.get(key) if isinstance(batch, Mapping) else None
        if isinstance(value, Tensor) and value.dim() > 1:
            return tuple(value.shape[1:-1] if key == "inputs_embeds" else value.shape[1:])
    raise TraceError(Message("the batches of {name} have no tokens", name=name))


def _largest(value: Tensor) -> Any:
    """What every number of a made-up batch may be: no token or class that does not exist."""
    return value.max().item() if value.numel() else 1
