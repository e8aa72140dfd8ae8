"""Makes text safe to print, and wraps it by its width in a terminal.

File names, column names, labels and texts come from anywhere. Everything a command prints goes
through `printable`, everything it writes about itself through `without_tokens`.

Chinese has no spaces, so a line may end after any of its characters, but no line begins with a
closing mark or ends with an opening one. Rich knows the widths; it is imported when a text is
measured, since help in English measures none.
"""

from __future__ import annotations

import codecs
import os
import re
import unicodedata
from typing import Any

# Characters that turn text around or hide it: a terminal is not the place to find out.
_BIDI = {chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F)}

_ACTING = ("Cc", "Zl", "Zp", "Cs")

_TOKENS = (
    re.compile(r"\b(hf_|api_org_)[A-Za-z0-9]{16,}"),
    re.compile(r"\b(ms-)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"),
    re.compile(r"(://)[^/\s:@]*:[^/\s@]+(?=@)"),
)

_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MODELSCOPE_API_TOKEN", "WANDB_API_KEY")

_SHORTEST_TOKEN = 8

_FAILING = ("strict", "backslashreplace")

_STAND_INS = dict(zip("→↓…–—·²│┃━█▓▒░▚▞▤", ">v.--.2||-#%+:/\\=", strict=True))


def encodable(stream: Any) -> None:
    """From here on a character the stream cannot hold becomes a plain one, never an error."""
    if getattr(stream, "errors", "") in _FAILING and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="memfit")


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    """An old console lacks arrows and Chinese: as many plain characters take their place."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_STAND_INS.get(char, "?") for char in lacking), error.end


codecs.register_error("memfit", _stand_in)


def clean(text: object) -> str:
    """On one line: control and direction characters become spaces."""
    return "".join(" " if _acts(char) else char for char in str(text))


def printable(text: object) -> str:
    """Cleans a text like `clean`, but keeps its lines, and removes tokens."""
    return without_tokens("\n".join(clean(line) for line in str(text).split("\n")))


def without_tokens(text: str) -> str:
    """Access tokens, by their form or because the environment holds them, become dots."""
    for name in _TOKEN_VARIABLES:
        token = os.environ.get(name, "")
        if len(token) >= _SHORTEST_TOKEN:
            text = text.replace(token, "…")
    for form in _TOKENS:
        text = form.sub(r"\1…", text)
    return text


def escaped_json(text: str) -> str:
    """JSON whose strings hold no character that acts: written as JSON's own escapes."""
    return "".join(f"\\u{ord(char):04x}" if char != "\n" and _acts(char) else char for char in text)


def _acts(char: str) -> bool:
    # Most text is ASCII; asking for the category of each letter would take ten times as long.
    if " " <= char <= "~":
        return False
    return char in _BIDI or unicodedata.category(char) in _ACTING


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
