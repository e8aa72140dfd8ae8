"""Watches a card from outside by NVML: the most bytes that each followed process held.

Where the driver books memory to processes, a run is the sum of all processes of its session.
Where it does not (some containers), it is what the card holds above the level before the start,
and only one run may be on the card at a time. A process of its own does the looking, so that
nothing this benchmark does comes between two looks.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
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


SLOW_SECONDS = 0.01
"""Two looks further apart than this are less than 100 a second."""


@dataclass
class Held:
    """What one run was seen to hold."""

    by: str
    """`process`: as the driver books it; `device`: above the card's level before the start."""
    baseline_bytes: int = 0
    highest_bytes: int = 0
    samples: int = 0
    seconds: float = 0.0
    longest_gap_seconds: float = 0.0
    slow_seconds: float = 0.0
    """All gaps together that were longer than a hundredth of a second."""
    failures: int = 0
    """Looks that the driver did not answer."""

    def seen(self, size: int, gap: float) -> None:
        """One look; the first says nothing about a gap within the run."""
        self.highest_bytes = max(self.highest_bytes, size)
        self.samples += 1
        if self.samples > 1:
            self.seconds += gap
            self.longest_gap_seconds = max(self.longest_gap_seconds, gap)
            self.slow_seconds += gap if gap > SLOW_SECONDS else 0.0

    def as_json(self) -> dict[str, Any]:
        """For the result file."""
        found = asdict(self)
        for name in ("seconds", "longest_gap_seconds", "slow_seconds"):
            found[name] = round(found[name], 4)
        return {**found, "hertz": round(self.samples / self.seconds, 1) if self.seconds else None}


class Poller:
    """Polls one card in a thread."""

    def __init__(self, pynvml: Any, index: int = 0) -> None:
        self._nvml = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._followed: dict[int, Held] = {}
        self._sessions: dict[int, int] = {}
        self._lock = threading.Lock()
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

    def _poll(self) -> None:
        last = time.perf_counter()
        while True:
            time.sleep(max(0.0, 1 / HERTZ - (time.perf_counter() - last)))
            now = time.perf_counter()
            gap, last = now - last, now
            with self._lock:
                if not self._followed:
                    continue
                try:
                    self._look(gap)
                except self._nvml.NVMLError:
                    for held in self._followed.values():
                        held.failures += 1

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
            held.seen(sizes[pid], gap)

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


def serve() -> None:
    """Answers `follow PID`, `leave PID` and `used`, a line each, until its input ends."""
    try:
        import pynvml

        poller = Poller(pynvml)
    except Exception as error:  # no package, no driver, no card
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    print(json.dumps({"tells_apart": poller.tells_apart}), flush=True)
    for line in sys.stdin:
        what, _, pid = line.strip().partition(" ")
        found: Any = None
        if what == "follow":
            poller.follow(int(pid))
        elif what == "leave":
            found = poller.leave(int(pid)).as_json()
        elif what == "used":
            found = poller.used_bytes()
        print(json.dumps(found), flush=True)


class CardWatch:
    """The process that looks; may be asked from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        first = self._answer()
        self.problem = first.get("error", "")
        self.tells_apart = bool(first.get("tells_apart"))

    def follow(self, pid: int) -> None:
        """From now on the session that this process leads is looked at."""
        self._ask(f"follow {pid}")

    def leave(self, pid: int) -> dict[str, Any]:
        """What was seen."""
        found: dict[str, Any] = self._ask(f"leave {pid}")
        return found

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _ask(self, line: str) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline() or '{"error": "it ended"}')


if __name__ == "__main__":
    serve()
