"""Draws and writes a run's report in a process of its own.

It loads matplotlib beside the training: a thread would take the interpreter from the launches of
steps. It draws while the model is saved, and writes the page once the run's files are complete; by
then the drawings are made. It ends with its standard input, so also when the training is killed.
Where it cannot be started or fails, the training's process writes the report.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.config.files import plain
from memfit.records.results import RunFolder, RunSummary

_LONGEST_SECONDS = 60.0
"""A report that takes longer is written by the training's process."""


class ReportProcess:
    """The process, seen from the training; as a context it never outlives the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> ReportProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # closes its input
            self._process = None

    def start(self) -> None:
        """Starts loading what draws, if that has not begun."""
        if self._process is not None:
            return
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                # Without -P a file in the current folder could take the place of a module.
                [sys.executable, "-P", "-m", __name__, str(self.folder)],
                env={**os.environ, **one_thread},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
            )

    def draw(self, summary: RunSummary, history: list[dict[str, Any]]) -> None:
        """Has everything drawn that is known before the run's files are complete."""
        self._send({"summary": summary.to_dict(), "trainer_state": {"log_history": history}})

    def begin_writing(self) -> None:
        """Has the page written from the folder, which is complete by now; `write` waits for it."""
        self._send({})

    def write(self) -> None:
        """Returns when the page is there, whoever writes it."""
        if not self._is_written():
            from memfit.report.page import write_report

            write_report(self.folder)

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has died
                self._process.stdin.write(json.dumps(plain(message)) + "\n")
                self._process.stdin.flush()

    def _is_written(self) -> bool:
        if self._process is None:
            return False
        try:
            return self._process.wait(_LONGEST_SECONDS) == 0
        except subprocess.TimeoutExpired:
            return False


def main() -> None:
    """`python -m memfit.run.report_process FOLDER`: draws what it is sent, then writes the page."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training, which ends us
    from memfit.report.page import render, write_report

    with contextlib.suppress(ImportError):
        importlib.import_module("matplotlib.backends.backend_svg")
    folder = RunFolder(Path(sys.argv[1]))
    for line in sys.stdin:
        known = json.loads(line)
        if not known:
            write_report(folder.path)
            return
        render(folder, ending=known)
    sys.exit(1)  # the run ended without a page


if __name__ == "__main__":
    main()
