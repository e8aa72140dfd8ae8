"""Each page is marked with its language, and its sidebar lists the pages of that language.

A Sphinx extension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

CHINESE = "zh/"
_CAPTION = '<p class="caption"'
# After the theme has put the whole table of contents into the sidebar.
_LAST = 900


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("html-page-context", _speak, priority=_LAST)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def complete(app: Any, pages: Mapping[str, str], completed: Callable[[str, Any], str]) -> None:
    """Has Sphinx read these pages as `completed` makes them, each in its language."""

    def read(_app: Any, name: str, source: list[str]) -> None:
        if name in pages:
            source[0] = completed(source[0], pages[name])

    app.connect("source-read", read)


def _speak(_app: Any, name: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    if name.startswith(CHINESE):
        context["language"] = "zh-CN"
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = in_one_language(tree, chinese=name.startswith(CHINESE))


def in_one_language(tree: str, *, chinese: bool) -> str:
    """The parts of a table of contents whose captions are in the page's language."""
    first, *parts = tree.split(_CAPTION)
    return first + "".join(
        f"{_CAPTION}{part}" for part in parts if _is_chinese(part.partition("</p>")[0]) == chinese
    )


def _is_chinese(caption: str) -> bool:
    return any("\u4e00" <= one <= "\u9fff" for one in caption)
