"""Folders that appear and disappear whole: written beside, renamed, and only then removed.

Everything unfinished lies in one hidden folder beside the checkpoints. Whatever a process that
was killed left in it is put right by the next one (`tidy`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from memfit.files import UNFINISHED
from memfit.runtime.checkpoint import checkpoints_in, step_of
from memfit.runtime.manifest import sync_directory

_REPLACED, _REMOVED = "replaced-", "removed-"


def place_for(final: Path) -> Path:
    """Where a folder is written before it is renamed to this."""
    return final.parent / UNFINISHED / final.name


def publish(final: Path) -> None:
    """Give a finished folder its name; one that had the name before goes only after that."""
    unfinished = place_for(final)
    replaced = unfinished.with_name(_REPLACED + final.name)
    if os.path.lexists(final):
        os.rename(final, replaced)
    os.rename(unfinished, final)
    with contextlib.suppress(OSError):  # all of it is on the disk already, under one name or other
        sync_directory(final.parent)
    _remove(replaced)
    _remove_if_empty(final.parent)


def remove_whole(folder: Path) -> None:
    """Remove a folder so that no half of it is ever found under its name."""
    going = folder.parent / UNFINISHED / (_REMOVED + folder.name)
    going.parent.mkdir(exist_ok=True)
    _remove(going)
    os.rename(folder, going)
    _remove(going)
    _remove_if_empty(folder.parent)


def tidy(parent: Path) -> None:
    """Remove what a write that was cut off has left; a folder it was about to replace stays."""
    unfinished = parent / UNFINISHED
    if unfinished.is_symlink():
        unfinished.unlink()
        return
    for item in list(unfinished.iterdir()) if unfinished.is_dir() else ():
        former = parent / item.name.removeprefix(_REPLACED)
        if item.name.startswith(_REPLACED) and not os.path.lexists(former):
            os.rename(item, former)
        else:
            _remove(item)
    _remove_if_empty(parent)


def rotate(
    parent: Path, limit: int | None, *, newest: Path, best: str | None, damaged: Iterable[Path] = ()
) -> None:
    """Remove all but `limit` checkpoints; the newest and the best stay in any case.

    Damaged ones go first, then those of steps that a resumed run has not come to again, then
    the oldest.
    """
    if limit is None or limit <= 0:
        return
    found = checkpoints_in(parent)
    kept = {newest.name} | ({Path(best).name} if best is not None else set())
    spoiled = {item.name for item in damaged}
    reached = step_of(newest) or 0

    def worth(item: Path) -> tuple[bool, bool, int]:
        step = step_of(item) or 0
        return item.name not in spoiled, step <= reached, step

    going = sorted((item for item in found if item.name not in kept), key=worth)
    for item in going[: max(len(found) - max(limit, len(kept)), 0)]:
        with contextlib.suppress(OSError):  # a full or read-only disk; the next rotation tries
            remove_whole(item)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _remove_if_empty(parent: Path) -> None:
    with contextlib.suppress(OSError):
        (parent / UNFINISHED).rmdir()
