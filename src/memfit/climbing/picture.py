"""The ladder as a picture: a bar of memory by component for each rung, predicted as a tick.

Drawn for paper and screens alike, dark on white. Chinese needs a font that has it: where the
machine has none the PNG speaks English, and the SVG takes the reader's fonts.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.climbing import show
from memfit.climbing.values import OK, Ladder, Outcome
from memfit.drawing import INK, LIGHT, PAPER, RULE, STYLE, UNUSED, available
from memfit.memory.components import Component, MemoryPeak
from memfit.messages import language, speaking, t
from memfit.safe_text import clean
from memfit.units import GIB, MIB

# Fonts with Chinese, as systems bring them.
CHINESE_FONTS = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Microsoft YaHei", "PingFang SC",
    "SimHei", "WenQuanYi Zen Hei", "Hiragino Sans GB", "Heiti SC", "Noto Sans CJK JP",
)  # fmt: skip
_WIDTH_INCHES, _ROW_INCHES = 9.0, 0.42
_REAL = {INK: LIGHT["ink"], RULE: LIGHT["rule"], PAPER: LIGHT["paper"]}
_TEXT = LIGHT["ink"]


def draw(ladder: Ladder, folder: Path) -> list[Path]:
    """ladder.png and ladder.svg; nothing where matplotlib is missing."""
    if not available():
        return []
    font = chinese_font()
    written = []
    for ending, spoken in (("png", None if font or language() == "en" else "en"), ("svg", None)):
        path = folder / f"ladder.{ending}"
        with speaking(spoken):
            _write(ladder, path, font)
        written.append(path)
    return written


def chinese_font() -> str | None:
    """A font of this machine that has Chinese."""
    from matplotlib.font_manager import fontManager

    there = {font.name for font in fontManager.ttflist}
    return next((name for name in CHINESE_FONTS if name in there), None)


def _style(font: str | None) -> Any:
    style: dict[str, Any] = {key: _REAL.get(value, value) for key, value in STYLE.items()}
    families = ["DejaVu Sans", *([font] if font else [])]
    return {
        **style, "font.family": families, "axes.unicode_minus": False, "svg.hashsalt": "ladder",
        "axes.grid.axis": "x",
    }  # fmt: skip


def _write(ladder: Ladder, path: Path, font: str | None) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    height = 1.5 + _ROW_INCHES * len(ladder.outcomes)
    with rc_context(_style(font)), warnings.catch_warnings():
        # A name in a script no font here has: boxes in the picture, never a failed ladder.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained", facecolor="white")
        axes = figure.subplots()
        _fill(axes, ladder)
        name = clean(Path(ladder.model).name).replace("$", r"\$")
        figure.suptitle(
            t("Peak memory and time of an epoch, {model}", model=name),
            x=0.01,
            ha="left",
            fontsize=12,
            color=_TEXT,
        )
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=144, metadata=metadata)
    if path.suffix == ".svg":
        # The reader may have none of the fonts of this machine.
        text = path.read_text(encoding="utf-8")
        families = "'DejaVu Sans', " + ", ".join(f"'{one}'" for one in CHINESE_FONTS)
        text = text.replace("'DejaVu Sans'", f"{families}, sans-serif")
        path.write_text(text, encoding="utf-8")


def _fill(axes: Any, ladder: Ladder) -> None:
    highest = max([_most(one) for one in ladder.outcomes] + [ladder.budget_bytes or 0, 1])
    unit_bytes, unit = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    shown: dict[str, Any] = {}
    for row, one in enumerate(ladder.outcomes):
        begun = 0.0
        for part, size in _parts(one.measured).items():
            if size > 0:
                bar = axes.barh(row, size / unit_bytes, left=begun, height=0.62, color=LIGHT[part])
                shown.setdefault(part, bar)
                begun += size / unit_bytes
        if one.predicted is not None:
            at = one.predicted.device_bytes / unit_bytes
            (tick,) = axes.plot([at, at], [row - 0.42, row + 0.42], color=_TEXT, linewidth=2.2)
            shown.setdefault("tick", tick)
        axes.annotate(
            _said(ladder, one), (1.01, row), xycoords=("axes fraction", "data"), va="center"
        )
    if ladder.budget_bytes is not None:
        axes.axvline(ladder.budget_bytes / unit_bytes, color=LIGHT["bad"], linestyle="--")
    axes.set_yticks(
        range(len(ladder.outcomes)), [show.name_of(one.rung) for one in ladder.outcomes]
    )
    axes.set_ylim(len(ladder.outcomes) - 0.4, -0.6)
    axes.set_xlim(0, 1.02 * highest / unit_bytes)
    axes.set_xlabel(unit)
    order = [part for part in (*map(str, Component), UNUSED, "tick") if part in shown]
    names = [t("predicted") if one == "tick" else t(show.PARTS[one]) for one in order]
    axes.legend(
        [shown[one] for one in order], names, loc="upper left", bbox_to_anchor=(-0.02, -0.14),
        ncols=len(order), handlelength=1.0, columnspacing=1.2, borderaxespad=0.0,
    )  # fmt: skip


def _said(ladder: Ladder, one: Outcome) -> str:
    """Beside the bar: what it took, or why there is none."""
    if one.status != OK or one.measured is None or one.epoch_seconds is None:
        return show.in_short(one)
    words = show.in_short(one)
    return words if one.score is None else f"{words}; {show.metric_name(ladder)} {one.score:.3f}"


def _most(one: Outcome) -> int:
    return max(
        (peak.device_bytes for peak in (one.predicted, one.measured) if peak is not None), default=0
    )


def _parts(peak: MemoryPeak | None) -> Mapping[str, int]:
    """By component, and what the allocator holds beyond them."""
    if peak is None:
        return {}
    parts = {str(name): size for name, size in peak.components.items() if size > 0}
    return {**parts, UNUSED: peak.device_bytes - sum(parts.values())}
