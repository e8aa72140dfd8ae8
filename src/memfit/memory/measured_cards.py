"""Cards that `memfit doctor --measure` has measured on this machine, kept in the cache folder.

A row has the format of cards.toml, so that it can be pasted into it. One file a card, driver and
torch: of several the newest counts.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from memfit.config import files

_NUMBERS = ("gib", "sm", "gb_s", "fp32", "half")
"""What a row must have."""

_REACHED = {
    "half_flops", "tf32_flops", "fp32_flops", "memory_bytes_per_second", "bus_bytes_per_second",
}  # fmt: skip


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
    """Whether a card can be described by it: somebody may have edited the file."""
    capability, reached = row.get("capability"), row.get("reached", {})
    if not (isinstance(capability, list) and isinstance(reached, dict)):
        return False
    optional = [row.get(name, 1) for name in ("usable_gib", "loaded_mib")]
    numbers = [*capability, *reached.values(), *(row.get(name) for name in _NUMBERS), *optional]
    known = not reached or set(reached) == _REACHED
    return len(capability) == 2 and known and all(map(_is_positive, numbers))


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < math.inf
