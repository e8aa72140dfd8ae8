"""The limit itself: what happens when a process would hold more than it may.

CUDA   torch's allocator refuses, as it would on a card of that size; the context counts
CPU    the live tensors are counted, and one too many is refused (live_bytes.py)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

from memfit.runtime.live_bytes import LiveBytes
from memfit.runtime.watch import CpuReader, CudaReader, Read

COUNT_EVERY = 50
"""On a CPU, every so many steps are counted although they should fit."""


class Cap(Protocol):
    """Holds a process below a limit."""

    @property
    def read(self) -> Read:
        """Says what there is."""

    def move(self, limit_bytes: int) -> bool:
        """From now on this is the limit; whether more than that is still held."""

    def keep(self) -> bool:
        """Re-applies the limit if the context has grown. Returns True if more than it is held."""

    def measure(self) -> bool:
        """Measures the context, then `keep`."""

    def room_bytes(self) -> int | None:
        """What is left of it now; None where only counting would tell."""

    def counting(self, tokens: int, key: object) -> contextlib.AbstractContextManager[None]:
        """Around a step whose largest micro-batch has so many tokens, run in the way `key`."""

    def release(self) -> None:
        """The process may hold as much as it could before."""


class CudaCap:
    """A share of the card that torch's allocator keeps to."""

    def __init__(self, read: CudaReader) -> None:
        self.read = read
        self._index = read.index
        self._before = torch.cuda.get_per_process_memory_fraction(self._index)
        self._total_bytes = torch.cuda.mem_get_info(self._index)[1]
        self._limit_bytes = 0
        self._allowed_bytes: int | None = None

    def move(self, limit_bytes: int) -> bool:
        """The context is part of the limit, and torch's allocator does not know of it."""
        self._limit_bytes = limit_bytes
        self._allowed_bytes = max(limit_bytes - self.read.context_bytes, 0)
        share = min(self._allowed_bytes / self._total_bytes, 1.0)
        torch.cuda.set_per_process_memory_fraction(share, self._index)
        if torch.cuda.memory_reserved(self._index) > self._allowed_bytes:
            torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._index) > self._allowed_bytes

    def keep(self) -> bool:
        """The context may have grown."""
        allowed_bytes = max(self._limit_bytes - self.read.context_bytes, 0)
        if self._allowed_bytes is None or self._allowed_bytes == allowed_bytes:
            return False
        return self.move(self._limit_bytes)

    def measure(self) -> bool:
        """Kernels were loaded or graphs captured."""
        self.read.measure()
        return self.keep()

    def room_bytes(self) -> int | None:
        """Between what tensors take and what they may."""
        if self._allowed_bytes is None:
            return None
        return max(self._allowed_bytes - torch.cuda.memory_allocated(self._index), 0)

    @contextlib.contextmanager
    def counting(self, tokens: int, key: object) -> Iterator[None]:  # noqa: ARG002
        """The allocator counts by itself."""
        yield

    def release(self) -> None:
        """As it was before."""
        torch.cuda.set_per_process_memory_fraction(self._before, self._index)


class CpuCap:
    """Counts the steps that may need more than any counted before."""

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self.read: CpuReader = CpuReader(self.held_bytes)
        self._limit_bytes: int | None = None
        self._proven: dict[object, int] = {}
        self._steps = 0
        self.counted = 0
        """Steps that were counted."""
        self.peak_bytes = 0
        """The most that was alive in any of them."""

    def held_bytes(self) -> int:
        """Bytes of the tensors that are there between two steps."""
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in self._tensors()}
        return sum(storage.nbytes() for storage in storages.values())

    def move(self, limit_bytes: int) -> bool:
        """What fitted before may not fit now."""
        if self._limit_bytes is not None and limit_bytes < self._limit_bytes:
            self._proven.clear()
        self._limit_bytes = limit_bytes
        return False

    def keep(self) -> bool:
        """Nothing lies outside of it."""
        return False

    def measure(self) -> bool:
        """Nothing lies outside of it."""
        return False

    def room_bytes(self) -> int | None:
        """Not known without counting; the step as a whole is counted."""
        return None

    @contextlib.contextmanager
    def counting(self, tokens: int, key: object) -> Iterator[None]:
        """A batch no larger than one that fitted needs no more than that one."""
        self._steps += 1
        proven = tokens <= self._proven.get(key, 0) and self._steps % COUNT_EVERY
        if self._limit_bytes is None or proven:
            yield
            return
        counter = LiveBytes(self._limit_bytes)
        counter.adopt(self._tensors())
        with counter:
            yield
        self.counted += 1
        self.peak_bytes = max(self.peak_bytes, counter.peak_bytes)
        self._proven[key] = max(tokens, self._proven.get(key, 0))

    def release(self) -> None:
        """Nothing is counted any more."""
        self._limit_bytes = None
