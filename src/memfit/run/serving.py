"""Serves the report: of a run that still trains (`--watch`), or of any (`memfit report --serve`).

While a run trains, a process of its own serves it: drawing takes tenths of a second of Python,
which a thread would take from the training. It ends when the training process ends or closes its
standard input. The model is loaded at the first question, never before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import MemfitError, ModelError
from memfit.records.results import RunFolder
from memfit.report.live_page import LINGER_SECONDS, LivePage, PageServer
from memfit.text import N_, clean, speaking, t
from memfit.units import tenths_of_percent

if TYPE_CHECKING:
    from memfit.run.inference import Classifier, Prediction

_START_SECONDS = 20.0

_NOT_STARTED = N_("the live page could not be started; report.html will be written")

MOST_SCORES = 10


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
            raise ModelError(t("there is nothing to ask yet: no checkpoint has been written"))
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
        time.sleep(0.1)
    time.sleep(0.2)  # the answer that is on its way
    os._exit(0)  # also while a question is being answered


if __name__ == "__main__":
    main()
