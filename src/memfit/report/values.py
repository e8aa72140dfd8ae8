"""Numbers, names and figures as the page's template takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.messages import has, t
from memfit.safe_text import clean


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing with what stands beside it; `legend` is (css class, name)."""

    svg: str
    caption: str
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; the first cell of each is its name. Without a head it is a list of facts."""

    caption: str
    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    numbers: bool = True
    """Whether all cells but the first are numbers."""


def number(value: object) -> str:
    """A value for a table: thousands separated, floats short, nothing as a dash."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return t("report.yes") if value else t("report.no")
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else clean(value)


def together(sentences: Sequence[str]) -> str:
    """One after the other; Chinese ones follow without a space."""
    return " ".join(sentences).replace("。 ", "。")


def named(group: str, name: str) -> str:
    """What a person calls it, where there is a word for it; else its own name."""
    message = f"report.{group}.{name}"
    return t(message) if has(message) else clean(name).replace("_", " ")
