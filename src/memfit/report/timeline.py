"""Memory over a training step as one HTML page: by component, with the peak and what holds it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.i18n import t
from memfit.memory.components import COMPONENT_NAMES, Component, Event
from memfit.report.page import fill
from memfit.report.plots import COMPONENTS, INK, PAPER, drawing_of, palette_css
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


MOST_POINTS = 800
"""The chart has no more, one a pixel; each is the highest moment of the events it stands for."""

MOST_HOLDERS = 15

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Moment:
    """The live bytes by component right after an event."""

    event: int
    components: Mapping[Component, int]
    module: str

    @property
    def total_bytes(self) -> int:
        """All that is allocated."""
        return sum(self.components.values())


@dataclass(frozen=True, slots=True)
class Holder:
    """What modules of one kind hold for one purpose; layers count as one kind."""

    component: Component
    module: str
    blocks: int
    nbytes: int


def draw_timeline(
    shown: Sequence[Moment],
    peak: Moment,
    *,
    context_bytes: int,
    budget_bytes: int | None,
    phases: Sequence[tuple[int, str]],
) -> str:
    """Stacked areas over the events, the peak marked."""
    top_bytes = peak.total_bytes + context_bytes
    with drawing_of("memfit", t("Memory over the step, by component"), (9.6, 4.4)) as drawing:
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
    what = "tensors and context" if context_bytes else "tensors"
    left = peak.event < last_event / 2
    axes.plot([peak.event], [height], marker="o", markersize=5, color=INK, clip_on=False)
    axes.annotate(
        f"{what} {size}\n{peak.module or 'outside any module'}",
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


def moments(events: Sequence[Event], *, limit: int = MOST_POINTS) -> list[Moment]:
    """At most `limit` moments, evenly spread: the highest of each stretch, so the peak is in."""
    stride = max(1, -(-len(events) // limit))
    live = dict.fromkeys(Component, 0)
    kept: list[Moment] = []
    highest = total = 0
    for index, event in enumerate(events):
        nbytes = event.nbytes * (1 if event.birth else -1)
        live[event.component] += nbytes
        total += nbytes
        if index % stride == 0:
            kept.append(Moment(index, dict(live), event.module))
            highest = total
        elif total > highest:
            kept[-1] = Moment(index, dict(live), event.module)
            highest = total
    return kept


def holders(events: Sequence[Event], at: int) -> list[Holder]:
    """What is alive right after event `at`, grouped by purpose and module, largest first."""
    living: dict[int, Event] = {}
    for event in events[: at + 1]:
        if event.birth:
            living[event.block] = event
        else:
            del living[event.block]
    groups: dict[tuple[Component, str], list[int]] = {}
    for event in living.values():
        key = (event.component, _LAYER.sub("*", event.module))
        groups.setdefault(key, []).append(event.nbytes)
    found = [Holder(*key, len(sizes), sum(sizes)) for key, sizes in groups.items()]
    return sorted(found, key=lambda holder: -holder.nbytes)


def write_timeline(
    events: Sequence[Event],
    path: Path | str,
    *,
    title: str | None = None,
    lead: str | None = None,
    context_bytes: int = 0,
    reserved_bytes: int | None = None,
    budget_bytes: int | None = None,
    phases: Sequence[tuple[int, str]] = (),
) -> Path:
    """One self-contained page; `phases` name the stretches that begin at an event."""
    from markupsafe import Markup

    shown = moments(events)
    peak = max(shown, key=lambda moment: moment.total_bytes)
    chart = draw_timeline(
        shown, peak, context_bytes=context_bytes, budget_bytes=budget_bytes, phases=phases
    )
    figures = {t("highest use of tensors"): peak.total_bytes}
    if reserved_bytes is not None:
        figures[t("reserved for them")] = reserved_bytes
    if context_bytes:
        figures[t("of the device")] = context_bytes + (reserved_bytes or peak.total_bytes)
    if budget_bytes is not None:
        figures[t("budget")] = budget_bytes
    sizes = {**peak.components, Component.CONTEXT: context_bytes}
    found = holders(events, peak.event)
    rest = found[MOST_HOLDERS:]
    others = (sum(one.blocks for one in rest), sum(one.nbytes for one in rest))
    page = fill(
        "timeline.html",
        palette=Markup(palette_css()),
        title=title or t("Memory over the training step"),
        lead=lead or t("Every tensor from its birth to its death, in the order they happen."),
        figures=figures,
        at_work=peak.module or t("no module"),
        chart=chart,
        components=sorted((item for item in sizes.items() if item[1]), key=lambda item: -item[1]),
        holders=found[:MOST_HOLDERS],
        rest=(t("{count} others", count=len(rest)), *others) if rest else None,
        whole=sum(sizes.values()),
        named=lambda component: t(COMPONENT_NAMES[component]),
        size=format_bytes,
    )
    written = Path(path)
    written.write_text(page, encoding="utf-8")
    return written
