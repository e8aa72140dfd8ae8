"""Follows every storage from birth to death, of real tensors or of fake ones.

`Tracker` is a dispatch mode: while it is entered, each operator's result is looked at and
each new storage written down with the component and the module it was born for. It never
keeps a tensor alive. The same tracker runs over the fake trace and over a real CPU step,
so a prediction and a measurement are the same quantity.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.memory.components import Component, Event

_DEVICE = torch.ops.prim.device.default
_BACKWARD_NODE: Callable[[], Any] = torch._C._current_autograd_node
_SEQUENCE: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of what a call is given or gives: one, or any number in lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every storage's birth and death, in order."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No trace is compiled, so operators need no wrapper that keeps the compiler away."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.component = Component.ACTIVATIONS
        self.live_bytes = 0
        self.peak_bytes = 0
        self.host_bytes = 0
        self.host_peak_bytes = 0
        self._on_host = False
        self._hosted: dict[int, int] = {}
        self._log: list[int] = []  # a block's number at its birth, its complement at its death
        self._blocks: list[tuple[int, Component, str]] = []
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._modules: list[str] = []
        # Autograd numbers its nodes as the forward pass makes them: where the module
        # changed, so that a backward node can be traced to the module it belongs to.
        self._marks: list[int] = []
        self._marked: list[str] = []
        self._handles: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not _DEVICE:
            self.record(out)
        return out

    def record(self, out: Any) -> None:
        """Records the storages of an operator's result that are new."""
        if isinstance(out, torch.Tensor):
            self._born(out)
            return
        for tensor in tensors_in(out):
            self._born(tensor)

    def _born(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        nbytes = storage.nbytes()
        if nbytes == 0:
            return
        block = self._open(nbytes)
        self._live[key] = (block, weakref.ref(storage, lambda _: self._died(key)))

    def _open(self, nbytes: int) -> int:
        block = len(self._blocks)
        if self._on_host:
            self._host(block, nbytes)
            nbytes = 0
        self._blocks.append((nbytes, self.component, self.module))
        self._log.append(block)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return block

    def _host(self, block: int, nbytes: int) -> None:
        self._hosted[block] = nbytes
        self.host_bytes += nbytes
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)

    def _died(self, key: int) -> None:
        block, _ = self._live.pop(key)
        self._close(block)

    def _close(self, block: int) -> None:
        self._log.append(~block)
        self.live_bytes -= self._blocks[block][0]
        self.host_bytes -= self._hosted.pop(block, 0)

    def transient(self, nbytes: int) -> None:
        """A kernel's own buffer: born and dead within one operator."""
        if nbytes > 0:
            self._close(self._open(nbytes))

    def adopt(self, tensors: Iterator[torch.Tensor], component: Component) -> None:
        """Starts to follow tensors that were there before the tracker."""
        before, self.component = self.component, component
        for tensor in tensors:
            self._born(tensor)
        self.component = before

    def tag(self, tensors: Iterator[torch.Tensor], component: Component) -> None:
        """Sets the component of live storages, once that is known: gradients, optimizer state."""
        for tensor in tensors:
            found = self._live.get(tensor.untyped_storage()._cdata)
            if found is not None:
                nbytes, _, module = self._blocks[found[0]]
                self._blocks[found[0]] = (nbytes, component, module)

    def forget(self, tensors: Iterator[torch.Tensor]) -> None:
        """Takes storages out of the account: they lie on the host in the real run."""
        for tensor in tensors:
            # It stays known, of no size: else the next operator that writes to it counts it anew.
            found = self._live.get(tensor.untyped_storage()._cdata)
            if found is not None:
                block = found[0]
                nbytes = self._blocks[block][0]
                self.live_bytes -= nbytes
                self._blocks[block] = (0, *self._blocks[block][1:])
                if nbytes:
                    self._host(block, nbytes)

    def hosted(self, tensor: torch.Tensor) -> None:
        """A tensor lies on the host in the real run, whether it is followed already or not."""
        with self.on_host():
            self._born(tensor)
        self.forget(iter((tensor,)))

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """What is born inside lies in host memory."""
        before, self._on_host = self._on_host, True
        try:
            yield
        finally:
            self._on_host = before

    def moved(self, tensor: torch.Tensor) -> None:
        """A weight that lay on the host goes to the device; one that is there stays."""
        found = self._live.get(tensor.untyped_storage()._cdata)
        if found is None or found[0] in self._hosted:
            self.resized(tensor)

    def resized(self, tensor: torch.Tensor) -> None:
        """A weight's storage was emptied or filled again, which no operator shows."""
        key = tensor.untyped_storage()._cdata
        if key in self._live:
            self._died(key)
        with self.accounting(Component.WEIGHTS):
            self._born(tensor)

    @contextmanager
    def accounting(self, component: Component) -> Iterator[None]:
        """What is born inside is for `component`."""
        before, self.component = self.component, component
        try:
            yield
        finally:
            self.component = before

    @property
    def module(self) -> str:
        """The module at work: of the forward pass, or the one whose backward runs."""
        if self._marks and not torch.is_grad_enabled():
            node = _BACKWARD_NODE()
            if node is not None:
                at = bisect.bisect_right(self._marks, node._sequence_nr()) - 1
                return self._marked[at] if at >= 0 else ""
        return self._modules[-1] if self._modules else ""

    def watch(self, model: torch.nn.Module) -> None:
        """Records the module of every birth; undone by `unwatch`."""

        def leave(*_: Any) -> None:
            if self._modules:
                self._modules.pop()
            self._mark(self._modules[-1] if self._modules else "")

        for name, module in model.named_modules():

            def enter(*_: Any, name: str = name) -> None:
                self._modules.append(name)
                self._mark(name)

            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def unwatch(self) -> None:
        """Removes the hooks of `watch`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _mark(self, name: str) -> None:
        self._marks.append(_SEQUENCE())
        self._marked.append(name)

    @property
    def position(self) -> int:
        """How many births and deaths were written down so far."""
        return len(self._log)

    def events(self, start: int = 0, stop: int | None = None) -> list[Event]:
        """The births and deaths in order, with what is known about them by now."""
        out = []
        for entry in self._log[start:stop]:
            block = entry if entry >= 0 else ~entry
            nbytes, component, module = self._blocks[block]
            if nbytes:
                out.append(Event(block, nbytes, entry >= 0, component, module))
        return out
