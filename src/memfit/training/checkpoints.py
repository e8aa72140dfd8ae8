"""Checkpoints: written whole, listed with checksums, verified, found again and rotated.

SHA-256, because anybody can check it (`sha256sum`) and processors of the last years have
instructions for it: 1.8 GB/s on one core, faster than the disks that checkpoints go to.

A checkpoint is good when its files are those its manifest lists, byte for byte. One that another
Trainer wrote has no manifest: it is taken where there are no others.

Everything unfinished lies in one hidden folder beside the checkpoints. Whatever a process that was
killed left in it is put right by the next one (`tidy`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from transformers import TrainerState

from memfit.config.files import UNFINISHED
from memfit.engine.micro_batches import MicroBatching
from memfit.errors import ConfigError, NoCheckpointError, OutputError
from memfit.i18n import t

MANIFEST = "manifest.json"

_VERSION = 1

_THREADS = 4


def write_manifest(folder: Path) -> Path:
    """List all files of a finished folder and bring everything to the disk itself.

    The data, then the list, then the folders: after this a power cut loses nothing.
    """
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    # Digests and disks need no interpreter: the files are read and flushed side by side.
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = list(pool.map(_entry, paths))
    names = (path.relative_to(folder).as_posix() for path in paths)
    files = dict(zip(names, entries, strict=True))
    listed = {"version": _VERSION, "files": files}
    manifest = folder / MANIFEST
    with manifest.open("w", encoding="utf-8") as file_:
        json.dump({**listed, "sha256": _own_digest(listed)}, file_, indent=1)
        file_.write("\n")
        file_.flush()
        os.fsync(file_.fileno())
    for directory in [*(item for item in folder.rglob("*") if item.is_dir()), folder]:
        sync_directory(directory)
    return manifest


def _entry(path: Path) -> dict[str, Any]:
    with path.open("r+b") as file:  # Windows flushes only what may be written to
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest}


def problem_with(folder: Path) -> str:
    """Returns why the folder is not what its manifest says; empty if it is."""
    if folder.is_symlink():
        return t("it is a link to somewhere else")
    try:
        files = _read(folder / MANIFEST)
    except FileNotFoundError:
        return t("{file}, which is written last, is missing", file=MANIFEST)
    except (OSError, ValueError) as error:
        return t("{file} cannot be read: {reason}", file=MANIFEST, reason=error)
    for name, entry in files.items():
        path = folder / name
        try:
            if not path.is_file():
                return t("{file} is missing", file=name)
            if path.is_symlink() or not path.resolve().is_relative_to(folder.resolve()):
                return t("{file} is a link to somewhere else", file=name)
            if (size_bytes := path.stat().st_size) != entry["bytes"]:
                sizes = {"bytes": f"{size_bytes:,}", "whole": f"{entry['bytes']:,}"}
                return t("{file} has {bytes} of its {whole} bytes", file=name, **sizes)
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry.get("sha256"):
                    return t("{file} does not match its checksum", file=name)
        except OSError as error:
            reason = error.strerror or error
            return t("{file} cannot be read: {reason}", file=name, reason=reason)
    return ""


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The files it lists; ValueError where it is none, or names files outside its folder."""
    if path.is_symlink():
        raise ValueError("it is a link")
    values = json.loads(path.read_bytes())
    if not isinstance(values, dict) or values.get("version") != _VERSION:
        raise ValueError("it is not a list of files that memfit wrote")
    stated = values.pop("sha256", None)
    if stated != _own_digest(values):
        raise ValueError("it does not match its own checksum")
    files: Any = values.get("files")
    entries = files.values() if isinstance(files, dict) else [None]
    if not all(isinstance(e, dict) and isinstance(e.get("bytes"), int) for e in entries):
        raise ValueError("it is not a list of files that memfit wrote")
    for name in files:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name:
            raise ValueError(f"it names {name!r}, which is outside the checkpoint")
    return dict(files)


def sync_directory(folder: Path) -> None:
    """Bring a folder's list of names to the disk; Windows does that by itself."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _own_digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


_FOLDER = re.compile(r"checkpoint-(\d{1,18})", re.ASCII)

# The Trainer writes this file last: a checkpoint without it was interrupted while being written.
_WRITTEN_LAST = "trainer_state.json"

_OPTIMIZER = "optimizer.pt"

_OURS = "memfit.json"


@dataclass(frozen=True, slots=True)
class CheckpointSearch:
    """The newest good checkpoint, if there is one, and why each newer one is none."""

    good: Path | None
    passed_over: tuple[tuple[Path, str], ...] = ()

    def notes(self) -> list[str]:
        """One sentence for each that was passed over."""
        return [
            t("{path} is passed over: {why}", path=path, why=why) for path, why in self.passed_over
        ]


def step_of(checkpoint: Path) -> int | None:
    """The step a folder of this name was written after; None where it is no checkpoint."""
    match = _FOLDER.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """All folders that are called checkpoints, newest first, whatever is in them."""
    folder = Path(output_dir)
    try:
        found = [item for item in folder.iterdir() if item.is_dir() and step_of(item) is not None]
    except OSError:
        return []
    return sorted(found, key=lambda item: (step_of(item) or 0, item.name), reverse=True)


def newest_good(output_dir: str | Path) -> CheckpointSearch:
    """Looks from the newest on; every byte of the one that is taken has been read."""
    passed_over: list[tuple[Path, str]] = []
    for item in checkpoints_in(output_dir):
        if not (problem := damage(item)):
            return CheckpointSearch(item, tuple(passed_over))
        passed_over.append((item, problem))
    return CheckpointSearch(None, tuple(passed_over))


def damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint, whoever wrote it; empty where nothing is."""
    listed = "" if _is_foreign(checkpoint) else problem_with(checkpoint)
    return listed or state_problem(checkpoint)


