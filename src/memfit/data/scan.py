"""What the labels of a table look like, seen one row at a time."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from memfit.errors import DataError
from memfit.messages import t

MOST_CLASSES = 10_000
"""More different labels than this are numbers to predict or not labels at all."""

SEPARATORS = ("|", ";", ",")
"""Between labels in one cell; only the first is taken for one without being asked."""

WHOLE = re.compile(r"[+-]?\d+(\.0*)?")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")  # not "nan", "inf" or "1_000"
_TRUTH = {"0": False, "1": True, "false": False, "true": True, "0.0": False, "1.0": True}


def label_items(value: Any) -> list[str] | None:
    """One cell as a list of written labels; None where the row has no label."""
    if isinstance(value, list | tuple):
        return [text for item in value if (text := _written(item))]
    text = _written(value)
    return [text] if text else None


def flag_items(values: Sequence[Any], names: Sequence[str], where: str) -> list[str] | None:
    """The names of the 0/1 columns that are 1; None where one of them is empty."""
    chosen = []
    for value, name in zip(values, names, strict=True):
        text = _written(value)
        if not text:
            return None
        if text.lower() not in _TRUTH:
            said = {"column": repr(name), "value": shorten(text)}
            raise DataError(
                t(
                    "{where}: column {column} holds {value}; several label columns must hold 0 "
                    "or 1 each",
                    where=where,
                    **said,
                )
            )
        if _TRUTH[text.lower()]:
            chosen.append(name)
    return chosen


class LabelScan:
    """What the labels of one table look like, gathered row by row in bounded memory."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.too_many = False
        self.lists = False
        self.list_widths: set[int] = set()
        self.separators: set[str] = set()
        self.first_word: str | None = None
        """The first label that is not a number."""
        self.fractional = False
        self._repeats = False

    def add(self, items: list[str], *, is_list: bool) -> None:
        """One row's labels."""
        if is_list:
            self.lists = True
            self.list_widths.add(len(items))
            self._repeats |= len(set(items)) < len(items)
        for item in items:
            if item in self.counts:
                self.counts[item] += 1
                continue
            if len(self.counts) < MOST_CLASSES:
                self.counts[item] = 1
            else:
                self.too_many = True
            self._see(item)

    def _see(self, item: str) -> None:
        self.separators.update(mark for mark in SEPARATORS if mark in item)
        if not NUMBER.fullmatch(item):
            self.first_word = self.first_word or item
        elif not WHOLE.fullmatch(item) and not float(item).is_integer():
            self.fractional = True

    @property
    def multi_hot_width(self) -> int | None:
        """The length of lists such as [0, 1, 0]; a list of names would not repeat one."""
        width = max(self.list_widths, default=0)
        return width if self._repeats and self.fits_multi_hot(width) else None

    def fits_multi_hot(self, width: int) -> bool:
        """Whether every label can be read as a list of this many zeros and ones."""
        return self.list_widths == {width} and self.counts.keys() <= {"0", "1"}


def _written(value: Any) -> str:
    """A label as text; whole floats as the integers they hold; '' for none."""
    if value is None or isinstance(value, dict | bytes):
        return ""
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value).strip()


def shorten(text: str, limit: int = 40) -> str:
    """Quoted for an error message, and never longer than a line."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")
