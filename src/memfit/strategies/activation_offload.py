"""Activation offload: what layers keep for backward waits in pinned host memory.

Beside checkpointing only the layers' inputs are kept, and so only these travel: the smallest
activations of all, at the least traffic. Which layers? The first, whose activations wait
longest; those of the last layer are wanted at once and stay in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from memfit.errors import ConfigError
from memfit.memory.trace import tensors_in
from memfit.messages import N_, Message
from memfit.strategies._activations import ActivationHost
from memfit.strategies._hosted import Link, link_to
from memfit.strategies._layers import (
    Args,
    Kwargs,
    Turns,
    keeps_activations,
    stack_of,
    stack_problem,
    wrap,
)
from memfit.strategies.base import Fidelity, Setup, Strategy


@dataclass(frozen=True, slots=True)
class ActivationOffload(Strategy):
    """The first `layers` layers' activations (None: all layers') go to the host until backward.

    Storages below `min_bytes` stay: a copy's fixed cost is more than they save.
    """

    name = "activation_offload"
    title = N_("activation offload")
    reason = "activations wait in the computer's own memory until the backward pass needs them"
    shrinks = ("activations",)

    layers: int | None = None
    min_bytes: int = 1 << 16

    def __post_init__(self) -> None:
        if self.layers is not None and self.layers < 1:
            raise ConfigError(
                Message("at least 1 layer must be offloaded, not {layers}", layers=self.layers)
            )
        if self.min_bytes < 1:
            raise ConfigError(
                Message("min_bytes must be at least 1, not {min_bytes}", min_bytes=self.min_bytes)
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def unavailable(self, setup: Setup) -> str:
        if setup.device_type != "cuda":
            return Message(
                "on a {device} device activations are in host memory already",
                device=setup.device_type,
            )
        return stack_problem(setup.model, self.layers)

    def change(self, setup: Setup) -> None:
        self.attach(setup, link_to(setup.device))

    def attach(self, setup: Setup, link: Link) -> ActivationHost:
        """Offload over this link, whatever the device: the trace has one of its own."""
        stack = stack_of(setup.model)
        host = ActivationHost(link, setup.device, self.min_bytes)
        turns = Turns(stack.depth if self.layers is None else self.layers)
        model = setup.model

        def begin(*_: Any) -> None:
            if torch.is_grad_enabled():
                turns.restart()
                host.begin(chain(model.parameters(), model.buffers()))

        setup.undo.append(stack.base.register_forward_pre_hook(begin).remove)
        for layer in stack.layers:
            setup.undo.append(wrap(layer, _offloading(host, turns)))
        setup.around_micro_batch.append(lambda: _settled(host))
        return host


def _offloading(host: ActivationHost, turns: Turns) -> Callable[..., Any]:
    def around(call: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        if not keeps_activations(module, args, kwargs):
            return call(*args, **kwargs)
        # All but the hidden states (masks, positions, relative embeddings) is the same for all
        # layers, and there until the step is over.
        others = [value for name, value in kwargs.items() if name != "hidden_states"]
        hooks = host.enter(saves=turns.take(), stays=tensors_in((*args[1:], *others)))
        context: AbstractContextManager[Any] = hooks or nullcontext()
        with context:
            return call(*args, **kwargs)

    return around


@contextmanager
def _settled(host: ActivationHost) -> Iterator[None]:
    """A captured graph must end with no copy left behind; elsewhere this costs nothing."""
    try:
        yield
    finally:
        host.settle()
