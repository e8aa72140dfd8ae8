"""What the driver says a card holds: the few NVML calls memfit needs, without a package for them.

NVML answers without a CUDA context, so it can be asked before one exists, and it is where
nvidia-smi gets its numbers.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LIBRARIES = ("libnvidia-ml.so.1", "libnvidia-ml.so", "nvml.dll")
_MAX_PROCESSES = 256
_NAME_LENGTH = 96
_UNKNOWN = 2**64 - 1


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t: `used` leaves out what the driver keeps for itself, as nvidia-smi does."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
        ("free", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
    )


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t (v2)."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_uint64),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What a card holds now, over all processes."""

    total_bytes: int
    used_bytes: int
    own_bytes: int | None
    """What the driver books to this process; None where it cannot tell (containers, Windows)."""


@dataclass(frozen=True, slots=True)
class DriverCard:
    """A card as the driver names it."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver, whatever torch there is."""

    version: str
    cuda: tuple[int, int]
    """The newest CUDA it runs."""
    cards: tuple[DriverCard, ...]


def driver() -> Driver | None:
    """The driver and its cards; None where there is none."""
    library = _load()
    if library is None:
        return None
    try:
        return _described(library)
    except OSError:  # a driver that answers no question is of no use to anybody
        return None
    finally:
        library.nvmlShutdown()


def _described(library: ctypes.CDLL) -> Driver:
    text = ctypes.create_string_buffer(_NAME_LENGTH)
    _check(library.nvmlSystemGetDriverVersion(text, _NAME_LENGTH))
    cuda, count = ctypes.c_int(), ctypes.c_uint()
    _check(library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda)))
    _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    version = text.value.decode(errors="replace")
    cards = tuple(_card(library, index) for index in range(count.value))
    return Driver(version, (cuda.value // 1000, cuda.value % 1000 // 10), cards)


def _card(library: ctypes.CDLL, index: int) -> DriverCard:
    handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_LENGTH)
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)))
    _check(library.nvmlDeviceGetName(handle, text, _NAME_LENGTH))
    _check(
        library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    )
    use = Nvml(library, handle).use()
    name = text.value.decode(errors="replace")
    return DriverCard(name, (major.value, minor.value), use.total_bytes, use.used_bytes)


class Nvml:
    """One device's counters, held open so that a thread can poll them."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def use(self) -> DeviceUse:
        """What the device holds now."""
        memory = _Memory(version=ctypes.sizeof(_Memory) | (2 << 24))
        _check(self._library.nvmlDeviceGetMemoryInfo_v2(self._handle, ctypes.byref(memory)))
        return DeviceUse(memory.total, memory.used, self._own_bytes())

    def _own_bytes(self) -> int | None:
        count = ctypes.c_uint(_MAX_PROCESSES)
        table = (_Process * _MAX_PROCESSES)()
        query = self._library.nvmlDeviceGetComputeRunningProcesses_v3
        if query(self._handle, ctypes.byref(count), table) != 0:
            return None
        for process in table[: count.value]:
            if process.pid == os.getpid() and process.used != _UNKNOWN:
                return int(process.used)
        return None


@contextmanager
def open_device(index: int = 0) -> Iterator[Nvml | None]:
    """The counters of the device torch calls `index`; None where the driver has none to offer."""
    library = _load()
    if library is None:
        yield None
        return
    handle = _handle(library, index)
    try:
        yield Nvml(library, handle) if handle is not None else None
    finally:
        library.nvmlShutdown()


def _load() -> ctypes.CDLL | None:
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return library if library.nvmlInit_v2() == 0 else None
    return None


def _handle(library: ctypes.CDLL, index: int) -> ctypes.c_void_p | None:
    """CUDA_VISIBLE_DEVICES renumbers torch's devices but not NVML's."""
    handle = ctypes.c_void_p()
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    name = visible[index] if index < len(visible) and visible[index] else str(index)
    if name.isdigit():
        code = library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
    else:
        code = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    return handle if code == 0 else None


def _check(code: int) -> None:
    if code != 0:
        raise OSError(f"NVML answered with error {code}")
