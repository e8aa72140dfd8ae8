"""Lines of a width for text that may be Chinese: a character of it is two cells wide.

Chinese has no spaces, so a line may end after any of its characters, but none begins with a
closing mark or ends with an opening one. Without rich, since `--help` waits for nothing.
"""

from __future__ import annotations

import re
import unicodedata

_NOT_FIRST = "，。；：、！？）》」』”’…"
_NOT_LAST = "（《「『“‘"
# A run of spaces; a wide character with the marks that belong to it; a word of narrow ones.
_WIDE = (
    "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6"
)
_UNIT = re.compile(rf"\s+|[{_NOT_LAST}]*(?:[{_WIDE}]|[^\s{_WIDE}]+)[{_NOT_FIRST}]*")


def cells(text: str) -> int:
    """How many columns a text takes in a terminal."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def wrap(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` cells; only a word wider than that is cut."""
    lines, line = list[str](), ""
    for unit in _UNIT.findall(text):
        if cells(line + unit.rstrip()) <= width:
            line += unit
            continue
        if line.strip():
            lines.append(line.rstrip())
        line = unit.lstrip()
        while cells(line) > width:
            kept = _prefix(line, width)
            lines.append(kept)
            line = line[len(kept) :]
    if line.strip():
        lines.append(line.rstrip())
    return lines


def _prefix(text: str, width: int) -> str:
    """As much of it as fits, and at least one character."""
    for end in range(1, len(text) + 1):
        if cells(text[:end]) > width:
            return text[: max(end - 1, 1)]
    return text
