"""What a step changes besides gradients (buffers, random numbers), kept so it can run again.

Most buffers never change. Which ones do is seen in the first pass that ends: until then all are
copied, to the host; from then on only those, where they lie. A copy is made before every step of a
model that has such buffers, and none for the others.

Parameters hold their hooks where Python's garbage collector does not look. An optimizer that a
hook holds, and that holds its parameters, would never be freed, nor the model with it: the next
training in the same notebook finds the memory of the last one taken.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from memfit.memory.device import best_device, random_state, set_random_state
from memfit.memory.tracing import traced_device

_Place = tuple[nn.Module, str]


@dataclass(frozen=True, slots=True)
class _Kept:
    place: _Place
    tensor: Tensor
    copy: Tensor

    @property
    def has_moved(self) -> bool:
        module, name = self.place
        if module._buffers.get(name) is not self.tensor:
            return True
        # By value: batch norm's kernels write its statistics without counting a version.
        return not torch.equal(self.tensor.to(self.copy.device), self.copy)


class BufferState:
    """The buffers as they were at one moment."""

    def __init__(self, places: list[_Place], *, to_host: bool) -> None:
        self._kept: list[_Kept] = []
        for module, name in places:
            tensor = module._buffers.get(name)
            if tensor is not None:
                copy = tensor.detach().to("cpu", copy=True) if to_host else tensor.detach().clone()
                self._kept.append(_Kept((module, name), tensor, copy))

    @property
    def moved(self) -> list[_Place]:
        """The buffers that were replaced or hold other values now."""
        return [kept.place for kept in self._kept if kept.has_moved]

    @torch.no_grad()
    def restore(self) -> None:
        """Restores all buffers."""
        for kept in self._kept:
            module, name = kept.place
            module._buffers[name] = kept.tensor
            kept.tensor.copy_(kept.copy)


class Buffers:
    """Knows which buffers of a model move, once a pass has shown it."""

    def __init__(self) -> None:
        self._moving: list[_Place] | None = None

    @property
    def may_move(self) -> bool:
        """Whether any buffer may change, as far as is known."""
        return self._moving is None or bool(self._moving)

    def now(self, model: nn.Module) -> BufferState:
        """Copies the buffers that the next pass may change."""
        if traced_device.device():
            return BufferState([], to_host=False)  # a trace computes no values
        if self._moving is not None:
            return BufferState(self._moving, to_host=False)
        places = [(module, name) for module in model.modules() for name in module._buffers]
        return BufferState(places, to_host=True)

    def learn(self, before: BufferState) -> None:
        """Learns which buffers move, after a whole pass."""
        if self._moving is None:
            self._moving = before.moved


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of every random generator at one moment."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    accelerator: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Reads all generators; takes microseconds and does not wait for the device."""
        return cls(
            random.getstate(),
            np.random.get_state(),
            torch.random.get_rng_state(),
            random_state(device),
        )

    def restore(self, device: torch.device) -> None:
        """Restores all generators."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.random.set_rng_state(self.cpu)
        set_random_state(device, self.accelerator)


def on_gradient(p: Tensor, method: Callable[[Tensor], None]) -> RemovableHandle:
    """Call a bound method when the parameter's gradient is complete, while its owner lives."""
    reference: Any = WeakMethod(method)

    def call(parameter: Tensor) -> None:
        if (alive := reference()) is not None:
            alive(parameter)

    handle: RemovableHandle = p.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
    return handle


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Random numbers drawn inside leave no trace outside, so that when one evaluates is free.

    (Every data loader draws a seed. A checkpoint taken before an evaluation would otherwise
    resume with other dropout than the run that evaluated.)
    """
    device = best_device()
    before = RandomState.now(device)
    try:
        yield
    finally:
        before.restore(device)
