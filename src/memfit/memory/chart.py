"""The timeline's drawing: an SVG that takes its colours and font from the page around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from memfit.drawing import COMPONENTS, INK, PAPER, Drawing
from memfit.memory.components import Component
from memfit.messages import t
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
# Names of phases: how many lines they may take, and a letter's width as a share of the axis.
_PHASE_ROWS, _LETTER = 3, 0.0088


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
    top_bytes = peak.total_bytes + context_bytes
    with Drawing("memfit", t("Memory over the step, by component"), (9.6, 4.4)) as drawing:
        axes: Axes = drawing.axes
        unit_bytes, unit = (GIB, "GiB") if top_bytes >= GIB else (MIB, "MiB")
        _areas(axes, shown, context_bytes, unit_bytes)
        highest_bytes = max(top_bytes, budget_bytes or 0)
        axes.set_ylim(0, highest_bytes * 1.22 / unit_bytes)
        axes.set_xlim(0, max(shown[-1].event, 1))
        axes.set_xlabel(t("births and deaths of tensors, in order"))
        axes.set_ylabel(unit)
        if budget_bytes is not None:
            axes.axhline(budget_bytes / unit_bytes, color=INK, linewidth=1.2, linestyle="--")
            axes.annotate(
                t("budget {bytes}", bytes=format_bytes(budget_bytes)),
                (0.01, budget_bytes / unit_bytes),
                xycoords=("axes fraction", "data"),
                verticalalignment="bottom",
            )
        _mark_peak(axes, peak, context_bytes, top_bytes / unit_bytes, shown[-1].event)
        _mark_phases(axes, phases, shown[-1].event)
        drawing.figure.legend(loc="outside lower center", ncols=len(ORDER))
    return drawing.svg


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
        colors=[COMPONENTS[component] for component in used],
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
    axes.plot([peak.event], [height], marker="o", markersize=5, color=INK, clip_on=False)
    axes.annotate(
        f"peak {size}{what}\n{peak.module or 'outside any module'}",
        (peak.event, height),
        textcoords="offset points",
        xytext=(9 if left else -9, 0),
        horizontalalignment="left" if left else "right",
        verticalalignment="center",
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5},
    )


def _mark_phases(axes: Axes, phases: Sequence[tuple[int, str]], last_event: int) -> None:
    """A line where each begins; a name that would run into the one before goes a line lower."""
    free_from = [0.0] * _PHASE_ROWS
    for event, name in phases:
        axes.axvline(event, color=INK, linewidth=0.8, linestyle=":")
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
