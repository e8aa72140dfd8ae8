"""The folder in which memfit remembers what it measured on this machine.

Everything in it can be made again: a file that is missing, damaged or not writable costs time,
never a run.
"""

from __future__ import annotations

import json
import os
import sys
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
