"""Tells people what the process is doing while they wait.

    with telling(quiet=quiet):                # once a command, before anything heavy is imported
        with doing(t("planning …")):          # around each piece of work, wherever it is done
            ...

A thread shows the innermost piece of work: at a terminal on a line with a spinner and the seconds;
in a pipe or a file as a plain line, followed by dots. Work that counts its rows (`show_count`)
shows a bar and rows a second; in a pipe it adds a line every two seconds. Work that is
over at once is not mentioned. Outside of `telling`, `doing` does nothing. Whatever prints to
stderr meanwhile calls `make_way()` first.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from memfit.i18n import t
from memfit.printing import encodable, printable

if TYPE_CHECKING:
    from rich.live import Live
    from rich.spinner import Spinner

_TICK_SECONDS = 0.1

_LINE_AFTER_SECONDS = 0.3
"""Shorter silences need no explanation."""

_DOT_AFTER_SECONDS = 0.7
"""Well below two seconds: while a library is loaded, the thread may have to wait for its turn."""


_ROWS_LINE_AFTER_SECONDS = 2.0
"""Between two lines in a pipe that say how many rows are done."""


class RowsDone(Protocol):
    """Rows of a piece of work that are done."""

    rows: int
    total_rows: int | None

    def pace(self) -> str:
        """How many are done, and how fast."""
        ...


@dataclass
class _Work:
    text: str
    began: float = field(default_factory=time.monotonic)
    told: bool = False
    count: RowsDone | None = None

    def sentence(self) -> str:
        """The sentence with the seconds so far."""
        seconds = int(time.monotonic() - self.began)
        return t("{what} {seconds} s", what=self.text, seconds=seconds) if seconds else self.text


class _Teller:
    """The thread, what is being done, and when something was last said."""

    def __init__(self) -> None:
        encodable(sys.stderr)
        self.bar_is_shown = False
        self._at_terminal = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "")
        self._lock = threading.RLock()
        self._works: list[_Work] = []
        self._last_word = self._last_rows = time.monotonic()
        self._dots = False
        self._live: Live | None = None
        self._spinner: Spinner
        self._over = threading.Event()
        threading.Thread(target=self._tell, name="memfit-waiting", daemon=True).start()

    def stop(self) -> None:
        self._over.set()
        self.make_way()

    def begin(self, text: str) -> _Work:
        with self._lock:
            work = _Work(text)
            self._works.append(work)
            return work

    def end(self, work: _Work) -> None:
        with self._lock:
            if work in self._works:
                self._works.remove(work)
            if self._dots and work.told:
                self._write(" " + t("{seconds} s", seconds=int(time.monotonic() - work.began)))
            self._leave_line()

    def count(self, rows: RowsDone | None) -> None:
        with self._lock:
            if self._works:
                self._works[-1].count = rows
            if rows is None:
                self._leave_line()
            self._last_rows = time.monotonic()

    def make_way(self) -> None:
        """Clears the line for other output."""
        with self._lock:
            self._leave_line()
            self._last_word = time.monotonic()

    def sentence(self) -> str:
        """What is being done, once that takes a moment; empty otherwise."""
        with self._lock:
            work = self._work()
            if work is None or time.monotonic() - work.began < _LINE_AFTER_SECONDS:
                return ""
            return work.sentence()

    def _work(self) -> _Work | None:
        return self._works[-1] if self._works and self._works[-1].text else None

    def _tell(self) -> None:
        while not self._over.wait(_TICK_SECONDS):
            with self._lock:
                if self._over.is_set():
                    return
                # A stream that was closed or a terminal that is gone ends no run.
                with contextlib.suppress(OSError, ValueError):
                    self._tick()

    def _tick(self) -> None:
        if self.bar_is_shown or not self._works:
            return
        work, silent_seconds = self._work(), time.monotonic() - self._last_word
        if self._at_terminal:
            if work is not None and silent_seconds >= _LINE_AFTER_SECONDS:
                self._spin(work)
        elif work is not None and not work.told:
            if silent_seconds >= _LINE_AFTER_SECONDS:
                self._leave_line()
                self._write(printable(work.text) + "\n")
                work.told = True
        elif (
            work is not None
            and work.count is not None
            and time.monotonic() - self._last_rows >= _ROWS_LINE_AFTER_SECONDS
        ):
            self._leave_line()
            self._write(work.count.pace() + "\n")
            self._last_rows = time.monotonic()
        elif silent_seconds >= _DOT_AFTER_SECONDS:
            self._write(".")
            self._dots = True

    def _spin(self, work: _Work) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        if self._live is None:
            out = Console(stderr=True, highlight=False, markup=False, emoji=False)
            frames = "line" if out.options.ascii_only else "dots"
            self._spinner = Spinner(frames)
            # Streams are not taken over: the main thread may be exchanging them itself.
            self._live = Live(
                self._spinner,
                console=out,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        count, line = work.count, Table.grid(padding=(0, 1), expand=True)
        said = work.sentence() if count is None else work.text
        self._spinner.update(text=Text(printable(said), no_wrap=True, overflow="ellipsis"))
        if count is None:
            self._live.update(self._spinner)
            return
        for ratio in (None, 1, None):
            line.add_column(no_wrap=True, ratio=ratio)
        bar = ProgressBar(count.total_rows, count.rows) if count.total_rows else ""
        line.add_row(self._spinner, bar, Text(count.pace()))
        self._live.update(line)

    def _leave_line(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            with contextlib.suppress(OSError, ValueError):
                live.stop()
        if self._dots:
            self._write("\n")
            self._dots = False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
        self._last_word = time.monotonic()


_teller: _Teller | None = None


def _forget() -> None:
    """Resets the state in a forked worker, which has no thread and may hold a dead lock."""
    global _teller
    _teller = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def telling(*, quiet: bool = False) -> Iterator[None]:
    """Inside, `doing` is shown on the terminal; a nested one changes nothing."""
    global _teller
    if quiet or _teller is not None:
        yield
        return
    teller = _teller = _Teller()
    try:
        yield
    finally:
        _teller = None
        teller.stop()


@contextlib.contextmanager
def doing(text: str) -> Iterator[None]:
    """A piece of work, said in a few words; without any, dots alone show that it goes on."""
    teller = _teller
    if teller is None:
        yield
        return
    work = teller.begin(text)
    try:
        yield
    finally:
        teller.end(work)


def show_count(rows: RowsDone | None) -> None:
    """The innermost piece of work shows these rows; None ends that."""
    if _teller is not None:
        _teller.count(rows)


def make_way() -> None:
    """Called before anything else is printed to stderr."""
    if _teller is not None:
        _teller.make_way()


def sentence() -> str:
    """What is being done just now, for a display that has a line for it."""
    return _teller.sentence() if _teller is not None else ""


def is_told() -> bool:
    """Whether `doing` is shown."""
    return _teller is not None


def shown_by_bar(shown: bool) -> None:
    """A progress bar takes the terminal, or gives it back."""
    if _teller is not None:
        _teller.make_way()
        _teller.bar_is_shown = shown
