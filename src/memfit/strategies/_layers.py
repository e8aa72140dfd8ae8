"""The stack of layers of a model, and how a strategy gets around each call of one.

A call is wrapped by giving that one module a subclass of its own class: `isinstance`, names,
hooks and weights stay as they are, a copy of the model stays a copy, and undoing it is one
assignment. Hooks on the layer run inside the wrapper, as in transformers' own checkpointing:
what a hook notes for its layer must be noted again when the layer is recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memfit.errors import ModelError
from memfit.messages import Message
from memfit.packing.families import unwrap
from memfit.parts import base_of, layers_of

Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Around = Callable[[Callable[..., Any], nn.Module, Args, Kwargs], Any]
Undo = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Stack:
    """The repeated layers of a model."""

    base: nn.Module
    layers: tuple[nn.Module, ...]
    depth: int
    """How many layers one text passes; more than there are modules where weights are shared."""


def stack_of(model: nn.Module) -> Stack:
    """The layers of a model, inside peft's and torch's wrappers too."""
    inner = unwrap(model)
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(
            Message(
                "{name} is no transformers model: its layers are unknown", name=type(inner).__name__
            )
        )
    layers = tuple(layers_of(inner))
    if not layers:
        raise ModelError(Message("{name} has no list of layers", name=type(inner).__name__))
    config: Any = inner.config.get_text_config()
    depth = getattr(config, "num_hidden_layers", 0) * getattr(config, "inner_group_num", 1)
    return Stack(base_of(inner), layers, max(len(layers), depth))


def stack_problem(model: nn.Module, layers: int | None) -> str:
    """Why so many layers cannot be had of this model; empty where they can."""
    try:
        stack = stack_of(model)
    except ModelError as error:
        return str(error)
    if layers is not None and layers > stack.depth:
        return Message(
            "the model has {depth} layers, not {layers}", depth=stack.depth, layers=layers
        )
    return ""


def wrap(module: nn.Module, around: Around, method: str = "__call__") -> Undo:
    """Every call of the method becomes `around(call, module, args, kwargs)`; returns the undo."""
    kind = type(module)
    original = getattr(kind, method)

    # The signature is kept: transformers counts the parameters of what it calls in chunks.
    @functools.wraps(original)
    def replaced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(original, self), self, args, kwargs)

    body = {method: replaced, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), body)

    def undo() -> None:
        module.__class__ = kind

    return undo


def keeps_activations(module: nn.Module, args: Args, kwargs: Kwargs) -> bool:
    """Whether autograd would keep anything of this call for a backward pass."""
    if not (module.training and torch.is_grad_enabled()):
        return False
    values = (*args, *kwargs.values())
    if any(isinstance(value, Tensor) and value.requires_grad for value in values):
        return True
    return any(parameter.requires_grad for parameter in module.parameters())


class Turns:
    """Counts the calls in one forward pass, and says which are among the first `limit`.

    The limit may be changed between two steps.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken = 0

    def restart(self, *_: Any) -> None:
        """A forward pass begins; a forward pre-hook of the base model calls this."""
        self._taken = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Turns:
        # A copied model's layers ask the same object as its copied hook restarts.
        return self

    def take(self) -> bool:
        """Whether the call that is made now is among the first."""
        self._taken += 1
        return self._taken <= self.limit
