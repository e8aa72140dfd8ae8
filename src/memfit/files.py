"""Files that are never seen half-written, and JSON in and out of them.

What is being written has a name of its own (`leftovers`), so that the next run can remove what
a killed one left.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import IO, Any

from memfit.errors import InputError, OutputError
from memfit.messages import t
from memfit.safe_text import without_tokens
from memfit.units import format_bytes

UNFINISHED = ".unfinished"
"""The folder that holds what is not complete yet, beside where it will be."""
_DISK_ERRORS = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS", "EACCES", "EPERM", "ENODEV", "ESTALE")
    if hasattr(errno, name)
)
_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}")


@contextmanager
def atomic_writer(path: Path, encoding: str = "utf-8") -> Iterator[IO[str]]:
    """A file that appears under its name only when it is complete."""
    handle = tempfile.NamedTemporaryFile(  # noqa: SIM115 (it outlives the block, to be renamed)
        "w",
        encoding=encoding,
        errors="replace",  # half an emoji, as broken JSON carries, must not cost the file
        newline="",
        dir=path.parent,
        prefix=f".{path.name}.",
        delete=False,
    )
    try:
        with handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        # Private by default; the result should be as readable as any file made here.
        os.chmod(handle.name, 0o666 & ~_umask())
        os.replace(handle.name, path)
    except BaseException:
        Path(handle.name).unlink(missing_ok=True)
        raise


@contextmanager
def staged_files(folder: Path) -> Iterator[Path]:
    """A place to write several files; they come to the folder when all are complete.

    They replace what is there, a link as well, and never write through it.
    """
    place = folder / UNFINISHED
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    try:
        yield place
        written = [item for item in place.rglob("*") if item.is_file()]
        for item in written:
            with item.open("r+b") as file:
                os.fsync(file.fileno())
        for item in written:
            target = folder / item.relative_to(place)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(item, target)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def leftovers(folder: Path, names: Iterable[str]) -> list[Path]:
    """What killed writes of these files have left in a folder."""
    known = set(names)
    with contextlib.suppress(OSError):
        return [
            item
            for item in folder.iterdir()
            if item.name == UNFINISHED
            or ((match := _TEMPORARY.fullmatch(item.name)) and match[1] in known)
        ]
    return []


def is_disk_problem(error: BaseException) -> bool:
    """Whether what is wrong is the disk; libraries not written in Python only say it in words."""
    if isinstance(error, OSError):
        return error.errno in _DISK_ERRORS
    if isinstance(error, InputError):  # its sentence quotes what was given, whatever that says
        return error.__context__ is not None and is_disk_problem(error.__context__)
    text = str(error)
    return "os error" in text or "No space left" in text or "PytorchStreamWriter" in text


def why_not_written(error: BaseException, folder: Path) -> str:
    """The system's words and the room that is left, since libraries hide which of them it was."""
    reason = getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__)
    with contextlib.suppress(OSError):
        free = format_bytes(shutil.disk_usage(folder).free)
        why = reason.splitlines()[0]
        return t("{reason} ({free} are free in {folder})", reason=why, free=free, folder=folder)
    return str(reason.splitlines()[0])


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_json(path: Path, values: Mapping[str, Any]) -> Path:
    """Atomic, readable, UTF-8, without access tokens."""
    text = json.dumps(plain(values), ensure_ascii=False, indent=2, allow_nan=False)
    with atomic_writer(path) as file:
        file.write(without_tokens(text) + "\n")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file; OutputError when it is not there or is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OutputError(
            t(
                "there is no {name} in {folder}; name the output folder of a finished run",
                name=path.name,
                folder=path.parent,
            )
        ) from None
    except (OSError, ValueError) as error:
        raise OutputError(t("cannot read {path}: {reason}", path=path, reason=error)) from None
    if not isinstance(values, dict):
        raise OutputError(t("cannot read {path}: it holds no JSON object", path=path))
    return values


def plain(value: Any) -> Any:
    """What JSON can hold: numpy's numbers as ours, names as text, NaN and infinity as null."""
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
