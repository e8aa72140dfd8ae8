"""Lines of a width for text that may be Chinese: a character of it is two cells wide.

Chinese has no spaces, so a line may end after any of its characters, but none begins with a
closing mark or ends with an opening one. Rich knows the widths; it is imported when a text is
measured, since help in English measures none.
"""

from __future__ import annotations

import re

_NOT_FIRST = "，。；：、！？）》」』”’…"
_NOT_LAST = "（《「『“‘"
# A run of spaces; a wide character with the marks that belong to it; a word of narrow ones.
_WIDE = (
    "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6"
)
_UNIT = re.compile(rf"\s+|[{_NOT_LAST}]*(?:[{_WIDE}]|[^\s{_WIDE}]+)[{_NOT_FIRST}]*")


def cells(text: str) -> int:
    """Returns how many columns a text takes in a terminal."""
    from rich.cells import cell_len

    return cell_len(text)


def wrap(text: str, width: int) -> list[str]:
    """Returns the text in lines of at most `width` cells; only a word wider than that is cut."""
    from rich.cells import chop_cells

    width = max(width, 1)
    lines, line = list[str](), ""
    for unit in _UNIT.findall(text):
        if cells(line + unit.rstrip()) <= width:
            line += unit
            continue
        if line.strip():
            lines.append(line.rstrip())
        *full, line = [part for part in chop_cells(unit.lstrip(), width) if part] or [""]
        lines += full
    if line.strip():
        lines.append(line.rstrip())
    return lines
