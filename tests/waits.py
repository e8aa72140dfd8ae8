"""What a command says while it works, told apart from what it has to say."""

from __future__ import annotations

import re

_WAIT = re.compile(r"[a-z][^:]* …|正在[^：]*……|(?:\. ?)+(?:\d+ s)?|")


def without_waits(text: str) -> str:
    """Without the lines of `memfit.waiting`: how many there are is up to the machine."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not _WAIT.fullmatch(line.strip()))
