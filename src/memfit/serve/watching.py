"""Starts the process that serves a run's page while it trains, and ends it with the run."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from memfit.i18n import N_, language, t
from memfit.run.announcements import voice

_START_SECONDS = 20.0

_NOT_STARTED = N_(
    "the live page could not be started (it needs pip install 'memfit[serve]'); report.html will "
    "be written"
)

LINGER_SECONDS = 6.0
"""After the end, until open pages have fetched the last state."""


def watch_run(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Serves a run's page while it trains; its address is said even when the run is quiet."""
    return watching(folder, voice(quiet=False), language())


@contextlib.contextmanager
def watching(folder: Path, say: Callable[[str], None], lang: str) -> Iterator[None]:
    """Serve the folder's page for as long as the block lasts, and say where."""
    from memfit.report.terminal import fact_line  # not for the server, which starts from this file

    # Without -P a file in the current folder could take the place of a module.
    command = [sys.executable, "-P", "-m", "memfit.serve.live", str(folder), "--lang", lang]
    process: subprocess.Popen[str] | None = None
    with contextlib.suppress(OSError):
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    try:
        url = _first_line(process) if process is not None else ""
        say(fact_line("watch", url) if url else fact_line("note", t(_NOT_STARTED)))
        yield
    finally:
        if process is not None:
            _end(process)


def _first_line(process: subprocess.Popen[str]) -> str:
    """What the server says when it listens; nothing where it does not in time."""
    found: list[str] = []
    out = process.stdout
    assert out is not None
    reader = threading.Thread(target=lambda: found.append(out.readline()), daemon=True)
    reader.start()
    reader.join(_START_SECONDS)
    return found[0].strip() if found else ""


def _end(process: subprocess.Popen[str]) -> None:
    """Its input ends, and so does it, once open pages have seen the end."""
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    try:
        process.wait(LINGER_SECONDS + 10)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
