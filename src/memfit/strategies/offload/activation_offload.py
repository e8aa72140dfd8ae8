"""Activation offload: what layers keep for backward waits in pinned host memory.

forward     layer i computes   |  layer i-1 is copied out   |  layer i-2 is let go
backward    layer i computes   |  layer i-1 is fetched      |  layer i-2 is on the host

So about two layers' activations are on the device at any time, and copies run beside the
computation. What is copied are whole storages: views of one (query, key and value; a tensor and
its transpose) travel once and come back with the strides they had, bit for bit.

torch's `save_on_cpu` does the same tensor by tensor and waits for every copy.

Beside checkpointing only the layers' inputs are kept, and so only these travel: the smallest
activations of all, at the least traffic. Which layers? The first, whose activations wait
longest; those of the last layer are wanted at once and stay in any case.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memfit.errors import ConfigError
from memfit.i18n import N_, Message, t
from memfit.memory.tracing.tracker import tensors_in
from memfit.models.layer_stack import (
    Args,
    Kwargs,
    Turns,
    keeps_activations,
    stack_of,
    stack_problem,
    wrap,
)
from memfit.strategies.activation_checkpointing import (
    layer_figures,
    layers_in_words,
)
from memfit.strategies.base import Fidelity, PlanFigures, Setup, Strategy
from memfit.strategies.offload.host_memory import Link, link_to


class Place(Enum):
    """Where a layer's activations are."""

    DEVICE = "device"
    LEAVING = "leaving"
    HOST = "host"
    COMING = "coming"
    READY = "ready"
    """On the device again, for backward; what is used up goes with autograd's graph."""


class Entry:
    """One storage: a flat tensor on the device, its copy on the host, or both."""

    def __init__(self, flat: Tensor, layer: Layer, link: Link) -> None:
        self.device: Tensor | None = flat
        self.host: Tensor | None = None
        self.layer = layer
        self._link = link

    def copy_out(self) -> Tensor:
        """Queue the copy to the host; returns what must live until it is done."""
        assert self.device is not None
        self.host = self._link.take(self.device.numel(), self.device.dtype)
        self._link.copy(self.host, self.device)
        return self.device

    def __del__(self) -> None:
        if self.host is not None:
            self._link.give()


class Saved:
    """What autograd holds instead of a tensor."""

    __slots__ = ("entry", "offset", "size", "stride")

    def __init__(self, entry: Entry, tensor: Tensor) -> None:
        self.entry = entry
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()


class Layer:
    """What one call of one layer saved, and the layer before it in the same forward pass."""

    def __init__(self, below: Layer | None) -> None:
        self.below = below
        self.place = Place.DEVICE
        self.mark: Any = None
        self.held: list[Tensor] = []
        """Device memory that a copy reads or writes."""
        # Weak: what autograd drops early is neither copied nor fetched.
        self._entries: dict[tuple[Any, ...], weakref.ref[Entry]] = {}

    def entries(self) -> Iterator[Entry]:
        """The storages that autograd still wants."""
        return (entry for ref in self._entries.values() if (entry := ref()) is not None)

    def entry(self, tensor: Tensor, link: Link) -> Entry:
        """The tensor's storage as an entry; one entry for all views of it."""
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, tensor.dtype)
        known = self._entries.get(key)
        entry = known() if known is not None else None
        if entry is None:
            flat = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            entry = Entry(flat, self, link)
            self._entries[key] = weakref.ref(entry)
        return entry


