"""Holds a process below its memory limit.

    CUDA   torch's allocator refuses, as it would on a card of that size; the context counts
    else   live tensors are counted, and a tensor beyond the limit is refused; the allocator of an
           accelerator refuses too, if torch can limit it

Counting takes a dispatch mode that sees every operator's result and every storage's death. It costs
about 5 microseconds an operator (1 to 3 % of a step of a small encoder), so step_guard.py counts
only steps that may need more than any counted before, and a few others.

On Windows, since driver 536.40, a CUDA allocation beyond the card's memory succeeds and lies in
shared (host) memory, at a tenth of the speed. A documented counter shows it (Task Manager does):
the performance object "GPU Process Memory", instances "pid_<process>_luid_<adapter>_phys_<n>",
counter "Shared Usage". It is read through pdh.dll. Not yet run on Windows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.memory.available import CudaReader, Read, reader_of
from memfit.memory.device import limit_allocator
from memfit.memory.measured import plain_tensors
from memfit.memory.out_of_memory import BudgetExceeded
from memfit.memory.tracing import traced_device
from memfit.memory.tracing.tracker import tensors_in
from memfit.units import MIB, format_both

_DEVICE = torch.ops.prim.device.default

_MOMENTS, _MOMENT_SECONDS = 50, 0.001


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors from birth to death; one that goes beyond the limit is not handed out."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are there now."""
        for tensor in tensors:
            for part in plain_tensors(tensor):
                self._born(part)

    def resized(self, tensor: torch.Tensor) -> None:
        """A storage was emptied or filled again, which no operator shows."""
        if (key := tensor.untyped_storage()._cdata) in self._live:
            self._died(key)
        self._born(tensor)

    def _exceeds(self) -> bool:
        """Whether too much is alive; gloo's threads may hold a buffer a moment too long."""
        if self.limit_bytes is None or self.live_bytes <= self.limit_bytes:
            return False
        for _ in range(_MOMENTS if dist.is_available() and dist.is_initialized() else 0):
            time.sleep(_MOMENT_SECONDS)
            if self.live_bytes <= self.limit_bytes:
                return False
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not _DEVICE:
            self.adopt(tensors_in(out))
        if self._exceeds():
            size_bytes = self.live_bytes
            del out
            raise BudgetExceeded(
                f"out of memory: {format_both(size_bytes)} of tensors, and the budget is "
                f"{format_both(self.limit_bytes or 0)}"
            )
        return out

    def _born(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        nbytes = storage.nbytes()
        if nbytes:
            self._live[key] = (nbytes, weakref.ref(storage, lambda _: self._died(key)))
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _died(self, key: int) -> None:
        nbytes, _ = self._live.pop(key)
        self.live_bytes -= nbytes


COUNTER = r"\GPU Process Memory(pid_{pid}_*)\Shared Usage"

_LARGE = 0x00000400  # PDH_FMT_LARGE

_MORE_DATA = 0x800007D2  # PDH_MORE_DATA

_SPILLED_BYTES = 64 * MIB
"""Command buffers and the like are shared from the start: what comes on top of that counts."""

ReadShared = Callable[[], int | None]


class SpillWatch:
    """Says when this process' shared usage has grown beyond what it began with.

    Pinned host memory counts as shared too, but is no spill: it is subtracted.
    """

    def __init__(
        self, read: ReadShared | None = None, pinned: Callable[[], int] | None = None
    ) -> None:
        self._read = read or reader_for(sys.platform)
        self._pinned = pinned or pinned_bytes
        self._usual_bytes: int | None = None

    def spilled_bytes(self) -> int:
        """Bytes that were moved to host memory; 0 without such a counter."""
        shared = self._read()
        if shared is None:
            return 0
        own = shared - self._pinned()
        if self._usual_bytes is None:
            self._usual_bytes = own
        beyond = own - self._usual_bytes
        return beyond if beyond > _SPILLED_BYTES else 0


def pinned_bytes() -> int:
    """Returns the host memory that torch has pinned, in use or kept for later."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def reader_for(platform: str) -> ReadShared:
    """Returns the reader of the counter; outside of Windows it reads nothing."""
    return SharedUsage() if platform == "win32" else lambda: None


class _Value(ctypes.Structure):
    """PDH_FMT_COUNTERVALUE_ITEM_W with a 64-bit value."""

    _fields_ = (
        ("name", ctypes.c_wchar_p),
        ("status", ctypes.c_uint32),
        ("large", ctypes.c_int64),
    )


class SharedUsage:
    """The counter of this process, over all its adapters."""

    def __init__(self, library: Any = None, pid: int | None = None) -> None:
        self._pdh = library
        self._pid = os.getpid() if pid is None else pid
        self._query = ctypes.c_void_p()
        self._counter = ctypes.c_void_p()
        self._opened: bool | None = None

    def __call__(self) -> int | None:
        """Bytes in shared memory; None where the counter is not there."""
        if self._opened is None:
            self._opened = self._open()
        if not self._opened or self._pdh.PdhCollectQueryData(self._query) != 0:
            return None
        size, count = ctypes.c_uint32(0), ctypes.c_uint32(0)
        array = self._pdh.PdhGetFormattedCounterArrayW
        sizes = (ctypes.byref(size), ctypes.byref(count))
        if array(self._counter, _LARGE, *sizes, None) & 0xFFFFFFFF != _MORE_DATA:
            return None
        buffer = ctypes.create_string_buffer(size.value)
        if array(self._counter, _LARGE, *sizes, buffer) != 0:
            return None
        values = ctypes.cast(buffer, ctypes.POINTER(_Value))
        return int(sum(values[index].large for index in range(count.value)))

    def _open(self) -> bool:
        try:
            self._pdh = self._pdh or ctypes.CDLL("pdh.dll")
        except OSError:
            return False
        path = COUNTER.format(pid=self._pid)
        if self._pdh.PdhOpenQueryW(None, 0, ctypes.byref(self._query)) != 0:
            return False
        # The English name works on every Windows, whatever its language.
        add = self._pdh.PdhAddEnglishCounterW
        return bool(add(self._query, path, 0, ctypes.byref(self._counter)) == 0)


COUNT_EVERY = 50
"""On a CPU, one step in this many is counted although it should fit."""


class CudaCap:
    """A share of the card that torch's allocator keeps to; the context is subtracted from it."""

    def __init__(self, read: CudaReader) -> None:
        self.read = read
        self._index = read.index
        self._before = torch.cuda.get_per_process_memory_fraction(self._index)
        self._total_bytes = torch.cuda.mem_get_info(self._index)[1]
        self._limit_bytes = 0
        self._allowed_bytes: int | None = None

    def move(self, limit_bytes: int) -> bool:
        """Sets a new limit. Returns True if the process still holds more than it."""
        self._limit_bytes = limit_bytes
        self._allowed_bytes = max(limit_bytes - self.read.context_bytes, 0)
        share = min(self._allowed_bytes / self._total_bytes, 1.0)
        torch.cuda.set_per_process_memory_fraction(share, self._index)
        if torch.cuda.memory_reserved(self._index) > self._allowed_bytes:
            torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._index) > self._allowed_bytes

    def keep(self) -> bool:
        """Re-applies the limit if the context has grown."""
        allowed_bytes = max(self._limit_bytes - self.read.context_bytes, 0)
        if self._allowed_bytes is None or self._allowed_bytes == allowed_bytes:
            return False
        return self.move(self._limit_bytes)

    def measure(self) -> bool:
        """Measures the context after kernels were loaded or graphs captured, then `keep`."""
        self.read.measure()
        return self.keep()

    def room_bytes(self) -> int | None:
        """The difference between the limit for tensors and what they take."""
        if self._allowed_bytes is None:
            return None
        return max(self._allowed_bytes - torch.cuda.memory_allocated(self._index), 0)

    @contextlib.contextmanager
    def counting(self, tokens: int, key: object) -> Iterator[None]:  # noqa: ARG002
        """The allocator counts by itself."""
        yield

    def release(self) -> None:
        """Restores the limit that was in force before."""
        torch.cuda.set_per_process_memory_fraction(self._before, self._index)


