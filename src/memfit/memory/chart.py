"""The timeline's drawing: an SVG that takes its colours and font from the page around it."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from memfit.errors import MemfitError
from memfit.memory.components import Component
from memfit.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From the bottom up: what stays, then what comes and goes.
ORDER = (
    Component.CONTEXT,
    Component.WORKSPACE,
    Component.WEIGHTS,
    Component.OPTIMIZER,
    Component.GRADIENTS,
    Component.ACTIVATIONS,
)
# matplotlib wants a colour now, the page decides it later: these stand for the page's own.
_INK, _RULE, _PAPER = "#a1000f", "#a10010", "#a10011"
_STAND_IN = {component: f"#a1000{number}" for number, component in enumerate(ORDER)}
_PAGE_COLOURS = {
    _INK: "currentColor",
    _RULE: "var(--rule)",
    _PAPER: "var(--paper)",
    **{stand_in: f"var(--{component})" for component, stand_in in _STAND_IN.items()},
}
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: searchable, and in the page's font
    "svg.hashsalt": "memfit",
    "font.size": 10,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _RULE,
    "xtick.labelcolor": _INK,
    "ytick.color": _RULE,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
}
# Names of phases: how many lines they may take, and a letter's width as a share of the axis.
_PHASE_ROWS, _LETTER = 3, 0.0088
_FONT_FAMILY = re.compile(r"font-family: [^;\"]*;? ?")
_FONT = re.compile(r"font: (?:[a-z0-9]+ )*?([\d.]+)px [^;\"]*")  # all in one before matplotlib 3.11


class Moment(Protocol):
    """What is drawn of a moment."""

    @property
    def event(self) -> int: ...
    @property
    def components(self) -> Mapping[Component, int]: ...
    @property
    def module(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...


def draw(
    shown: Sequence[Moment],
    peak: Moment,
    *,
    context_bytes: int,
    budget_bytes: int | None,
    phases: Sequence[tuple[int, str]],
) -> str:
    """Stacked areas over the events, the peak marked."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise MemfitError(
            "a timeline needs matplotlib; install it with: pip install 'memfit[report]'"
        ) from None

    top_bytes = peak.total_bytes + context_bytes
    with rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 4.4), layout="constrained")
        axes: Axes = figure.subplots()
        unit_bytes, unit = (GIB, "GiB") if top_bytes >= GIB else (MIB, "MiB")
        _areas(axes, shown, context_bytes, unit_bytes)
        highest_bytes = max(top_bytes, budget_bytes or 0)
        axes.set_ylim(0, highest_bytes * 1.22 / unit_bytes)
        axes.set_xlim(0, max(shown[-1].event, 1))
        axes.set_xlabel("births and deaths of tensors, in order")
        axes.set_ylabel(unit)
        if budget_bytes is not None:
            axes.axhline(budget_bytes / unit_bytes, color=_INK, linewidth=1.2, linestyle="--")
            axes.annotate(
                f"budget {format_bytes(budget_bytes)}",
                (0.01, budget_bytes / unit_bytes),
                xycoords=("axes fraction", "data"),
                verticalalignment="bottom",
            )
        _mark_peak(axes, peak, context_bytes, top_bytes / unit_bytes, shown[-1].event)
        _mark_phases(axes, phases, shown[-1].event)
        figure.legend(loc="outside lower center", ncols=len(ORDER))
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(out.getvalue())


def _areas(axes: Axes, shown: Sequence[Moment], context_bytes: int, unit_bytes: int) -> None:
    constant = {Component.CONTEXT: context_bytes}
    bands = {
        component: [
            (moment.components.get(component, 0) + constant.get(component, 0)) / unit_bytes
            for moment in shown
        ]
        for component in ORDER
    }
    used = [component for component in ORDER if any(bands[component])]
    axes.stackplot(
        [moment.event for moment in shown],
        [bands[component] for component in used],
        labels=[str(component) for component in used],
        colors=[_STAND_IN[component] for component in used],
        linewidth=0,
    )


def _mark_peak(
    axes: Axes, peak: Moment, context_bytes: int, height: float, last_event: int
) -> None:
    """A dot and its name, on the side that has room for it."""
    # The axis counts the context, so its number does; reserved but unused memory is not drawn.
    size = format_bytes(peak.total_bytes + context_bytes)
    what = " with context" if context_bytes else ""
    left = peak.event < last_event / 2
    axes.plot([peak.event], [height], marker="o", markersize=5, color=_INK, clip_on=False)
    axes.annotate(
        f"peak {size}{what}\n{peak.module or 'outside any module'}",
        (peak.event, height),
        textcoords="offset points",
        xytext=(9 if left else -9, 0),
        horizontalalignment="left" if left else "right",
        verticalalignment="center",
        bbox={"facecolor": _PAPER, "edgecolor": "none", "pad": 1.5},
    )


def _mark_phases(axes: Axes, phases: Sequence[tuple[int, str]], last_event: int) -> None:
    """A line where each begins; a name that would run into the one before goes a line lower."""
    free_from = [0.0] * _PHASE_ROWS
    for event, name in phases:
        axes.axvline(event, color=_INK, linewidth=0.8, linestyle=":")
        width = (len(name) + 2) * _LETTER
        at = event / max(last_event, 1)
        late = at + width > 1  # no room on its right
        begins = max(at - width, 0.0) if late else at
        row = next((row for row, free in enumerate(free_from) if free <= begins), None)
        if row is None:
            continue
        free_from[row] = begins + width
        axes.annotate(
            f"{name} " if late else f" {name}",
            (event, 0.99 - 0.06 * row),
            xycoords=("data", "axes fraction"),
            horizontalalignment="right" if late else "left",
            verticalalignment="top",
        )


def _for_page(svg: str) -> str:
    """Without XML header; with the page's colours, font and width, and a spoken name."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = _FONT_FAMILY.sub("", svg)
    svg = _FONT.sub(r"font-size: \1px", svg)
    for stand_in, colour in _PAGE_COLOURS.items():
        svg = svg.replace(stand_in, colour)
    opening, rest = svg.split(">", 1)
    opening = re.sub(r' (width|height)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-label="Memory over the step, by component">{rest}'.strip()
