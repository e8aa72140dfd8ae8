"""A large output that survives its process: the next run with the same inputs goes on from it.

While `labelled.csv` is written there are two files beside it. `labelled.csv.partial` holds the rows
so far. `labelled.csv.partial.json` says how many rows and bytes of them are complete, and what they
were made from; it is replaced after the bytes have reached the disk, so that it never promises too
much. At the end the partial file gets the output's name.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from memfit.config.files import open_to_append, write_bytes
from memfit.errors import DataError, OutputError

KEPT_AFTER_SECONDS = 2.0
"""How much work a killed run may lose, beside the windows that are being predicted."""


@dataclass(frozen=True, slots=True)
class Complete:
    """How much of an output is complete: whole rows, and the byte they end at."""

    rows: int
    empty_rows: int
    bytes: int


@dataclass
class PartialOutput:
    """An output that is being written, and what is complete of it."""

    path: Path
    made_from: Mapping[str, Any]
    """Everything that decides the rows. A run resumes only if all of it is the same."""
    file: IO[bytes] = field(repr=False)
    complete: Complete
    total_rows: int | None = None
    """Rows of the source, if they were counted."""
    resumed_rows: int = 0
    """Rows that an earlier run has written."""
    differs: str = ""
    """The part of `made_from` that differs, if an earlier run cannot be resumed."""
    _kept: float = -math.inf

    def add(self, data: bytes, rows: int, empty_rows: int) -> None:
        """Appends complete rows."""
        self.file.write(data)
        before = self.complete
        # At once: a signal between rows and bytes would write rows twice.
        self.complete = Complete(
            before.rows + rows, before.empty_rows + empty_rows, before.bytes + len(data)
        )
        if time.monotonic() - self._kept >= KEPT_AFTER_SECONDS:
            self.keep()

    def keep(self) -> None:
        """Makes the rows so far survive this process and the machine."""
        complete = self.complete
        self.file.flush()
        os.fsync(self.file.fileno())
        state = {
            **asdict(complete),
            "total_rows": self.total_rows,
            "made_from": dict(self.made_from),
        }
        text = json.dumps(state, ensure_ascii=False, indent=1)
        write_bytes(state_path(self.path), text.encode())
        self._kept = time.monotonic()

    def finish(self) -> None:
        """Gives the complete file its name."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(partial_path(self.path), self.path)
        state_path(self.path).unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    """Where the rows of an unfinished output lie."""
    return path.with_name(f"{path.name}.partial")


def state_path(path: Path) -> Path:
    """The file that says how many of these rows are complete."""
    return path.with_name(f"{path.name}.partial.json")


@contextmanager
def partial_output(
    path: Path, made_from: Mapping[str, Any], head: bytes
) -> Iterator[PartialOutput]:
    """Goes on with the partial output of an equal run, or begins one with `head`.

    The partial output is kept whatever error ends the block, with one exception: bad data in the
    source. Once that is corrected, the source is another one. After a failure to read, it is kept.
    """
    partial = partial_path(path)
    with open_to_append(partial, "a+b") as file:
        _lock(file, path)
        out = _resumed(path, made_from, file)
        if not out.resumed_rows:
            file.truncate(0)
            file.write(head)
            out.complete = Complete(0, 0, len(head))
            state_path(path).unlink(missing_ok=True)
        try:
            yield out
        except BaseException as error:
            if isinstance(error, DataError) and not isinstance(error.__context__, OSError):
                partial.unlink(missing_ok=True)
                state_path(path).unlink(missing_ok=True)
            else:
                with suppress(OSError):  # a full disk is what may have ended it
                    out.keep()
            raise
        out.finish()


def _resumed(path: Path, made_from: Mapping[str, Any], file: IO[bytes]) -> PartialOutput:
    """The output with the rows that the state lists; a half-written window is cut off."""
    out = PartialOutput(path, made_from, file, Complete(0, 0, 0))
    try:
        state = json.loads(state_path(path).read_text(encoding="utf-8"))
        complete = Complete(int(state["rows"]), int(state["empty_rows"]), int(state["bytes"]))
        before, total_rows = dict(state["made_from"]), state["total_rows"]
    except (OSError, ValueError, KeyError, TypeError):
        return out
    now = json.loads(json.dumps(made_from))
    if before != now:
        out.differs = next(name for name in (*now, *before) if before.get(name) != now.get(name))
        return out
    if complete.bytes > file.seek(0, os.SEEK_END):  # the bytes were lost with the machine's power
        return out
    file.truncate(complete.bytes)
    file.seek(0, os.SEEK_END)
    out.complete, out.resumed_rows, out.total_rows = complete, complete.rows, total_rows
    return out


def _lock(file: IO[bytes], path: Path) -> None:
    """Refuses to write what another process is writing; the lock ends with the process."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(
            "another process is writing {path}; wait for it, or name another file", path=path
        ) from None
    except OSError:  # a file system without locks
        return
