"""Files: written whole or not at all, JSON and TOML in and out, and the user's cache folder.

What is being written has a name of its own (`leftovers`), so that the next run can remove what
a killed one left.

Everything in it can be made again: a file that is missing, damaged or not writable costs time,
never a run.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import IO, Any

from memfit.errors import ConfigError, InputError, OutputError
from memfit.i18n import t
from memfit.printing import without_tokens
from memfit.units import format_bytes

UNFINISHED = ".unfinished"
"""The folder that holds what is not complete yet, beside where it will be."""

_DISK_ERRORS = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS", "EACCES", "EPERM", "ENODEV", "ESTALE")
    if hasattr(errno, name)
)

_FULL = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})
_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}")


@contextmanager
def atomic_writer(path: Path, encoding: str = "utf-8") -> Iterator[IO[str]]:
    """A file that appears under its name only when it is complete."""
    # Half an emoji, as broken JSON carries, must not cost the file.
    options = {"encoding": encoding, "errors": "replace", "newline": ""}
    with _complete(path, "w", **options) as handle:
        yield handle
        # Private by default; the result should be as readable as any file made here.
        mask = os.umask(0o022)
        os.umask(mask)
        os.chmod(handle.name, 0o666 & ~mask)


def write_bytes(path: Path, *parts: Any) -> None:
    """Writes a file that appears under its name only when it is complete and on the disk."""
    with _complete(path, "wb") as handle:
        for part in parts:
            handle.write(part)


@contextmanager
def _complete(path: Path, mode: str, **options: str) -> Iterator[Any]:
    """A temporary file beside the path, which takes its place when the block has ended."""
    made: Any = tempfile.NamedTemporaryFile
    handle = made(mode, dir=path.parent, prefix=f".{path.name}.", delete=False, **options)
    try:
        with handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(handle.name, path)
    except BaseException:
        Path(handle.name).unlink(missing_ok=True)
        raise


def open_to_append(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Opens a file that grows; a link in its place is removed and never written through."""
    if path.is_symlink():
        path.unlink()
    no_link = getattr(os, "O_NOFOLLOW", 0)
    return open(path, mode, opener=lambda name, how: os.open(name, how | no_link, 0o666), **options)


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
    return "os error" in text or "No space left" in text or _is_torchs_writer(error)


def why_not_written(error: BaseException, folder: Path) -> str:
    """What was wrong with the disk, and the room that is left on it."""
    reason = getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__)
    why: str = reason.splitlines()[0]
    if getattr(error, "errno", None) in _FULL or "os error 28" in why or "No space left" in why:
        why = t("the disk is full")
    elif _is_torchs_writer(error):
        why = t("torch could not write the whole file, so the disk is probably full")
    with contextlib.suppress(OSError):
        free = format_bytes(shutil.disk_usage(folder).free)
        return t("{reason} ({free} are free in {folder})", reason=why, free=free, folder=folder)
    return why


def _is_torchs_writer(error: BaseException) -> bool:
    """Whether torch's writer of zip files failed: it says in which line of its own, never why."""
    words = ("inline_container", "PytorchStreamWriter", "iostream error")
    return any(word in str(error) for word in words)


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
            "there is no {name} in {folder}; name the output folder of a finished run",
            name=path.name,
            folder=path.parent,
        ) from None
    except (OSError, ValueError) as error:
        raise OutputError("cannot read {path}: {reason}", path=path, reason=error) from None
    if not isinstance(values, dict):
        raise OutputError("cannot read {path}: it holds no JSON object", path=path)
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


def read_toml(path: Path) -> dict[str, Any]:
    """The file's values; an unreadable file is a ConfigError that says where."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            "cannot read the configuration {path}: {reason}", path=path, reason=reason
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("{path} is not a TOML file: {reason}", path=path, reason=error) from None


def dump_toml(tables: Mapping[str, Any]) -> str:
    """Returns the tables as TOML, each value that is not a table before those that are.

    No access token is written, wherever it was put.
    """
    import tomli_w  # only what writes a file waits for it

    return without_tokens(tomli_w.dumps(_plain(tables)))


def _plain(value: Any) -> Any:
    """Returns the value in TOML's types: enums by their value, paths and all else as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    value = getattr(value, "value", value)
    return value if isinstance(value, (bool, int, float, str)) else str(value)


ENVIRONMENT = "MEMFIT_CACHE"


def cache_folder() -> Path:
    """$MEMFIT_CACHE, or the folder the system has for caches; it may not exist yet."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "memfit" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "memfit"
    # The XDG specification: a relative path is to be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "memfit"


_used: ContextVar[bool] = ContextVar("used", default=True)
_MOST_FILES = 200


@contextmanager
def cache_unused(when: bool = True) -> Iterator[None]:
    """Inside, nothing is read from the cache; results are still written to it."""
    before = _used.set(_used.get() and not when)
    try:
        yield
    finally:
        _used.reset(before)


def cache_is_used() -> bool:
    """Whether plans and measurements of earlier runs may be taken."""
    return _used.get()


def cache_digest(values: Mapping[str, Any]) -> str:
    """Twenty characters that change with anything in these values."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@functools.cache
def installed_versions() -> dict[str, Any]:
    """What anything computed depends on: memfit's own files and the libraries below it."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in ("torch", "transformers", "accelerate", "peft", "triton", "datasets"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    stamps = [(str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in files]
    found["memfit"] = hashlib.sha256(repr(stamps).encode()).hexdigest()
    return found


@functools.cache
def processor() -> list[str]:
    """The machine's CPU, as far as it can be told, and what torch makes of it."""
    import torch

    threads = str(torch.get_num_threads())
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return [platform.node(), platform.machine(), platform.processor(), threads, isa]


def tidy_cache(pattern: str, *, most_bytes: float = math.inf) -> None:
    """Removes the oldest of too many files, or of files that take too much together."""
    with suppress(OSError, RuntimeError):
        files = sorted(cache_folder().glob(pattern), key=lambda one: -one.stat().st_mtime)
        total_bytes = 0
        for count, one in enumerate(files, 1):
            total_bytes += one.stat().st_size
            if count > _MOST_FILES or total_bytes > most_bytes:
                with suppress(OSError):  # Windows removes no file that is open
                    one.unlink()


def remembered(name: str) -> dict[str, Any] | None:
    """The object in a file of the folder; None where there is none that can be read."""
    try:
        values = json.loads((cache_folder() / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: this user has no home folder
        return None
    return values if isinstance(values, dict) else None


def remember(name: str, values: dict[str, Any]) -> None:
    """Writes an object to a file of the folder, if that can be done."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / name, values)
    except (OSError, RuntimeError):
        return
