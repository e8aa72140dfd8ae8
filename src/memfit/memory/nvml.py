"""The memory a card holds, as NVIDIA's driver reports it through NVML.

NVML answers without a CUDA context, so it can be asked before one exists, and it is where
nvidia-smi gets its numbers. The package nvidia-ml-py (module pynvml) makes the calls; it is
imported when the first question is asked.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What a card holds now, over all processes."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
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
    """Returns the driver and its cards; None where there is none, or none that answers."""
    with _started() as pynvml:
        if pynvml is None:
            return None
        try:
            cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            cards = []
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                try:
                    name = str(pynvml.nvmlDeviceGetName(handle))
                except UnicodeDecodeError as error:  # a broken name is no reason to show no card
                    name = error.object.decode(errors="replace")
                major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
                use = Nvml(pynvml, handle).use()
                cards.append(DriverCard(name, (major, minor), use.total_bytes, use.used_bytes))
            version = pynvml.nvmlSystemGetDriverVersion()
            return Driver(version, (cuda // 1000, cuda % 1000 // 10), tuple(cards))
        except (pynvml.NVMLError, OSError):
            return None


class Nvml:
    """One device's counters, held open so that a thread can poll them."""

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._pynvml = pynvml
        self._handle = handle

    def use(self) -> DeviceUse:
        """Returns what the device holds now; OSError where the driver does not answer."""
        pynvml, handle = self._pynvml, self._handle
        try:
            try:
                # Version 2 leaves out of `used` what the driver keeps for itself, as nvidia-smi
                # does.
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            except pynvml.NVMLError_FunctionNotFound:  # drivers before 510
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error
        own_bytes = None
        with suppress(pynvml.NVMLError):
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    own_bytes = int(process.usedGpuMemory)
        return DeviceUse(memory.total, memory.used, memory.free, own_bytes)


def free_and_total_bytes(index: int = 0) -> tuple[int, int]:
    """What is free of a card, and what it has.

    Under Windows CUDA leaves out what other processes hold, so that NVML counts where it says
    less. Past that the driver would page to host memory, without an error.
    """
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    if has_windows_driver():
        with open_device(index) as device, suppress(OSError):
            if device is not None:
                free_bytes = min(free_bytes, device.use().free_bytes)
    return free_bytes, total_bytes


def has_windows_driver() -> bool:
    """Whether Windows drives the cards: there, and inside WSL."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


@contextmanager
def open_device(index: int = 0) -> Iterator[Nvml | None]:
    """Opens the counters of the device torch calls `index`; None where the driver has none."""
    with _started() as pynvml:
        handle = None if pynvml is None else _handle(pynvml, index)
        device = None if handle is None else Nvml(pynvml, handle)
        if device is not None:
            try:
                device.use()
            except OSError:  # cards that share the host's memory have no counters
                device = None
        yield device


@contextmanager
def _started() -> Iterator[Any]:
    """Yields pynvml while NVML is initialised; None where there is no driver to answer it."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _handle(pynvml: Any, index: int) -> Any:
    """Finds the device: CUDA_VISIBLE_DEVICES renumbers torch's devices but not NVML's."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    name = visible[index] if index < len(visible) and visible[index] else str(index)
    torch = sys.modules.get("torch")
    try:
        # Among cards of several kinds CUDA's first is the fastest, NVML's the one in the first
        # slot. Before torch has begun to use the cards nobody can tell.
        can_tell = torch is not None and torch.cuda.is_initialized()
        if name.isdigit() and can_tell and pynvml.nvmlDeviceGetCount() > 1:
            uuid = getattr(sys.modules["torch"].cuda.get_device_properties(index), "uuid", None)
            name = name if uuid is None else f"GPU-{uuid}"
        if name.isdigit():
            return pynvml.nvmlDeviceGetHandleByIndex(int(name))
        return pynvml.nvmlDeviceGetHandleByUUID(name)  # of a card, or of a MIG instance
    except pynvml.NVMLError:
        return None
