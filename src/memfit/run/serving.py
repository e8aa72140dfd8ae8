"""Serves the report: of a run that still trains (`--watch`), or of any (`memfit report --serve`).

While a run trains, a process of its own serves it: drawing takes tenths of a second of Python,
which a thread would take from the training. It ends when the training process ends or closes its
standard input. The model is loaded at the first question, never before.

The server binds to 127.0.0.1 only, answers only under a name of this machine (a page elsewhere
that points its own name here gets nothing) and only under a path with a secret word in it (other
users of this machine get nothing). Questions are taken from its own page alone: the browser says
where they come from, and JSON that another page sends would have to be allowed first.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
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
from typing import TYPE_CHECKING, Any

from memfit.errors import MemfitError, ModelError
from memfit.i18n import N_, speaking, t
from memfit.printing import clean
from memfit.records.results import RunFolder
from memfit.units import tenths_of_percent

if TYPE_CHECKING:
    from memfit.run.inference import Classifier, Prediction

_START_SECONDS = 20.0

_NOT_STARTED = N_("the live page could not be started; report.html will be written")

MOST_SCORES = 10

HOST = "127.0.0.1"

NAMES = ("127.0.0.1", "localhost", "[::1]")

LINGER_SECONDS = 6.0
"""After the end, until open pages have fetched the last state."""

_SENDING_SECONDS = 8.0
"""How long the server waits, after that, for answers that are still being sent."""

MOST_QUESTION_BYTES = 100_000

Trial = Callable[[str, str | None], dict[str, Any]]
"""Answers a text, or a pair of texts, with what the page's script shows."""

_REST = 9
"""Times as long as a drawing took, nothing is drawn after it."""

_WATCHED = (
    "progress.jsonl", "summary.json", "evaluation.json", "trainer_state.json", "adjustments.jsonl",
    "plan.toml", "run.toml",
)  # fmt: skip


