"""Runs a command as a person does, in a terminal of its own, and writes down when it did what."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _whole_watch import CardWatch

COLUMNS, LINES = 120, 40
LOOK_SECONDS = 0.01
TAIL_CHARACTERS = 4000
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-_])")
# Braille frames, moons, bars: a spinner that turns says nothing new.
_SPINNERS = re.compile(r"[\u2500-\u28ff|/\\\-\s]+")
_STEPS = re.compile(r"(?<![\d/.])(\d+)/(\d+)(?![\d/.])")
_AFTER_EXIT_SECONDS = 0.3
_LIVE: set[int] = set()
"""Leaders of sessions that run now."""


def kill_all() -> None:
    """Ends every run: they have sessions of their own, and outlive who started them."""
    for pid in list(_LIVE):
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)


@dataclass
class Said:
    """What a terminal showed, and when."""

    started: float
    first: float | None = None
    last: float = 0.0
    longest_silence: tuple[float, float] = (0.0, 0.0)
    """Seconds, and the second at which it began."""
    longest_still: tuple[float, float] = (0.0, 0.0)
    """The same without new words: a spinner that only turns is no word."""
    text: str = ""
    lines: list[tuple[float, str]] = field(default_factory=list)
    """The second at which a line was ended, and its text without escapes."""
    _words: str = ""
    _words_at: float = 0.0
    _line: str = ""

    def take(self, piece: str) -> None:
        """Characters that came now."""
        now = time.perf_counter() - self.started
        self.first = now if self.first is None else self.first
        self.longest_silence = max(self.longest_silence, (now - self.last, self.last))
        self.last = now
        self.text += piece
        shown = _ESCAPES.sub("", piece)
        words = _SPINNERS.sub(" ", shown).strip()
        if words and words != self._words:
            self._words, still = words, (now - self._words_at, self._words_at)
            self._words_at, self.longest_still = now, max(self.longest_still, still)
        *ended, self._line = re.split(r"[\r\n]+", self._line + shown)
        self.lines += [(now, line.rstrip()) for line in ended if line.strip()]

    def end(self) -> None:
        """The process has ended now: until here nothing more was said."""
        now = time.perf_counter() - self.started
        self.longest_silence = max(self.longest_silence, (now - self.last, self.last))
        self.longest_still = max(self.longest_still, (now - self._words_at, self._words_at))
        if self._line.strip():
            self.lines.append((now, self._line.rstrip()))

    def steps(self) -> tuple[int, int] | None:
        """The step that the last line tells of, and how many there are."""
        found = _STEPS.findall(_ESCAPES.sub("", self.text[-600:]))
        return (int(found[-1][0]), int(found[-1][1])) if found else None


@dataclass
class Progress:
    """Follows a run's progress.jsonl from outside: when steps end."""

    path: Path
    first_step_at: float | None = None
    last_step_at: float | None = None
    step: int = 0
    first_step: int = 0
    """Done before this process began."""
    max_steps: int | None = None
    begun: dict[str, Any] = field(default_factory=dict)
    _offset: int = 0
    _rest: bytes = b""

    def skip(self) -> None:
        """What an earlier process wrote."""
        with contextlib.suppress(OSError):
            self._offset = self.path.stat().st_size

    def look(self, now: float) -> None:
        """Reads what is new."""
        try:
            if self.path.stat().st_size <= self._offset:
                return
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                self._take(json.loads(line), now)

    def _take(self, values: dict[str, Any], now: float) -> None:
        if "begun" in values:
            self.begun, self.max_steps = values["begun"], values.get("max_steps")
            self.first_step = self.step = int(values.get("step") or 0)
        elif "now_bytes" in values:
            self.step = int(values["step"])
            self.first_step_at = now if self.first_step_at is None else self.first_step_at
            self.last_step_at = now


@dataclass
class Ended:
    """One process from its start to its end."""

    exit_code: int | None
    seconds: float
    said: Said
    progress: Progress
    held: dict[str, Any] | None
    killed_at: tuple[int, int] | None = None
    timed_out: bool = False

    def as_json(self) -> dict[str, Any]:
        """For the result file; seconds count from the start of the command."""
        progress = self.progress
        return {
            "exit_code": self.exit_code, "timed_out": self.timed_out,
            "killed_at_step": self.killed_at, "held": self.held,
            "seconds": {
                "first_output": _rounded(self.said.first), "end": _rounded(self.seconds),
                "first_step": _rounded(progress.first_step_at),
                "last_step": _rounded(progress.last_step_at),
                "after_last_step": _rounded(
                    None if progress.last_step_at is None else self.seconds - progress.last_step_at
                ),
            },
            "longest_silence_seconds": _rounded(self.said.longest_silence[0]),
            "longest_silence_from": _rounded(self.said.longest_silence[1]),
            "longest_without_new_words_seconds": _rounded(self.said.longest_still[0]),
            "longest_without_new_words_from": _rounded(self.said.longest_still[1]),
            "steps": [progress.first_step, progress.step, progress.max_steps],
        }  # fmt: skip


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def watched(
    command: list[str],
    *,
    folder: Path,
    card: CardWatch | None,
    timeout_seconds: float,
    environment: dict[str, str],
    kill_at: float | None = None,
) -> Ended:
    """Runs the command; `folder` is the run folder whose progress is followed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    progress = Progress(folder / "progress.jsonl")
    progress.skip()
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment,
        start_new_session=True,
    )  # fmt: skip
    _LIVE.add(process.pid)
    os.close(theirs)
    if card is not None:
        card.follow(process.pid)
    said = Said(started)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    killed_at, timed_out, exited = None, False, None
    try:
        while True:
            readable, _, _ = select.select([ours], [], [], LOOK_SECONDS)
            now = time.perf_counter() - started
            progress.look(now)
            piece = _read(ours) if readable else b""
            if piece:
                said.take(decoder.decode(piece))
            elif readable:  # closed, and perhaps not ended yet
                time.sleep(LOOK_SECONDS)
            if exited is None and process.poll() is not None:
                exited = now
            if exited is not None:
                if not piece and (readable or now - exited > _AFTER_EXIT_SECONDS):
                    break
            elif now > timeout_seconds:
                timed_out = True
                process.kill()
            elif kill_at is not None and killed_at is None:
                killed_at = _due(kill_at, progress, said, folder)
                if killed_at is not None:
                    process.kill()
    finally:
        os.close(ours)
        with contextlib.suppress(OSError):  # whatever it started and left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _LIVE.discard(process.pid)
        held = card.leave(process.pid) if card is not None else None
    said.end()
    return Ended(process.returncode, exited or 0.0, said, progress, held, killed_at, timed_out)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""


def _due(share: float, progress: Progress, said: Said, folder: Path) -> tuple[int, int] | None:
    """The step and how many there are, where so much is done and a checkpoint exists."""
    if progress.max_steps is None:
        return None
    step = progress.step
    shown = said.steps()  # the log has every step at first, later some a second
    if shown is not None and shown[1] == progress.max_steps:
        step = max(step, shown[0])
    if step < share * progress.max_steps or step >= progress.max_steps:
        return None
    found = list((folder / "checkpoints").glob("checkpoint-*/trainer_state.json"))
    return (step, progress.max_steps) if found else None
