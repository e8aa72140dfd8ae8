"""Every public name is on the reference page: those it does not place are added at its end.

A Sphinx extension.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import memfit

PAGE = "reference"
# The errors have a section that lists them all.
_ELSEWHERE = {"__version__", "MemfitError"}


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("source-read", _complete)
    return {"parallel_read_safe": True}


def _complete(_app: Any, name: str, source: list[str]) -> None:
    if name == PAGE:
        source[0] = completed(source[0])


def completed(text: str) -> str:
    """The page with the names it lacks."""
    placed = set(re.findall(r":: memfit\.(\w+)\n", text))
    lacking = [one for one in memfit.__all__ if one not in placed | _ELSEWHERE]
    if not lacking:
        return text
    blocks = "\n".join(f".. {_directive(one)}:: memfit.{one}\n" for one in lacking)
    return f"{text}\n## More\n\n```{{eval-rst}}\n{blocks}```\n"


def _directive(name: str) -> str:
    return "autoclass" if inspect.isclass(getattr(memfit, name)) else "autofunction"
