"""The memory of a real run, in the same terms as a prediction.

On a CPU the tracker of the prediction follows the real tensors. On a CUDA device the allocator's
own counters are read; to know what the peak was made of, they are read again after every module
and every gradient: where the peak has risen since the last reading, that is where it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memfit.errors import MemfitError
from memfit.memory.allocator import round_request
from memfit.memory.components import Component, MemoryPeak
from memfit.memory.cuda_context import workspace_bytes
from memfit.memory.device import capability, context_bytes, index_of, is_cuda, usual_context_bytes
from memfit.memory.tracing import traced_device
from memfit.memory.tracing.tracker import Tracker

Optimizers = Callable[[], Any]
"""Gives the optimizer, or None while there is none: the Trainer makes it late."""


class Measurement:
    """Filled when the measured block ends."""

    def __init__(self) -> None:
        self._peak: MemoryPeak | None = None

    @property
    def peak(self) -> MemoryPeak:
        """The highest use of what ran inside the block."""
        if self._peak is None:
            raise MemfitError("the peak is known when the measured block has ended")
        return self._peak


@contextmanager
def measure(model: torch.nn.Module, optimizer: Any = None) -> Iterator[Measurement]:
    """Measures what runs inside, on the device the model is on.

    `optimizer` is an optimizer, or a function that gives it once it exists.
    """
    found = Measurement()
    get: Optimizers = optimizer if callable(optimizer) else lambda: optimizer
    device = next(model.parameters()).device
    meter = CudaMeter(model, get, device) if is_cuda(device) else CpuMeter(model, get)
    with meter.reading():
        yield found
    found._peak = meter.peak()


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """The optimizer's own tensors, those inside quantized ones too."""
    states = [] if optimizer is None else optimizer.state.values()
    for state in states:
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield from plain_tensors(value)


def plain_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory behind them that a wrapping tensor is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    for part in parts:
        if isinstance(part, torch.Tensor):  # of one that is divided, the mesh is a part, too
            yield from plain_tensors(part)


def _weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(model.parameters(), model.buffers())


def _trained(model: torch.nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _gradients(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    return (p.grad for p in model.parameters() if p.grad is not None)


def _device_bytes(tensors: Iterator[torch.Tensor], device: torch.device) -> int:
    """The blocks behind these tensors on the device, each counted once."""
    storages = {}
    for tensor in tensors:
        if tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = (
                round_request(storage.nbytes()) if storage.nbytes() else 0
            )
    return sum(storages.values())


class RealTracker(Tracker):  # type: ignore[no-untyped-call]
    """The tracker over real tensors, of which some are made of others."""

    def _born(self, tensor: torch.Tensor) -> None:
        for part in plain_tensors(tensor):
            super()._born(part)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follows every tensor that is born inside."""
        with traced_device.following(self.resized), self:
            yield


class CpuMeter:
    """The prediction's tracker over real tensors: what lives counts, to the byte."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizers) -> None:
        self._model = model
        self._optimizer = optimizer
        self._tracker = RealTracker()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Follows every tensor that is born inside."""
        tracker = self._tracker
        tracker.adopt(_weights(self._model), Component.WEIGHTS)
        tracker.adopt(state_tensors(self._optimizer()), Component.OPTIMIZER)
        tracker.adopt(_gradients(self._model), Component.GRADIENTS)

        def note_gradient(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                tracker.tag(plain_tensors(parameter.grad), Component.GRADIENTS)

        hooks = [
            parameter.register_post_accumulate_grad_hook(note_gradient)
            for parameter in _trained(self._model).values()
        ]
        tracker.watch(self._model)
        try:
            with tracker.following():
                yield
        finally:
            tracker.unwatch()
            for hook in hooks:
                hook.remove()
        tracker.tag(state_tensors(self._optimizer()), Component.OPTIMIZER)

    def peak(self) -> MemoryPeak:
        """The moment at which most bytes were alive."""
        live = dict.fromkeys(Component, 0)
        now = highest = 0
        at_peak, module = dict(live), ""
        for event in self._tracker.events():
            signed = event.nbytes if event.birth else -event.nbytes
            live[event.component] += signed
            now += signed
            if now > highest:
                highest, at_peak, module = now, dict(live), event.module
        return MemoryPeak(at_peak, highest, highest, highest, module)


@dataclass
class _Reading:
    """What was known when the peak last rose."""

    peak_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    module: str = ""


class CudaMeter:
    """The caching allocator's counters, read often enough to place the peak."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizers, device: torch.device) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._at_peak = _Reading()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Reads the counters after every module and every gradient of what runs inside."""
        handles: list[Any] = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_hook(lambda *_, name=name: self._read(name)))
        for name, parameter in _trained(self._model).items():
            owner = name.rpartition(".")[0]
            handles.append(
                parameter.register_post_accumulate_grad_hook(
                    lambda _, owner=owner: self._read(owner)
                )
            )
        # A Trainer makes its optimizer late and wraps it: the hooks are on every optimizer.
        handles.append(register_optimizer_step_pre_hook(lambda *_: self._read("")))
        handles.append(register_optimizer_step_post_hook(lambda *_: self._read("optimizer")))
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._read("")

    def peak(self) -> MemoryPeak:
        """The allocator's peaks, and what the allocated one was made of."""
        allocated_bytes = torch.cuda.max_memory_allocated(self._device)
        reserved_bytes = torch.cuda.max_memory_reserved(self._device)
        held = {
            Component.WEIGHTS: _device_bytes(_weights(self._model), self._device),
            Component.GRADIENTS: self._at_peak.gradient_bytes,
            Component.OPTIMIZER: self._at_peak.optimizer_bytes,
            Component.WORKSPACE: workspace_bytes(capability(self._device)),
        }
        rest = allocated_bytes - sum(held.values())
        index = index_of(self._device)
        outside_bytes = context_bytes(index) or usual_context_bytes(index)
        components = {**held, Component.ACTIVATIONS: rest, Component.CONTEXT: outside_bytes}
        return MemoryPeak(
            components,
            allocated_bytes,
            reserved_bytes,
            reserved_bytes + outside_bytes,
            self._at_peak.module,
        )

    def _read(self, module: str) -> None:
        """If the peak has risen since the last reading, notes what is held now."""
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        if peak_bytes <= self._at_peak.peak_bytes:
            return
        self._at_peak = _Reading(
            peak_bytes,
            _device_bytes(_gradients(self._model), self._device),
            _device_bytes(state_tensors(self._optimizer()), self._device),
            module,
        )
