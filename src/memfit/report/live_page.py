"""The report of a run that still trains, on a page of localhost that updates itself.

A process of its own serves it: drawing takes tenths of a second of Python, which a thread would
take from the training. The process reads the run's folder, binds to 127.0.0.1 only, answers only
under a name of this machine (a page elsewhere that points its own name here gets nothing) and only
under a path with a secret word in it (other users of this machine get nothing). It ends when the
training process ends or closes its standard input.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from memfit.text import N_, t

HOST = "127.0.0.1"

NAMES = ("127.0.0.1", "localhost", "[::1]")

LINGER_SECONDS = 6.0
"""After the end, until open pages have fetched the last state."""

_START_SECONDS = 20.0

_NOT_STARTED = N_("the live page could not be started; report.html will be written")

_REST = 9
"""Times as long as a drawing took, nothing is drawn after it."""

_WATCHED = (
    "progress.jsonl", "summary.json", "evaluation.json", "trainer_state.json", "adjustments.jsonl",
    "plan.toml", "run.toml",
)  # fmt: skip

# ---- the training process' side ----


@contextlib.contextmanager
def watching(folder: Path, say: Callable[[str], None], lang: str) -> Iterator[None]:
    """Serve the folder's page for as long as the block lasts, and say where."""
    from memfit.report.terminal import fact_line  # not for the server, which starts from this file

    # Without -P a file in the current folder could take the place of a module.
    command = [sys.executable, "-P", "-m", "memfit.report.live_page", str(folder), "--lang", lang]
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


# ---- the server's side ----


class LivePage:
    """The page, drawn again when the folder has changed and somebody asks."""

    def __init__(
        self, folder: Path, lang: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder, self.lang = folder, lang
        self.ended = False
        self.asked_at = -float("inf")
        self.last_seen = False
        """Whether somebody has got the page that is final."""
        self._clock = clock
        self._lock = threading.Lock()
        self._signature: object = None
        self._next_at = -float("inf")
        self._page: tuple[str, bytes] | None = None

    def read(self) -> tuple[str, bytes]:
        """Tag and text."""
        from memfit.report.page import REFRESH_SECONDS

        with self._lock:
            self.asked_at, ended = self._clock(), self.ended
            signature = (ended, *_signature(self.folder))
            due = ended or self.asked_at >= self._next_at
            if self._page is None or (signature != self._signature and due):
                text = self._draw(live=not ended).encode()
                # Of one processor at most a tenth: where there are two, the training wants both.
                took = self._clock() - self.asked_at
                self._next_at = self._clock() + max(REFRESH_SECONDS, _REST * took)
                self._signature = signature
                self._page = hashlib.sha256(text).hexdigest()[:16], text
            self.last_seen = ended
            return self._page

    def _draw(self, *, live: bool) -> str:
        from memfit.errors import MemfitError
        from memfit.records.results import RunFolder
        from memfit.report.page import render, render_waiting

        try:
            return render(RunFolder(self.folder), live=live, lang=self.lang)
        except MemfitError:  # nothing is there yet
            return render_waiting(self.lang)

    def watched_lately(self) -> bool:
        """Whether a page is open somewhere."""
        return self._clock() - self.asked_at < LINGER_SECONDS


def _signature(folder: Path) -> Iterator[tuple[int, int] | None]:
    for name in _WATCHED:
        try:
            found = (folder / name).stat()
            yield found.st_mtime_ns, found.st_size
        except OSError:
            yield None


def make_server(page: LivePage, port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """A server on a free port, and its address; `serve_forever` is the caller's."""
    path = f"/{secrets.token_urlsafe(12)}/"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def do_GET(self) -> None:
            name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if name.lower() not in NAMES:
                self._answer(HTTPStatus.FORBIDDEN)
            elif not secrets.compare_digest(self.path.partition("?")[0].encode(), path.encode()):
                self._answer(HTTPStatus.NOT_FOUND)
            else:
                tag, text = page.read()
                if self.headers.get("If-None-Match") == f'"{tag}"':
                    self._answer(HTTPStatus.NOT_MODIFIED, tag=tag)
                else:
                    self._answer(HTTPStatus.OK, text, tag)

        def _answer(self, status: HTTPStatus, body: bytes = b"", tag: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            if tag:
                self.send_header("ETag", f'"{tag}"')
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer((HOST, port), Handler)
    server.daemon_threads = True
    return server, f"http://{HOST}:{server.server_address[1]}{path}"


def main() -> None:
    """`python -m memfit.report.live_page FOLDER`: serves until its standard input ends."""
    parser = argparse.ArgumentParser(description="Serves the report of a run that still trains.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lang", default="en")
    parser.add_argument("--linger-seconds", type=float, default=LINGER_SECONDS)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training, which ends us
    if hasattr(os, "nice"):
        os.nice(10)
    page = LivePage(given.folder, given.lang)
    server, url = make_server(page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(url, flush=True)
    with contextlib.suppress(OSError):
        sys.stdin.read()
    page.ended = True
    deadline = time.monotonic() + given.linger_seconds
    while page.watched_lately() and not page.last_seen and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.2)  # the answer that is on its way


if __name__ == "__main__":
    main()
