"""How much memory there is for this run now: other processes take some and give it back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from memfit.memory.cuda_context import PAGE_BYTES, USUAL_GRAPHED_KERNELS, run_context_bytes
from memfit.memory.device import (
    capability,
    context_bytes,
    free_and_total_bytes,
    held_bytes,
    index_of,
    is_cuda,
    kind_of,
    most_context_bytes,
    usual_context_bytes,
    working_set_bytes,
)
from memfit.units import DISPLAY_HEADROOM_BYTES, MIB, Budget

LOOK_SECONDS = 0.25
"""Asking the driver takes up to a millisecond: some times a second is enough beside a budget in
bytes. With `auto` what others leave is the budget, and is asked for at every step."""

_MEASURE_SECONDS = 2.0
"""Time until the context is measured again; doubled after each measurement."""

_MARGIN_BYTES = 32 * MIB
"""Left free beside a budget in bytes: the driver itself takes a little now and then."""

_STRANGE = 2
"""A context this many times the expected one contains memory of other processes."""

SHRUNK, GROWN = 0.99, 1.05
"""A limit moves when it has fallen by one hundredth or risen by five: free memory flickers."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """What a device has, what is free of it, and what this process holds."""

    total_bytes: int
    free_bytes: int
    own_bytes: int

    def limit_bytes(self, budget: Budget) -> int:
        """What this process may hold: the budget, as far as others leave room for it."""
        within_reach = self.free_bytes + self.own_bytes
        if budget == Budget():
            return max(within_reach - DISPLAY_HEADROOM_BYTES, 0)
        asked = budget.resolve(total_bytes=self.total_bytes, free_bytes=within_reach)
        return max(min(asked, within_reach - _MARGIN_BYTES), 0)


Read = Callable[[], MemoryReading]

_CAPTURED: set[int] = set()
"""Cards on which this process has run a training with captured graphs."""


class CudaReader:
    """A card's memory, and the context, which torch does not count.

    Libraries load when they are first used and graphs are captured as they are needed, so the
    context is at least what a plan expects of it, and is measured again, ever more rarely. The
    page that torch may map beyond its limit is counted to it.
    """

    def __init__(
        self,
        device: torch.device,
        expected_bytes: int | None = None,
        *,
        copies: bool = False,
        graphs: bool = False,
    ) -> None:
        """`expected_bytes` is a plan's prediction; without one it follows from what a step does."""
        self.index = index_of(device)
        kind = capability(device)
        usual = usual_context_bytes(self.index)
        self.context_bytes = expected_bytes or run_context_bytes(
            usual,
            kind,
            streams=graphs or copies,
            graphed_kernels=USUAL_GRAPHED_KERNELS if graphs else 0,
        )
        # Where the driver does not tell processes apart, a neighbour's memory is in it.
        self._strange_bytes = _STRANGE * most_context_bytes(self.index)
        self._measured_bytes = self.context_bytes
        self._learn(context_bytes(self.index))
        if graphs and self.index in _CAPTURED:
            # What the driver kept of an earlier training's graphs is not used for the next ones.
            to_come = run_context_bytes(0, kind, {}, graphed_kernels=USUAL_GRAPHED_KERNELS)
            again_bytes = self._measured_bytes + to_come + PAGE_BYTES
            self.context_bytes = max(self.context_bytes, again_bytes)
        if graphs:
            _CAPTURED.add(self.index)
        self._pause_seconds = _MEASURE_SECONDS
        self._due = time.monotonic() + self._pause_seconds

    def _learn(self, measured_bytes: int | None) -> None:
        if measured_bytes is not None and measured_bytes < self._strange_bytes:
            self._measured_bytes = measured_bytes
            self.context_bytes = max(self.context_bytes, measured_bytes + PAGE_BYTES)

    def measure(self) -> None:
        """Measures the context now, after something was loaded or captured."""
        with contextlib.suppress(OSError):  # a driver that does not answer now
            self._learn(context_bytes(self.index, load=False))

    def __call__(self) -> MemoryReading:
        if time.monotonic() >= self._due:
            self.measure()
            self._pause_seconds *= 2
            self._due = time.monotonic() + self._pause_seconds
        own_bytes = torch.cuda.memory_reserved(self.index) + self._measured_bytes
        free_bytes, total_bytes = free_and_total_bytes(self.index, own_bytes)
        return MemoryReading(total_bytes, free_bytes, own_bytes)


class CpuReader:
    """The machine's memory; of this process' own only tensors are counted, as in the budget."""

    def __init__(self, held_bytes: Callable[[], int]) -> None:
        self._held_bytes = held_bytes

    def __call__(self) -> MemoryReading:
        memory = psutil.virtual_memory()
        return MemoryReading(int(memory.total), int(memory.available), self._held_bytes())


class AcceleratorReader:
    """The memory of an accelerator that is not NVIDIA's, by torch's own counters."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self) -> MemoryReading:
        free_bytes, total_bytes = working_set_bytes(self._device)
        return MemoryReading(total_bytes, free_bytes, held_bytes(self._device))


def reader_of(device: torch.device, tensor_bytes: Callable[[], int]) -> Read:
    """How memory is read on a device; on a CPU `tensor_bytes` says what this process' own is."""
    if is_cuda(device):
        return CudaReader(device)
    return CpuReader(tensor_bytes) if kind_of(device) == "cpu" else AcceleratorReader(device)


class Watch:
    """Follows the limit from step to step."""

    def __init__(
        self,
        budget: Budget,
        read: Read,
        clock: Callable[[], float] = time.monotonic,
        *,
        every_step: bool = False,
    ) -> None:
        self.budget = budget
        self._every_step = every_step
        self.read = read
        self._clock = clock
        self._looked: float | None = None
        self.limit_bytes = read().limit_bytes(budget)

    def look(self) -> tuple[int, int] | None:
        """Returns the limit before and now if it has moved, else None."""
        now = self._clock()
        recently = self._looked is not None and now - self._looked < LOOK_SECONDS
        if recently and not self._every_step:
            return None
        self._looked = now
        before, limit = self.limit_bytes, self.read().limit_bytes(self.budget)
        if before * SHRUNK <= limit <= before * GROWN:
            return None
        self.limit_bytes = limit
        return before, limit