class ActivationHost:
    """Takes saved tensors of the layers to the host and back in time."""

    def __init__(self, link: Link, device: torch.device, min_bytes: int) -> None:
        self._link = link
        self._device = device
        self._min_bytes = min_bytes
        self._stays: set[int] = set()
        self._current: Layer | None = None
        self._moving: list[Layer] = []
        self.copied_bytes = 0
        """Copied to the host since the last forward pass began."""

    def begin(self, stays: Iterable[Tensor]) -> None:
        """A forward pass begins; `stays` are tensors that are on the device in any case."""
        self.settle()
        self._current = None
        self._stays = {tensor.untyped_storage()._cdata for tensor in stays}
        self.copied_bytes = 0

    def enter(self, *, saves: bool, stays: Iterable[Tensor] = ()) -> saved_tensors_hooks | None:
        """The next layer begins; the hooks to run it under, if it is to be offloaded."""
        below = self._current
        if below is not None:
            if below.below is not None and below.below.place is Place.LEAVING:
                self._let_go(below.below)
            # Only now: what the last layer saved is wanted at once and never leaves.
            if below.place is Place.DEVICE:
                self._send(below)
        self._current = Layer(below)
        if not saves:
            return None
        inputs = {tensor.untyped_storage()._cdata for tensor in stays}
        return saved_tensors_hooks(partial(self._pack, self._current, inputs), self._unpack)

    def settle(self) -> None:
        """Everything computed from here on comes after all copies; nothing is in flight."""
        for layer in list(self._moving):
            if layer.place is Place.LEAVING:
                self._let_go(layer)
            else:
                self._arrive(layer)

    # ---- autograd's hooks ----

    def _pack(self, layer: Layer, inputs: set[int], tensor: Tensor) -> Tensor | Saved:
        # An operator's own output, saved as it is, would keep its graph alive from inside.
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        if (
            storage.nbytes() < self._min_bytes
            or tensor.device.type != self._device.type
            or storage._cdata in self._stays
            or storage._cdata in inputs
        ):
            return tensor
        return Saved(layer.entry(tensor, self._link), tensor)

    def _unpack(self, saved: Tensor | Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        layer = saved.entry.layer
        if layer.place is not Place.READY:
            self._make_ready(layer)
        assert saved.entry.device is not None
        return saved.entry.device.as_strided(saved.size, saved.stride, saved.offset)

    # ---- a layer's way ----

    def _send(self, layer: Layer) -> None:
        leaving = list(layer.entries())
        if not leaving:
            return
        self._link.follow()
        layer.held = [entry.copy_out() for entry in leaving]
        self.copied_bytes += sum(flat.nbytes for flat in layer.held)
        self._set_off(layer, Place.LEAVING)

    def _let_go(self, layer: Layer) -> None:
        self._land(layer, Place.HOST)
        for entry in layer.entries():
            entry.device = None

    def _make_ready(self, layer: Layer) -> None:
        """Backward has come to this layer: have it here, and the one below on its way."""
        if layer.place is Place.HOST:
            self._fetch(layer)
        self._arrive(layer)
        below = layer.below
        if below is not None and below.place is Place.HOST:
            self._fetch(below)

    def _fetch(self, layer: Layer) -> None:
        coming = [(entry, entry.host) for entry in layer.entries() if entry.host is not None]
        for entry, host in coming:
            entry.device = torch.empty(host.shape, dtype=host.dtype, device=self._device)
            layer.held.append(entry.device)
        # After the allocations: this memory may be in use by what is computed until now.
        self._link.follow()
        for flat, (_, host) in zip(layer.held, coming, strict=True):
            self._link.copy(flat, host)
        self._set_off(layer, Place.COMING)

    def _arrive(self, layer: Layer) -> None:
        if layer in self._moving:
            self._land(layer, Place.READY)
        layer.place = Place.READY

    def _set_off(self, layer: Layer, place: Place) -> None:
        layer.mark, layer.place = self._link.mark(), place
        self._moving.append(layer)

    def _land(self, layer: Layer, place: Place) -> None:
        self._link.wait(layer.mark)
        layer.mark, layer.place = None, place
        layer.held.clear()
        self._moving.remove(layer)


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
                "at least 1 layer must be offloaded, not {layers}", layers=self.layers
            )
        if self.min_bytes < 1:
            raise ConfigError(
                "min_bytes must be at least 1, not {min_bytes}", min_bytes=self.min_bytes
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def in_words(self) -> str:
        if self.layers is None:
            return t("activations in host memory")
        return t("activations of {layers} in host memory", layers=layers_in_words(self.layers))

    def explain(self, plan: PlanFigures) -> str:
        return Message(
            "activations of {count} of {depth} layers wait in host memory: saves "
            "{saved}, costs {cost} of the step",
            **layer_figures(self, self.layers, plan),
        )

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
