"""The folder in which memfit remembers what it measured on this machine.

Everything in it can be made again: a file that is missing, damaged or not writable costs time,
never a run.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from memfit.files import write_json

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
def unused(when: bool = True) -> Iterator[None]:
    """For as long as it lasts nothing is taken from earlier runs; what is found is kept."""
    before = _used.set(_used.get() and not when)
    try:
        yield
    finally:
        _used.reset(before)


def is_used() -> bool:
    """Whether plans and measurements of earlier runs may be taken."""
    return _used.get()


def digest(values: Mapping[str, Any]) -> str:
    """Twenty characters that change with anything in these values."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@functools.cache
def installed() -> dict[str, Any]:
    """What anything computed depends on: memfit's own files and the libraries below it."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in ("torch", "transformers", "accelerate", "peft", "triton", "datasets"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    files = sorted(Path(__file__).parent.rglob("*.py"))
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


def tidy(pattern: str, *, most_bytes: float = math.inf) -> None:
    """Removes the oldest of too many files, or of files that take too much together."""
    with suppress(OSError, RuntimeError):
        files = sorted(cache_folder().glob(pattern), key=lambda one: -one.stat().st_mtime)
        total_bytes = 0
        for count, one in enumerate(files, 1):
            total_bytes += one.stat().st_size
            if count > _MOST_FILES or total_bytes > most_bytes:
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