def newest_listed(output_dir: str | Path) -> Path | None:
    """The newest that has a manifest, unread: for a sentence, not to go on from."""
    return next((item for item in checkpoints_in(output_dir) if (item / MANIFEST).is_file()), None)


def _is_foreign(checkpoint: Path) -> bool:
    """Whether another Trainer wrote it: one of ours that lost its manifest is damaged."""
    return not (checkpoint / MANIFEST).exists() and not (checkpoint / _OURS).exists()


def state_problem(checkpoint: Path) -> str:
    """Why nothing can be continued from the state: not there, cut off, or not one at all.

    Of a checkpoint without manifest this is all that can be told.
    """
    try:
        state = TrainerState.load_from_json(str(checkpoint / _WRITTEN_LAST))
        if not isinstance(state.global_step, int) or not isinstance(state.log_history, list):
            raise TypeError("it counts no steps")
    except FileNotFoundError:
        return t("{file}, which is written last, is missing", file=_WRITTEN_LAST)
    except Exception as error:  # whatever half a file makes of JSON and of the state's fields
        return t("{file} cannot be read: {reason}", file=_WRITTEN_LAST, reason=error)
    return ""


def checkpoint_to_resume(output_dir: str | Path, wanted: str | Path | CheckpointSearch) -> Path:
    """The checkpoint to continue from: the one named, or the one found."""
    if not isinstance(wanted, CheckpointSearch):
        found = Path(wanted)
        if not found.is_dir():
            raise NoCheckpointError(
                "Can't find a valid checkpoint at {path}: there is no such folder", path=wanted
            )
        if problem := damage(found.resolve()):
            raise OutputError(
                "{path} is not a complete checkpoint: {problem}", path=wanted, problem=problem
            )
    elif wanted.good is None:
        raise NoCheckpointError(nothing_good(output_dir, wanted))
    else:
        found = wanted.good
    if _is_foreign(found):
        _warn(
            t(
                "{checkpoint} has no {file}, since another Trainer wrote it: it is taken unchecked",
                checkpoint=found,
                file=MANIFEST,
            )
        )
    if not (found / _OPTIMIZER).is_file():
        _warn(
            t(
                "{checkpoint} has no optimizer state (save_only_model): the run goes on from its "
                "weights, not exactly",
                checkpoint=found,
            )
        )
    return found


def nothing_good(output_dir: str | Path, search: CheckpointSearch) -> str:
    """Returns why a run cannot be resumed."""
    if not search.passed_over:
        return t(
            "nothing to resume: No valid checkpoint found in output directory ({folder})",
            folder=output_dir,
        )
    return t(
        "nothing to resume: no checkpoint in {folder} is whole. {damaged}",
        folder=output_dir,
        damaged="; ".join(search.notes()),
    )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=4)


def record_micro_batching(
    folder: str | Path, micro_batching: MicroBatching, effective_rows: int
) -> None:
    """Writes how the batches were run, since dropout's numbers depend on it, and their rows."""
    ours = {"micro_batching": asdict(micro_batching), "effective_rows": effective_rows}
    (Path(folder) / _OURS).write_text(json.dumps(ours, indent=2) + "\n", encoding="utf-8")


def recorded_micro_batching(checkpoint: str | Path) -> MicroBatching | None:
    """Returns how this checkpoint's batches were run; None if another Trainer wrote it."""
    recorded = _recorded(checkpoint).get("micro_batching")
    return None if recorded is None else MicroBatching(**recorded)


def _recorded(checkpoint: str | Path) -> dict[str, Any]:
    path = Path(checkpoint) / _OURS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def warn_of_other_cut(checkpoint: Path, now: MicroBatching) -> None:
    """Warns if the run goes on with other micro-batches: dropout draws other numbers then."""
    if (recorded := recorded_micro_batching(checkpoint)) not in (None, now):
        _warn(
            t(
                "{checkpoint} was trained with {recorded}, this run goes on with "
                "{now}: the same training up to rounding and dropout's random "
                "numbers, not bit for bit",
                checkpoint=checkpoint,
                recorded=recorded,
                now=now,
            )
        )


def rows_of_each_rank(checkpoint: Path, effective_rows: int, ranks: int) -> int | None:
    """Returns the rows of each rank, if another number of ranks trained this; else None.

    Each rank leaves a file of random state. A step learns from as many rows as before.
    """
    rows: int | None = _recorded(checkpoint).get("effective_rows")
    trained_by = len(list(checkpoint.glob("rng_state*.pth")))
    if rows in (None, effective_rows) or trained_by in (0, ranks):
        return None
    assert rows is not None
    if rows % ranks:
        raise ConfigError(
            "{checkpoint} was trained with {rows} rows a step, which {ranks} processes "
            "cannot share evenly; start a number of them that divides it",
            checkpoint=checkpoint,
            rows=rows,
            ranks=ranks,
        )
    return rows // ranks


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
