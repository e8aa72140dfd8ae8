"""What running out of memory looks like, and what can be given back at once.

After backward the weights begin to change, and nothing can be run again as a whole. But an
operator that finds no memory has written nothing: `Retrying` gives memory back and runs that one
operator again.

Packed batches are of ever new sizes, and glibc's heap keeps the gaps between them: without this
the process grows by some megabytes a step, although no tensor stays alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.memory.device import empty_cache, is_cuda

OPERATOR_TRIES = 3
"""How often an operator is run before its step is given up."""

# What allocators other than torch's own say; torch's CUDA allocator has its own exception.
_SIGNS = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)

_frozen = False  # whether `free_memory` has left objects out of the collections
_program_froze = False  # whether the program itself has


class BudgetExceeded(torch.OutOfMemoryError):
    """A tensor was made beyond the budget, on a device that would have had room for it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means out of memory, whichever library raised it.

    A graph whose capture runs out of memory ends with another error, raised while handling it.
    """
    return any(
        isinstance(one, torch.OutOfMemoryError | MemoryError)
        or (isinstance(one, RuntimeError) and any(sign in str(one).lower() for sign in _SIGNS))
        for one in _and_before(error)
    )


def let_go(error: BaseException) -> str:
    """Drop the tensors that the failed call's frames still hold; returns what was said."""
    *_, first = _and_before(error)
    for one in _and_before(error):
        traceback.clear_frames(one.__traceback__)
    # CUDA's message goes on for lines about what else the card holds.
    return ". ".join(str(first).strip().split("\n", 1)[0].split(". ")[:2]).rstrip(".")


def _and_before(error: BaseException) -> Iterator[BaseException]:
    """The error, and the errors that it was raised while handling."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__context__


def free_memory(device: torch.device) -> None:
    """Frees unused memory: cycles of Python objects, then the allocator's cache.

    A collection visits half a million objects of torch and transformers. Those that survive it are
    frozen (`gc.freeze`) until `end_of_training`. If the program has frozen objects itself, none
    are added: Python can only unfreeze all of them.
    """
    global _frozen, _program_froze
    gc.collect()
    if not _frozen and not _program_froze:
        # Counting walks through all of them, so that it is done until there are some.
        _program_froze = gc.get_freeze_count() > 0
    if not _program_froze:
        gc.freeze()
        _frozen = True
    empty_cache(device)


def end_of_training() -> None:
    """Unfreezes the objects that `free_memory` froze."""
    global _frozen
    if _frozen:
        gc.unfreeze()
    _frozen = False


class Retrying(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs an operator again, after `free(tries)`, when it found no memory.

    Only for the few operators of an update: every operator inside costs some microseconds.
    """

    def __init__(self, free: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._free = free
        self.retried = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for left in reversed(range(OPERATOR_TRIES)):
            try:
                return func(*args, **(kwargs or {}))
            except Exception as error:
                if left == 0 or not is_out_of_memory(error):
                    raise
                let_go(error)
            self._free(OPERATOR_TRIES - left)
            self.retried += 1
        raise AssertionError("the last try returns or raises")


@contextlib.contextmanager
def retrying(
    device: torch.device,
    note: Callable[[], None] | None = None,
    last_resort: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Inside, an operator that finds no memory runs again, and `note` is called.

    `last_resort` gives back memory that is only held to save time, before the last try.
    """
    if is_cuda(device) and torch.cuda.is_current_stream_capturing():
        yield  # nothing is executed, and so nothing half done
        return

    def free(tries: int) -> None:
        if tries == OPERATOR_TRIES - 1 and last_resort is not None:
            last_resort()
        free_memory(device)

    mode = Retrying(free)
    with mode:
        yield
    if mode.retried and note is not None:
        note()


_BETWEEN_TRIMS_SECONDS = 0.5
"""A trim takes some 20 ms, a step on a CPU seconds."""

_LARGE_BLOCK_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3  # malloc.h


class HeapTrimmer:
    """Gives back what steps on a CPU have freed, not more often than is worth it.

    glibc keeps freed blocks of up to 32 MiB for later ones. Between steps of other lengths they do
    not fit: a small encoder's process grew to 1.3 times what it held at its first step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = -math.inf

    def step(self) -> bool:
        """Trims the heap before a step, if it is time. Returns whether it did."""
        now = self._clock()
        if now - self._last < _BETWEEN_TRIMS_SECONDS:
            return False
        self._last = now
        return return_freed_memory()


def return_large_blocks() -> bool:
    """Makes tensors of 1 MiB and more go back to the system when they are freed.

    A process on a CPU then holds its libraries and its live tensors only: a quarter less at the
    peak, while steps take about a fifth longer. With a budget, memory is what is scarce. Returns
    False without glibc, which alone has this setting, and needs it.
    """
    setting = _from_libc("mallopt")
    return setting is not None and setting(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES) == 1


def return_freed_memory() -> bool:
    """Returns freed heap memory to the system. False without glibc, which alone can."""
    trim = _from_libc("malloc_trim")
    if trim is None:
        return False
    trim(0)
    return True


@functools.cache
def _from_libc(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL("libc.so.6"), name)
    except (OSError, AttributeError):
        return None
    return found
