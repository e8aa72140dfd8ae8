"""Memory the process has freed, given back to the system.

Packed batches are of ever new sizes, and glibc's heap keeps the gaps between them: without this
the process grows by some megabytes a step, although no tensor stays alive.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

EVERY_STEPS = 8
"""A trim takes some 20 ms, a step on a CPU seconds."""


def return_freed_memory() -> bool:
    """Whether there was a way to do it: glibc has one, other systems need none or have none."""
    trim = _malloc_trim()
    if trim is None:
        return False
    trim(0)
    return True


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None
    return found
