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
import asyncio
import contextlib
import hashlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from memfit.errors import MemfitError, ModelError
from memfit.i18n import speaking, t
from memfit.printing import clean
from memfit.records.results import RunFolder
from memfit.serve.protection import Protection
from memfit.serve.server import bound_socket, serve_until_stopped, served_in_thread
from memfit.serve.watching import LINGER_SECONDS
from memfit.units import tenths_of_percent

if TYPE_CHECKING:
    from memfit.run.inference import Classifier, Prediction

MOST_SCORES = 10

HOST = "127.0.0.1"

_SENDING_SECONDS = 8.0
"""How long the server waits, after the pages have seen the end, for answers being sent."""

MOST_QUESTION_BYTES = 100_000

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

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


class PageApp:
    """The page as an ASGI application, under a path with a secret in it."""

    def __init__(self, page: LivePage) -> None:
        self.page = page
        self.path = f"/{secrets.token_urlsafe(12)}/"
        self._app = Protection(self._routes(), most_body_bytes=MOST_QUESTION_BYTES, silent=True)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Counts a request as answered once its last byte was handed over."""
        is_page = scope["type"] == "http" and scope["path"] == self.path
        with self.page.answering() if is_page else contextlib.nullcontext():
            await self._app(scope, receive, send)

    def _routes(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        page = self.page

        @app.get(self.path)
        def show(request: Request) -> Response:
            tag, text = page.read()
            headers = {**HEADERS, "ETag": f'"{tag}"'}
            if request.headers.get("If-None-Match") == f'"{tag}"':
                return Response(status_code=304, headers=headers)
            return Response(text, media_type="text/html; charset=utf-8", headers=headers)

        @app.post(self.path)
        async def ask(request: Request) -> Response:
            question = await _question(request)
            if isinstance(question, int):
                return Response(status_code=question, headers=HEADERS)
            if page.trial is None:
                return Response(status_code=405, headers=HEADERS)
            answer = await asyncio.to_thread(page.trial, *question)
            return JSONResponse(answer, headers=HEADERS)

        return app


async def _question(request: Request) -> tuple[str, str | None] | int:
    """Returns the text, or the pair of texts; a status where the page cannot have sent this."""
    origin = f"http://{request.headers.get('Host', '')}"
    site = request.headers.get("Sec-Fetch-Site", "same-origin")
    if request.headers.get("Origin") != origin or site != "same-origin":
        return 403
    if request.headers.get("Content-Type", "").partition(";")[0] != "application/json":
        return 415
    try:
        sent = await request.json()
        text, pair = sent["text"], sent.get("text_pair")
    except (ValueError, KeyError, TypeError, AttributeError):
        return 400
    if not isinstance(text, str) or not isinstance(pair, str | None):
        return 400
    return text, pair


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
    app = PageApp(page)
    serve_until_stopped(app, bound_socket(HOST, 0), lambda url: say(url + app.path))


def main() -> None:
    """`python -m memfit.serve.live FOLDER`: serves until its standard input ends."""
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
    app = PageApp(page)
    with served_in_thread(app, bound_socket(HOST, 0)) as url:
        print(url + app.path, flush=True)
        with contextlib.suppress(OSError):
            sys.stdin.read()
        _linger(page, given.linger_seconds)
    os._exit(0)  # also while a question is being answered


def _linger(page: LivePage, seconds: float) -> None:
    """Waits until open pages have fetched the last state, and it was sent."""
    page.ended = True
    deadline = time.monotonic() + seconds
    while page.watched_lately() and not page.last_seen and time.monotonic() < deadline:
        time.sleep(0.05)
    while page.answers > 0 and time.monotonic() < deadline + _SENDING_SECONDS:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
