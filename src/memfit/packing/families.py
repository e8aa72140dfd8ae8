"""What packing must know of each model family, and nothing else: one table.

A family is packed when the keyword arguments of its forward reach the attention function and
its head reads one vector a text. `stack` is where that vector is handed over: the module whose
`last_hidden_state` becomes [rows, 1, width].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from memfit.messages import N_
from memfit.packing.batch import PackSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family is packed; paths are below the base model."""

    attention: str
    """Class of the modules that look the attention function up in their config."""
    stack: str = "encoder"
    """The module whose output the head or the pooler reads; '' is the base model itself."""
    layers: str = "encoder.layer"
    """The list of layers; '' where weights are shared between layers."""
    first_token_only: str = ""
    """In the last layer: the module from which on only the tokens the head reads are needed.
    Its inputs are cut to these, which saves most of one layer and changes no number."""
    token_types: bool = True
    positions_skip_padding: bool = False
    masks_by_layer_type: bool = False
    """The base model takes its masks as a mapping; packed, all of them are None."""


def _bert_like(prefix: str, *, roberta: bool = False) -> Family:
    return Family(
        attention=f"{prefix}SelfAttention",
        first_token_only="attention.output",
        positions_skip_padding=roberta,
    )


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bert": _bert_like("Bert"),
        "ernie": _bert_like("Ernie"),
        "electra": _bert_like("Electra"),
        "roberta": _bert_like("Roberta", roberta=True),
        "xlm-roberta": _bert_like("XLMRoberta", roberta=True),
        "camembert": _bert_like("Camembert", roberta=True),
        "albert": Family(attention="AlbertAttention", layers=""),
        "distilbert": Family(
            attention="DistilBertSelfAttention",
            stack="transformer",
            layers="transformer.layer",
            first_token_only="sa_layer_norm",
            token_types=False,
        ),
        "modernbert": Family(
            attention="ModernBertAttention",
            stack="",
            layers="layers",
            token_types=False,
            masks_by_layer_type=True,
        ),
    }
)

# Why a family people will try is not in the table.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "mpnet": N_("MPNet adds relative position biases and silently ignores text boundaries"),
        "deberta": N_(
            "DeBERTa's attention mixes in relative positions and ignores text boundaries"
        ),
        "deberta-v2": N_(
            "DeBERTa's attention mixes in relative positions and ignores text boundaries"
        ),
    }
)


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside torch.compile, DDP and peft's wrappers."""
    inner: Any = model
    if hasattr(inner, "_orig_mod"):
        return unwrap(inner._orig_mod)
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        return unwrap(inner.module)
    if hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
        return unwrap(inner.get_base_model())
    return model


def base_of(model: PreTrainedModel) -> nn.Module:
    """The encoder below the classification head."""
    return model.get_submodule(model.base_model_prefix)


def attention_modules(model: PreTrainedModel, family: Family) -> list[nn.Module]:
    """The modules that call the attention function, subclasses included."""
    return [
        module
        for module in base_of(model).modules()
        if any(parent.__name__ == family.attention for parent in type(module).__mro__)
    ]


def pack_spec(model: nn.Module) -> PackSpec:
    """What `pack` must know of this model."""
    config: Any = unwrap(model).config
    family = FAMILIES[config.model_type]
    return PackSpec(
        padding_idx=config.pad_token_id if family.positions_skip_padding else None,
        token_types=family.token_types,
    )
