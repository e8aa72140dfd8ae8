"""Where the Arrow files lie while the process lives, and what the terminal sees meanwhile."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import DataError
from memfit.i18n import t
from memfit.units import format_seconds
from memfit.waiting import is_told, show_count

if TYPE_CHECKING:
    from datasets import Dataset

_numbers = itertools.count()
_PREFIX, _LOCK = "memfit-data-", ".in-use"
_YOUNG_SECONDS = 3600.0

QUIET_SECONDS = 2.0
"""A progress bar appears only after this long."""


def _folder() -> tempfile.TemporaryDirectory[str]:
    # One folder a process, removed at its end and not with the dataset: what is derived from a
    # dataset (select, map, a copy in a data-loading worker) still points at these files. A fork
    # makes its own, and leaves the parent's to the parent.
    return _folder_of(os.getpid())


@cache
def _folder_of(_process: int) -> tempfile.TemporaryDirectory[str]:
    # Windows cannot remove a file that is still mapped, hence the ignored errors.
    _remove_abandoned(Path(tempfile.gettempdir()))
    made = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
    # Held before it has its name: another process that starts now would take it for abandoned.
    unnamed = Path(made.name) / f"{_LOCK}.new"
    _hold(unnamed)
    with suppress(OSError):
        unnamed.rename(unnamed.with_name(_LOCK))
    return made


def _remove_abandoned(parent: Path) -> None:
    """Folders of processes that were killed: nobody holds their lock any more."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = folder / _LOCK
            if lock.exists():
                abandoned = _hold(lock, try_only=True)
            else:  # its process may be about to make it
                abandoned = time.time() - folder.stat().st_mtime > _YOUNG_SECONDS
            if abandoned:
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, AttributeError):  # another process was faster; Windows has no owners
            continue


def _hold(lock: Path, *, try_only: bool = False) -> bool:
    """Locks a file until the process ends. Returns False if another process holds the lock."""
    try:
        import fcntl
    except ImportError:
        return False
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return False
    if try_only:
        os.close(handle)
    return True


def new_file() -> Path:
    """A fresh Arrow file name in a folder of its own, so that no cache is ever found in it."""
    folder = Path(_folder().name) / f"table-{next(_numbers)}"
    folder.mkdir()
    return folder / "rows.arrow"


def on_disk(dataset: Dataset) -> Dataset:
    """The same rows from a working file, where they lie in memory."""
    if dataset.cache_files:
        return dataset
    import pyarrow as pa
    from datasets import Dataset

    path = new_file()
    with room_on_disk(), pa.ipc.new_stream(str(path), dataset.data.schema) as writer:
        writer.write_table(dataset.data.table)
    return Dataset.from_file(str(path))


@contextmanager
def room_on_disk() -> Iterator[None]:
    """What is written inside may not fit on the disk; then one sentence says so."""
    try:
        yield
    except OSError as error:
        raise DataError(
            "cannot write to the temporary folder {folder} ({reason}); make room there, or "
            "point TMPDIR at a larger disk",
            folder=_folder().name,
            reason=error,
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
    """Silences the progress bars of `datasets`; memfit's own appear after a while."""
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


class RowMeter:
    """Counts rows for the line that tells what is being done."""

    def __init__(self, total_rows: int | None = None) -> None:
        self.total_rows = total_rows
        self.rows = 0
        self._began = time.monotonic()
        show_count(self)

    def update(self, rows: int) -> None:
        """Adds rows that are done."""
        self.rows += rows

    def close(self) -> None:
        """The work goes on without a count."""
        show_count(None)

    def pace(self) -> str:
        """How many are done, how many a second, and how long the others take."""
        of_all = "" if self.total_rows is None else f"/{self.total_rows:,}"
        said = [t("{count} rows", count=f"{self.rows:,}{of_all}")]
        seconds = time.monotonic() - self._began
        if self.rows and seconds > 0:
            said.append(t("{rows} rows/s", rows=f"{self.rows / seconds:,.0f}"))
            if self.total_rows is not None:
                left = max(self.total_rows - self.rows, 0) * seconds / self.rows
                said.append(t("{time} left", time=format_seconds(left)))
        return "  ".join(said)

    def summary(self) -> str:
        """What all of them took."""
        seconds = max(time.monotonic() - self._began, 1e-3)
        return t(
            "{count} rows in {time}, {rows} rows/s",
            count=f"{self.rows:,}",
            time=format_seconds(seconds),
            rows=f"{self.rows / seconds:,.0f}",
        )


def progress_bar(what: str, total_rows: int | None = None) -> Any:
    """A bar on a terminal, once the work has taken two seconds; none in a log file.

    A command, which tells what is being done, shows the rows in that line.
    """
    if is_told():
        return RowMeter(total_rows)
    from huggingface_hub.utils.tqdm import tqdm

    bar: Any = tqdm  # its own signature has no types
    return bar(
        desc=what, total=total_rows, unit=" rows", delay=QUIET_SECONDS, leave=False, disable=None
    )
