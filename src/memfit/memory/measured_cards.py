"""Cards that `memfit doctor --measure` has measured on this machine, kept in the cache folder.

A row has the format of cards.toml, so that it can be pasted into it. One file a card, driver and
torch: of several the newest counts.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from memfit.config import files

_NUMBERS = ("gib", "sm", "gb_s", "fp32", "half")
"""What a row must have."""


def kept_rows() -> dict[str, dict[str, Any]]:
    """The rows measured on this machine, by the name cards.toml has for the card."""
    if not files.cache_is_used():
        return {}
    found: dict[str, dict[str, Any]] = {}
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home folder
        paths = sorted(files.cache_folder().glob("card-*.json"), key=_age)
        for path in paths:
            values = files.remembered(path.name) or {}
            name, row = values.get("card"), values.get("row")
            if isinstance(name, str) and isinstance(row, dict) and _is_whole(row):
                found[name] = row
    return found


def keep_row(card: str, row: dict[str, Any], *, driver: str, torch: str) -> None:
    """Keeps a card's row for the plans of this user."""
    digest = files.cache_digest({"card": card, "driver": driver, "torch": torch})
    files.remember(f"card-{digest}.json", {"card": card, "row": row})
    files.tidy_cache("card-*.json")


def _age(path: Any) -> float:
    return float(path.stat().st_mtime)


def _is_whole(row: dict[str, Any]) -> bool:
    numbers = all(isinstance(row.get(name), (int, float)) for name in _NUMBERS)
    capability = row.get("capability")
    return numbers and isinstance(capability, list) and len(capability) == 2
