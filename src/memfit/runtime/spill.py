"""Windows: memory that the driver moves to the host instead of saying that there is none.

Since driver 536.40 a CUDA allocation beyond the card's memory succeeds on Windows and lies in
shared (host) memory, at a tenth of the speed. The counter of it is documented: the performance
object "GPU Process Memory", instances "pid_<process>_luid_<adapter>_phys_<n>", counter "Shared
Usage" (what Task Manager shows). It is read through pdh.dll.

Written against the documentation and not yet run on Windows.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

from memfit.units import MIB

COUNTER = r"\GPU Process Memory(pid_{pid}_*)\Shared Usage"
_LARGE = 0x00000400  # PDH_FMT_LARGE
_MORE_DATA = 0x800007D2  # PDH_MORE_DATA
_SPILLED_BYTES = 64 * MIB
"""Command buffers and the like are shared from the start: what comes on top of that counts."""

ReadShared = Callable[[], int | None]


class SpillWatch:
    """Says when this process' shared usage has grown beyond what it began with.

    Pinned host memory is shared too, so what `pinned_bytes` says is taken off.
    """

    def __init__(self, read: ReadShared | None = None) -> None:
        self._read = read or reader_for(sys.platform)
        self._usual_bytes: int | None = None

    def spilled_bytes(self, pinned_bytes: int = 0) -> int:
        """What lies in host memory and should not; 0 where there is no such counter."""
        shared = self._read()
        if shared is None:
            return 0
        own = shared - pinned_bytes
        if self._usual_bytes is None:
            self._usual_bytes = own
        beyond = own - self._usual_bytes
        return beyond if beyond > _SPILLED_BYTES else 0


def reader_for(platform: str) -> ReadShared:
    """How the counter is read there; nothing is, outside of Windows."""
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
