"""Where the Arrow files lie while the process lives, and what the terminal sees meanwhile."""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from memfit.errors import DataError

_numbers = itertools.count()

QUIET_SECONDS = 2.0
"""A progress bar appears only after this long."""


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    # One folder a process, removed at its end and not with the dataset: what is derived from a
    # dataset (select, map, a copy in a data-loading worker) still points at these files.
    # Windows cannot remove a file that is still mapped, hence the ignored errors.
    return tempfile.TemporaryDirectory(prefix="memfit-data-", ignore_cleanup_errors=True)


def new_file() -> Path:
    """A fresh Arrow file name in a folder of its own, so that no cache is ever found in it."""
    folder = Path(_folder().name) / f"table-{next(_numbers)}"
    folder.mkdir()
    return folder / "rows.arrow"


@contextmanager
def room_on_disk() -> Iterator[None]:
    """What is written inside may not fit on the disk; then one sentence says so."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write to the temporary folder {_folder().name} ({error}); "
            "make room there, or point TMPDIR at a larger disk"
        ) from None


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Hold back the log lines of `datasets` and the Hub client; what fails is raised anyway."""
    from datasets.utils import logging as datasets_logging
    from huggingface_hub.utils import logging as hub_logging

    before = datasets_logging.get_verbosity(), hub_logging.get_verbosity()
    datasets_logging.set_verbosity(logging.CRITICAL)
    hub_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets_logging.set_verbosity(before[0])
        hub_logging.set_verbosity(before[1])


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """The same for its progress bars; ours wait until there is something to wait for."""
    import datasets

    had_bars = not datasets.are_progress_bars_disabled()
    if had_bars:
        datasets.disable_progress_bars()
    try:
        with quiet_logs():
            yield
    finally:
        if had_bars:
            datasets.enable_progress_bars()


def progress_bar(what: str, total_rows: int | None = None) -> Any:
    """A bar on a terminal, once the work has taken two seconds; none in a log file."""
    from huggingface_hub.utils.tqdm import tqdm

    bar: Any = tqdm  # its own signature has no types
    return bar(
        desc=what, total=total_rows, unit=" rows", delay=QUIET_SECONDS, disable=None, leave=False
    )
