"""Around a run: its page while it trains, and word of how it ended. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memfit.announce import voice
from memfit.errors import MemfitError
from memfit.messages import language
from memfit.results import OutputClaim
from memfit.runlog import RunLog

if TYPE_CHECKING:
    from pathlib import Path


@contextlib.contextmanager
def followed(claim: OutputClaim, *, watch: bool = False) -> Iterator[None]:
    """A run that does not finish leaves word of how it ended, and its page.

    With `watch` the page is served while the run trains; its address is said even when quiet,
    since it was asked for.
    """
    with _served(claim.path) if watch else contextlib.nullcontext():
        try:
            yield
        except BaseException as error:
            if claim.kept:
                how = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                RunLog(claim.path).ended(how, _why(error))
                _write_report(claim.path)
            raise


def _served(folder: Path) -> contextlib.AbstractContextManager[None]:
    from memfit.report.live import watching

    return watching(folder, voice(quiet=False), language())


def _why(error: BaseException) -> str:
    if isinstance(error, MemfitError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return ""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _write_report(folder: Path) -> None:
    """What went wrong is the error that is being raised, not what its page fails over."""
    from memfit.report.page import write_report

    with contextlib.suppress(Exception):
        write_report(folder)
