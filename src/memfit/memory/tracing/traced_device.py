"""For which device a memory trace runs, and what its fake tensors cannot say of themselves.

A trace runs the real step on fake CPU tensors, whatever device it is for. Code that behaves
differently on another device asks `device()`; code that puts tensors into host memory says so
with `hosted` or `on_host`, or they would be counted to the device. Outside of a trace all of
it does nothing, except that who counts real tensors may follow `resized`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TracedDevice:
    """The device a trace is for."""

    cuda: bool
    capability: tuple[int, int] = (0, 0)
    triton: bool = True
    """Whether the kernels of Triton would run there."""


class Trace(Protocol):
    """What a running trace is told."""

    @property
    def device(self) -> TracedDevice:
        """What it is for."""

    def hosted(self, tensor: Tensor) -> None:
        """A tensor lies in host memory."""

    def on_host(self) -> AbstractContextManager[Any]:
        """What is born inside lies in host memory."""

    def resized(self, tensor: Tensor) -> None:
        """A tensor's storage was emptied, or filled again."""

    def alike(self, key: Hashable, run: Callable[[], None], times: int) -> None:
        """Something leaves nothing behind and is done so many times, each time as `run` does it."""


_active: Trace | None = None


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """Sets the active trace; operators report their allocations to it."""
    global _active
    before, _active = _active, trace
    try:
        yield
    finally:
        _active = before


def device() -> TracedDevice | None:
    """The device of the active trace; None outside of a trace."""
    return None if _active is None else _active.device


def hosted(tensor: Tensor) -> Tensor:
    """The same tensor, known to lie in host memory."""
    if _active is not None:
        _active.hosted(tensor)
    return tensor


def on_host() -> AbstractContextManager[Any]:
    """Tensors born inside lie in host memory."""
    return nullcontext() if _active is None else _active.on_host()


_followers: list[Callable[[Tensor], None]] = []


@contextmanager
def following(told: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, `told` hears of every real tensor whose storage was emptied or filled again."""
    _followers.append(told)
    try:
        yield
    finally:
        _followers.remove(told)


def resized(tensor: Tensor) -> None:
    """A tensor's storage has another size now."""
    if _active is not None:
        _active.resized(tensor)
        return
    for told in _followers:
        told(tensor)


def alike(key: Hashable, run: Callable[[], None], times: int) -> None:
    """`run` so many times: all of the same key are alike, so a trace need not run them all."""
    if _active is not None:
        _active.alike(key, run, times)
