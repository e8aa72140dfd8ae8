"""Fused attention: no table of tokens x tokens is kept, forward or backward.

For a model that was loaded with eager attention. A packed model brings its own kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedModel

from memfit.errors import ConfigError
from memfit.i18n import N_, Message
from memfit.models.layer_stack import unwrap
from memfit.strategies.base import Fidelity, PlanFigures, Setup, Strategy

# What the families call the dropout of attention weights.
_DROPOUT_FIELDS = ("attention_probs_dropout_prob", "attention_dropout")


@dataclass(frozen=True, slots=True)
class FusedAttention(Strategy):
    """The model's attention is computed by torch's `scaled_dot_product_attention`."""

    name = "fused_attention"
    title = N_("fused attention")
    reason = "attention weights, the square of the length for every head, are never stored"
    shrinks = ("activations", "time")
    conflicts = frozenset({"packing"})

    implementation: Literal["sdpa"] = "sdpa"

    def __post_init__(self) -> None:
        if self.implementation != "sdpa":
            raise ConfigError(
                "fused attention is 'sdpa', not {implementation}",
                implementation=repr(self.implementation),
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def explain(self, plan: PlanFigures) -> str:  # noqa: ARG002
        return Message("attention is fused: weights of the square of the length are never stored")

    def unavailable(self, setup: Setup) -> str:
        model = unwrap(setup.model)
        name = type(model).__name__
        if not isinstance(model, PreTrainedModel):
            return Message("{name} is no transformers model", name=name)
        if setup.packing is not None:
            return Message("a packed model has its own fused attention")
        config: Any = model.config
        now = config._attn_implementation
        if now != "eager":
            return Message("its attention is fused already ({now})", now=now)
        if not (model._supports_sdpa and model._can_set_attn_implementation()):
            return Message("{name} has only eager attention", name=name)
        if config.output_attentions:
            return Message("the config asks for attention weights, which only eager attention has")
        if setup.device_type == "cpu" and _attention_dropout(config):
            return Message(
                "a CPU has no fused attention with dropout: it would keep as much as "
                "eager attention ({dropout} is not 0)",
                dropout=_attention_dropout(config),
            )
        return ""

    def change(self, setup: Setup) -> None:
        model: Any = unwrap(setup.model)
        before = model.config._attn_implementation
        model.set_attn_implementation(self.implementation)
        setup.undo.append(lambda: model.set_attn_implementation(before))
        if model.config._attn_implementation != self.implementation:
            raise ConfigError(
                "{name} kept its {before} attention", name=type(model).__name__, before=before
            )


def _attention_dropout(config: Any) -> str:
    """The name of the setting that drops attention weights; empty where none are dropped."""
    return next((name for name in _DROPOUT_FIELDS if getattr(config, name, 0.0)), "")
