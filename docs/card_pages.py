"""The pages on cards list what cards.toml knows of each: figures, sources and how sure they are.

A Sphinx extension: it puts the tables where the pages `cards` mark them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from languages import complete

from memfit.i18n import Language
from memfit.memory.cards import CardPlace, facts, find_card
from memfit.units import GIB, MIB

PAGES: dict[str, Language] = {"cards": "en", "zh/cards": "zh"}
CARDS, GENERATIONS, SOURCES = "<!-- cards -->", "<!-- generations -->", "<!-- sources -->"
_HEADS: dict[str, dict[Language, tuple[str, ...]]] = {
    CARDS: {
        "en": ("card", "GiB in all", "usable, Linux", "usable, Windows", "context, MiB",
               "tensor cores", "sources"),
        "zh": ("显卡", "总共 GiB", "Linux 可用", "Windows 可用", "上下文 MiB", "张量核心", "来源"),
    },
    GENERATIONS: {
        "en": ("generation", "from", "bf16", "flash attention", "Triton", "torch", "sources"),
        "zh": ("代", "起于", "bf16", "flash attention", "Triton", "torch", "来源"),
    },
    SOURCES: {"en": ("source", "says"), "zh": ("来源", "说法")},
}  # fmt: skip
_WORDS: dict[Language, tuple[str, str, str]] = {
    "en": ("yes", "no", "any"),
    "zh": ("有", "没有", "都可以"),
}


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    complete(app, PAGES, completed)
    return {"parallel_read_safe": True}


def completed(text: str, spoken: Language) -> str:
    """The page with the tables where they are marked."""
    rows = {CARDS: _cards(spoken), GENERATIONS: _generations(spoken), SOURCES: _sources()}
    for mark, made in rows.items():
        text = text.replace(mark, _table(_HEADS[mark][spoken], made))
    return text


def _cards(spoken: Language) -> Iterable[Sequence[str]]:
    yes, no, _ = _WORDS[spoken]
    for name, row in facts()["cards"].items():
        linux, windows = (find_card(name, CardPlace(windows=one)) for one in (False, True))
        low, high = linux.context_low_bytes / MIB, linux.context_bytes / MIB
        told = [row[one] for one in ("gib_from", "context_from") if one in row]
        yield (
            name,
            f"{row['gib']:.2f}",
            f"{linux.usable_bytes / GIB:.2f}",
            f"{windows.usable_bytes / GIB:.2f}",
            f"{high:.0f}" if linux.measured else f"{low:.0f}–{high:.0f}",
            yes if linux.matrix_units else no,
            ", ".join(dict.fromkeys(["spec", *told])),
        )


def _generations(spoken: Language) -> Iterable[Sequence[str]]:
    yes, no, every = _WORDS[spoken]
    for name, row in facts()["generations"].items():
        torch = f"{row['wheel']}, ≤ {row['last_torch']}" if "wheel" in row else every
        abilities = (yes if row[one] else no for one in ("bf16", "flash", "triton"))
        yield name, ".".join(map(str, row["first"])), *abilities, torch, ", ".join(row["from"])


def _sources() -> Iterable[Sequence[str]]:
    for name, says in facts()["sources"].items():
        address, _, rest = says.partition(" ")
        linked = says.startswith("https://")
        yield name, f"[{address.removeprefix('https://')}]({address}) {rest}" if linked else says


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
