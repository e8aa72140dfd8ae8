"""Watches a card from outside by NVML: the most bytes that each followed process held.

Where the driver books memory to processes, a run is the sum of all processes of its session.
Where it does not (some containers), it is what the card holds above the level before the start,
and only one run may be on the card at a time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

HERTZ = 200
# Takes a context on the card without torch, and keeps it until its input ends.
_PROBE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
codes = [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0)]
codes.append(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
print(codes, flush=True)
sys.stdin.read()
"""


@dataclass
class Held:
    """What one run was seen to hold."""

    by: str
    """`process`: as the driver books it; `device`: above the card's level before the start."""
    baseline_bytes: int = 0
    highest_bytes: int = 0
    samples: int = 0
    longest_gap_seconds: float = 0.0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "by": self.by, "highest_bytes": self.highest_bytes, "samples": self.samples,
            "hertz": round(self.samples / self.seconds, 1) if self.seconds else None,
            "longest_gap_seconds": round(self.longest_gap_seconds, 4),
            "baseline_bytes": self.baseline_bytes,
        }  # fmt: skip


class CardWatch:
    """Polls one card in a thread; `follow` and `leave` may be called from any."""

    def __init__(self, pynvml: Any, index: int = 0) -> None:
        self._nvml = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._followed: dict[int, Held] = {}
        self._sessions: dict[int, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.tells_apart = self._finds_a_process()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def used_bytes(self) -> int:
        """What all processes hold together."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def follow(self, pid: int) -> None:
        """From now on the session that this process leads is looked at."""
        by = "process" if self.tells_apart else "device"
        with self._lock:
            self._followed[pid] = Held(by, 0 if self.tells_apart else self.used_bytes())

    def leave(self, pid: int) -> Held:
        """What was seen."""
        with self._lock:
            return self._followed.pop(pid)

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _poll(self) -> None:
        last = time.perf_counter()
        while not self._stop.wait(max(0.0, 1 / HERTZ - (time.perf_counter() - last))):
            now = time.perf_counter()
            gap, last = now - last, now
            with self._lock:
                if self._followed:
                    self._look(gap)

    def _look(self, gap: float) -> None:
        if self.tells_apart:
            sizes = dict.fromkeys(self._followed, 0)
            for pid, size in self._processes():
                session = self._session(pid)
                if session in sizes:
                    sizes[session] += size
        else:
            used = self.used_bytes()
            sizes = {pid: used - held.baseline_bytes for pid, held in self._followed.items()}
        for pid, held in self._followed.items():
            held.highest_bytes = max(held.highest_bytes, sizes[pid])
            # The first sample of a run says nothing about a gap within it.
            held.longest_gap_seconds = max(held.longest_gap_seconds, gap if held.samples else 0.0)
            held.seconds += gap if held.samples else 0.0
            held.samples += 1

    def _processes(self) -> list[tuple[int, int]]:
        found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return [(int(one.pid), int(one.usedGpuMemory)) for one in found if one.usedGpuMemory]

    def _session(self, pid: int) -> int:
        if pid not in self._sessions:
            try:
                self._sessions[pid] = os.getsid(pid)
            except OSError:  # it is gone, or no process of this machine
                return 0
        return self._sessions[pid]

    def _finds_a_process(self) -> bool:
        """Whether a process of ours that holds a context is in the driver's list."""
        command = [sys.executable, "-c", _PROBE]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as probe:
            assert probe.stdin is not None
            assert probe.stdout is not None
            with contextlib.closing(probe.stdin):
                if probe.stdout.readline().strip() != "[0, 0, 0]":
                    return False
                return any(pid == probe.pid for pid, _ in self._processes())


def open_card() -> CardWatch | None:
    """The first card; None where there is no NVML to ask."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        return CardWatch(pynvml)
    except pynvml.NVMLError:
        return None