class CountingCap:
    """Counts the steps that may need more than any counted before.

    For every device but NVIDIA's; the allocator of an accelerator refuses more as well, if it can.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[torch.Tensor]],
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self._tensors = tensors
        self._device = device
        self.read: Read = reader_of(device, self.held_bytes)
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
        """Sets a new limit; below a smaller one all steps are counted again. Returns False."""
        if self._limit_bytes is not None and limit_bytes < self._limit_bytes:
            self._proven.clear()
        self._limit_bytes = limit_bytes
        limit_allocator(self._device, limit_bytes)
        return False

    def keep(self) -> bool:
        """Returns False: no context lies outside of what is counted."""
        return False

    def measure(self) -> bool:
        """Returns False: no context lies outside of what is counted."""
        return False

    def room_bytes(self) -> int | None:
        """Returns None: only counting the step can tell."""
        return None

    @contextlib.contextmanager
    def counting(self, tokens: int, key: object) -> Iterator[None]:
        """Counts the step, unless a batch at least as large has fitted before."""
        self._steps += 1
        proven = tokens <= self._proven.get(key, 0) and self._steps % COUNT_EVERY
        if self._limit_bytes is None or proven:
            yield
            return
        counter = LiveBytes(self._limit_bytes)
        counter.adopt(self._tensors())
        with traced_device.following(counter.resized), counter:
            yield
        self.counted += 1
        self.peak_bytes = max(self.peak_bytes, counter.peak_bytes)
        self._proven[key] = max(tokens, self._proven.get(key, 0))

    def release(self) -> None:
        """Stops counting."""
        self._limit_bytes = None
        limit_allocator(self._device, None)


Cap = CudaCap | CountingCap
"""Holds a process below a limit."""
