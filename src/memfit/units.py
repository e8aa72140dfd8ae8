"""Bytes in and out: sizes as people write them, budgets, and how both are printed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memfit.errors import BudgetError
from memfit.i18n import Language, Message, t

KIB, MIB, GIB = 2**10, 2**20, 2**30

# "4G" is read as GB: that is what is printed on the card's box.
_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": KIB,
    "m": 10**6, "mb": 10**6, "mib": MIB,
    "g": 10**9, "gb": 10**9, "gib": GIB,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_BARE = re.compile(r"[\s\d.]+")

_LEAST_BARE_BYTES = 10**5
"""A smaller number without a unit was not meant in bytes."""

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")

DISPLAY_HEADROOM_BYTES = 256 * MIB
"""What `auto` leaves free on a card for the display and its neighbours."""


@dataclass(frozen=True, slots=True)
class Budget:
    """All the device memory the process may use, the CUDA context included.

    Exactly one of the two is set for a size or a share of the card; neither for `auto`.
    """

    bytes: int | None = None
    fraction: float | None = None

    def resolve(self, *, total_bytes: int, free_bytes: int) -> int:
        """The budget in bytes on a device with this much memory; never beyond the device.

        `auto` takes what is free now and leaves room for the display.
        """
        if self.bytes is not None:
            return min(self.bytes, total_bytes)
        if self.fraction is not None:
            return int(self.fraction * total_bytes)
        return max(free_bytes - DISPLAY_HEADROOM_BYTES, 0)

    def __str__(self) -> str:
        if self.bytes is not None:
            return format_bytes(self.bytes)
        if self.fraction is not None:
            return t("{share:.0%} of the device", share=self.fraction)
        return "auto"


def parse_bytes(text: str) -> int:
    """'4GB' is 4e9, '4GiB' is 2**32, '4G' is read as GB, a bare number is bytes."""
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise BudgetError(
            "cannot read {text} as a size; write 4GB, 4GiB or 3500MB", text=repr(text)
        )
    return round(float(match[1]) * factor)


def parse_budget(given: str | int) -> Budget:
    """'4GB', '3.5GiB', '80%' or 'auto'; a number without a unit is bytes, if that makes sense."""
    text = str(given)
    if text.strip().lower() == "auto":
        return Budget()
    if match := _PERCENT.fullmatch(text):
        fraction = float(match[1]) / 100
        if not 0 < fraction <= 1:
            raise BudgetError(
                "a budget of {text} makes no sense; write 1% to 100%", text=text.strip()
            )
        return Budget(fraction=fraction)
    try:
        size = parse_bytes(text)
    except BudgetError:
        raise BudgetError(
            "cannot read the budget {text}; write a size (4GB, 4GiB), a share (80%) or auto",
            text=repr(text),
        ) from None
    if 0 < size < _LEAST_BARE_BYTES and _BARE.fullmatch(text):
        meant = text.strip() + ("GB" if size < 1000 else "MB")
        raise BudgetError(
            "a budget of {text} has no unit and would be {text} bytes; did you mean {meant}?",
            text=text.strip(),
            meant=meant,
        )
    if size <= 0:
        raise BudgetError(
            "a budget of {text} leaves no memory; write a size such as 4GB", text=text.strip()
        )
    return Budget(bytes=size)


def format_bytes(count: int) -> str:
    """Binary units for a person: 3.73 GiB, 512.0 MiB, 12.0 KiB, 80 B."""
    for unit, factor, digits in (("GiB", GIB, 2), ("MiB", MIB, 1), ("KiB", KIB, 1)):
        if abs(count) >= factor:
            return f"{count / factor:.{digits}f} {unit}"
    return f"{count} B"


def format_both(count: int) -> str:
    """Both readings, since a '4 GB' card has 4 GiB: '4.00 GB (3.73 GiB)'; one for small sizes."""
    if abs(count) < 10**7:  # 0.00 GB says nothing
        return format_bytes(count)
    return f"{count / 10**9:.2f} GB ({format_bytes(count)})"


def format_seconds(seconds: float, language: Language | None = None) -> str:
    """For a person: 0.4 s, 12 s, 3 min 20 s, 2 h 05 min; in the language spoken, or another."""
    return duration(seconds).shown(language)


def duration(seconds: float) -> Message:
    """The same as a message, for sentences that are translated later."""
    whole = round(seconds)
    if seconds < 10:
        return Message("{seconds:.1f} s", seconds=seconds)
    if whole < 60:
        return Message("{seconds} s", seconds=whole)
    if whole < 3600:
        return Message("{minutes} min {seconds:02d} s", minutes=whole // 60, seconds=whole % 60)
    return Message("{hours} h {minutes:02d} min", hours=whole // 3600, minutes=whole % 3600 // 60)


def gb(count: float) -> str:
    """Decimal units, as budgets are written: 0.61 GB, 43 MB."""
    return f"{count / 1e9:.2f} GB" if abs(count) >= 1e8 else f"{count / 1e6:.0f} MB"


def percent(share: float) -> str:
    """A share for a person: 17 %, and 0.4 % or 99.6 % near the ends."""
    near_an_end = 0 < share < 0.01 or 0.99 < share < 1
    return tenths_of_percent(share) if near_an_end else f"{100 * share:.0f} %"


def tenths_of_percent(share: float) -> str:
    """A share where tenths matter: 91.3 %."""
    return f"{100 * share:.1f} %"


def step_time(seconds: float) -> str:
    """A step's time: 18.4 ms, 1.25 s."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
