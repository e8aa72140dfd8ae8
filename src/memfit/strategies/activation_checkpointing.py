"""Activation checkpointing: layers are computed a second time instead of kept for backward.

Own wrapper around `torch.utils.checkpoint`, for any model whose layers `parts.layers_of` finds:
ALBERT and MPNet refuse transformers' own, and that one knows all layers or none.

Which k of n layers? The first. At the end of the forward pass the choice makes no difference:
k layer inputs and n - k whole layers are kept. But a layer that is recomputed needs room for
itself, and when backward reaches the lowest layers all those above have given theirs back. Were
the last k recomputed, that room would come on top of the n - k whole layers below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from memfit.errors import ConfigError
from memfit.i18n import N_, Message, nt, t
from memfit.models.layer_stack import (
    Args,
    Kwargs,
    Turns,
    keeps_activations,
    stack_of,
    stack_problem,
    unwrap,
    wrap,
)
from memfit.strategies.base import Fidelity, PlanFigures, Setup, Strategy

# A decoder's cache would take in the same keys a second time; nothing reads it in training.
_NO_CACHE = {"past_key_values": None, "layer_past": None, "use_cache": False}


@dataclass(frozen=True, slots=True)
class Checkpointing(Strategy):
    """The first `layers` layers (None: all) are recomputed in backward."""

    name = "checkpointing"
    title = N_("recomputing layers")
    reason = "a layer's activations are computed again when they are needed, not kept until then"
    shrinks = ("activations",)

    layers: int | None = None

    def __post_init__(self) -> None:
        if self.layers is not None and self.layers < 1:
            raise ConfigError(
                "at least 1 layer must be recomputed, not {layers}", layers=self.layers
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def in_words(self) -> str:
        if self.layers is None:
            return t("every layer recomputed")
        return t("{layers} recomputed", layers=layers_in_words(self.layers))

    def explain(self, plan: PlanFigures) -> str:
        return Message(
            "recomputes {count} of {depth} layers: saves {saved}, costs {cost} of the step",
            **layer_figures(self, self.layers, plan),
        )

    def stock_arguments(self) -> dict[str, Any]:
        return {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        }

    def unavailable(self, setup: Setup) -> str:
        stock = getattr(unwrap(setup.model), "is_gradient_checkpointing", False)
        if stock or setup.args.gradient_checkpointing:
            return Message("gradient_checkpointing is on and recomputes every layer already")
        return stack_problem(setup.model, self.layers)

    def change(self, setup: Setup) -> None:
        stack = stack_of(setup.model)
        turns = Turns(stack.depth if self.layers is None else self.layers)
        setup.undo.append(stack.base.register_forward_pre_hook(turns.restart).remove)
        for layer in stack.layers:
            setup.undo.append(wrap(layer, _recomputing(turns)))
        setup.recomputed = turns


def layers_in_words(count: int) -> str:
    """Returns a number of layers for a person."""
    return nt("one layer", "{count} layers", count)


def layer_figures(strategy: Strategy, layers: int | None, plan: PlanFigures) -> dict[str, str]:
    """Returns the fields of a sentence about a strategy for some layers."""
    count = plan.task.depth if layers is None else layers
    return {"count": str(count), "depth": str(plan.task.depth), **plan.saves(strategy)}


def _recomputing(turns: Turns) -> Callable[..., Any]:
    def around(call: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        # Frozen layers below the first that learns keep nothing, so there is nothing to save.
        if not keeps_activations(module, args, kwargs) or not turns.take():
            return call(*args, **kwargs)
        return _recomputed(call, args, kwargs)

    return around


def _recomputed(call: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """The call, its activations dropped; tensors are handed over by position whatever their name.

    Only those are saved as autograd saves tensors, where an offload can take them to the host.
    """
    kwargs = {name: _NO_CACHE.get(name, value) for name, value in kwargs.items()}
    # GPT-2 hands its cache over by position; a layer that is run again would fill it twice.
    args = tuple(None if isinstance(value, Cache) else value for value in args)
    names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    rest = {name: value for name, value in kwargs.items() if name not in names}

    count = len(args)  # and not the arguments: this closure lives until backward

    def again(*values: Any) -> Any:
        return call(*values[:count], **dict(zip(names, values[count:], strict=True)), **rest)

    # The random state is stashed and put back, so that dropout drops the same in both passes.
    return checkpoint(
        again,
        *args,
        *(kwargs[name] for name in names),
        use_reentrant=False,
        preserve_rng_state=True,
    )