class LivePage:
    """The page, drawn again when the folder has changed and somebody asks."""

    def __init__(
        self,
        folder: Path,
        lang: str | None,
        clock: Callable[[], float] = time.monotonic,
        trial: Trial | None = None,
    ) -> None:
        self.folder, self.lang, self.trial = folder, lang, trial
        self.ended = False
        self.asked_at = -float("inf")
        self.last_seen = False
        """Whether somebody has got the page that is final."""
        self.answers = 0
        """How many requests are being answered now."""
        self._clock = clock
        self._lock, self._counting = threading.Lock(), threading.Lock()
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
            return self._page

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Counts the request that is answered inside; after the end it marks the page as seen."""
        ended = self.ended
        with self._counting:
            self.answers += 1
        try:
            yield
            self.last_seen = self.last_seen or ended
        finally:
            with self._counting:
                self.answers -= 1

    def _draw(self, *, live: bool) -> str:
        from memfit.report.page import render, render_waiting

        try:
            served = self.trial is not None
            return render(RunFolder(self.folder), live=live, lang=self.lang, served=served)
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


class PageServer(ThreadingHTTPServer):
    """Serves one page on a free port of this machine; the caller calls `serve_forever`."""

    daemon_threads = True

    def __init__(self, page: LivePage) -> None:
        self.page = page
        self.path = f"/{secrets.token_urlsafe(12)}/"
        super().__init__((HOST, 0), _Handler)

    @property
    def address(self) -> str:
        """What a browser opens."""
        return f"http://{HOST}:{self.server_address[1]}{self.path}"


class _Handler(BaseHTTPRequestHandler):
    """Answers one request for the page, or one question of its box."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        if not self._is_for_us():
            return
        with self.server.page.answering():
            tag, text = self.server.page.read()
            if self.headers.get("If-None-Match") == f'"{tag}"':
                self._answer(HTTPStatus.NOT_MODIFIED, tag=tag)
            else:
                self._answer(HTTPStatus.OK, text, tag)

    def do_POST(self) -> None:
        self.close_connection = True  # what is refused is not read
        if not self._is_for_us():
            return
        question = self._question()
        if isinstance(question, HTTPStatus):
            self._answer(question)
            return
        assert self.server.page.trial is not None
        body = json.dumps(self.server.page.trial(*question), ensure_ascii=False).encode()
        self._answer(HTTPStatus.OK, body, kind="application/json")

    def _is_for_us(self) -> bool:
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if name.lower() not in NAMES:
            self._answer(HTTPStatus.FORBIDDEN)
        elif not secrets.compare_digest(
            self.path.partition("?")[0].encode(), self.server.path.encode()
        ):
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            return True
        return False

    def _question(self) -> tuple[str, str | None] | HTTPStatus:
        """The text, or the pair of texts; a status where the page cannot have sent this."""
        origin = f"http://{self.headers.get('Host', '')}"
        site = self.headers.get("Sec-Fetch-Site", "same-origin")
        if self.headers.get("Origin") != origin or site != "same-origin":
            return HTTPStatus.FORBIDDEN
        if self.server.page.trial is None:
            return HTTPStatus.METHOD_NOT_ALLOWED
        if self.headers.get_content_type() != "application/json":
            return HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_QUESTION_BYTES:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        try:
            sent = json.loads(self.rfile.read(int(length)))
            text, pair = sent["text"], sent.get("text_pair")
        except (ValueError, KeyError, TypeError, AttributeError):
            return HTTPStatus.BAD_REQUEST
        if not isinstance(text, str) or not isinstance(pair, str | None):
            return HTTPStatus.BAD_REQUEST
        return text, pair

    def _answer(
        self, status: HTTPStatus, body: bytes = b"", tag: str = "", kind: str = "text/html"
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
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


class RunModel:
    """Answers with a run's model, or with the newest checkpoint while there is none."""

    def __init__(self, folder: Path, lang: str | None, device: str | None = None) -> None:
        self.folder, self.lang, self.device = RunFolder(folder), lang, device
        self._lock = threading.Lock()
        self._loaded: tuple[Path, Classifier] | None = None

    def __call__(self, text: str, pair: str | None) -> dict[str, Any]:
        """What the page's script shows: a label, who says so, scores; or an error."""
        with self._lock, speaking(self.lang):
            try:
                where = self._newest()
                question = text if pair is None else (text, pair)
                answer = self._classifier(where).predict(question, progress=False)[0]
            except MemfitError as error:
                return {"error": clean(error)}
            except Exception as error:  # a question must not end the server
                return {"error": clean(f"{type(error).__name__}: {error}")}
            by = "" if where == self.folder.path else t("by {name}", name=clean(where.name))
            return {"label": clean(answer.label) or t("no label"), "by": by, **_scores(answer)}

    def _newest(self) -> Path:
        if self.folder.summary.is_file():
            return self.folder.path
        written = self.folder.checkpoints()
        if not written:
            raise ModelError("there is nothing to ask yet: no checkpoint has been written")
        return written[-1]

    def _classifier(self, where: Path) -> Classifier:
        from memfit.run.inference import Classifier

        if self._loaded is None or self._loaded[0] != where:
            self._loaded = None
            self._loaded = where, Classifier.load(where, device=self.device)
        return self._loaded[1]


def _scores(answer: Prediction) -> dict[str, Any]:
    """The highest first; a regression has one, which its label says."""
    if len(answer.scores) < 2 and not answer.labels:
        return {"scores": []}
    highest = sorted(answer.scores.items(), key=lambda item: -item[1])[:MOST_SCORES]
    return {
        "scores": [
            {"name": clean(name), "value": value, "shown": tenths_of_percent(value)}
            for name, value in highest
        ]
    }


def serve(folder: Path, lang: str | None, say: Callable[[str], None]) -> None:
    """Serves a run's report until Ctrl-C; `say` gets the address."""
    from memfit.report.page import render, spoken

    render(RunFolder(folder), lang=lang)  # a folder without a run says so here
    lang = spoken(RunFolder(folder), lang)
    page = LivePage(folder, lang, trial=RunModel(folder, lang))
    page.ended = True
    server = PageServer(page)
    say(server.address)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()


# ---- while a run trains ----


@contextlib.contextmanager
def watching(folder: Path, say: Callable[[str], None], lang: str) -> Iterator[None]:
    """Serve the folder's page for as long as the block lasts, and say where."""
    from memfit.report.terminal import fact_line  # not for the server, which starts from this file

    # Without -P a file in the current folder could take the place of a module.
    command = [sys.executable, "-P", "-m", "memfit.run.serving", str(folder), "--lang", lang]
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


def main() -> None:
    """`python -m memfit.run.serving FOLDER`: serves until its standard input ends."""
    parser = argparse.ArgumentParser(description="Serves the report of a run that still trains.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lang", default="en")
    parser.add_argument("--linger-seconds", type=float, default=LINGER_SECONDS)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training, which ends us
    if hasattr(os, "nice"):
        os.nice(10)
    # The card is the training's: questions are answered by the processor.
    page = LivePage(given.folder, given.lang, trial=RunModel(given.folder, given.lang, "cpu"))
    server = PageServer(page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.address, flush=True)
    with contextlib.suppress(OSError):
        sys.stdin.read()
    page.ended = True
    deadline = time.monotonic() + given.linger_seconds
    while page.watched_lately() and not page.last_seen and time.monotonic() < deadline:
        time.sleep(0.05)
    while page.answers > 0 and time.monotonic() < deadline + _SENDING_SECONDS:
        time.sleep(0.05)
    os._exit(0)  # also while a question is being answered


if __name__ == "__main__":
    main()
