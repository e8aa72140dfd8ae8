"""The report's drawings: lines over steps, memory, lengths; names and legends are the page's.

Only numbers and short words stand in a drawing. matplotlib knows no Chinese and would lay out a
legend too narrow; the page does that, and it breaks lines on a phone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memfit.drawing import COMPONENTS, INK, SERIES, UNUSED, Drawing
from memfit.units import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]

MOST_POINTS = 400
"""A curve has no more, so that a long run's page stays small; that is one a pixel."""
MOST_MARKS = 40
_SIZE_INCHES = (4.5, 2.6)  # letters of 11 pixels on a phone, 15 beside another on a screen


def curves(series: Sequence[Points], *, name: str, label: str, x_label: str) -> str:
    """Lines over steps; a few points are drawn as dots as well."""
    with Drawing(name, label, _SIZE_INCHES) as drawing:
        axes: Axes = drawing.axes
        for number, points in enumerate(series):
            shown = thin(points)
            x, y = [point[0] for point in shown], [point[1] for point in shown]
            marker = "o" if len(shown) <= 12 else None
            colour = SERIES[number % len(SERIES)]
            axes.plot(x, y, color=colour, marker=marker, markersize=3.5)
        axes.set_xlabel(x_label)
        _whole_steps(axes, series)
        axes.yaxis.set_major_formatter("{x:g}")
    return drawing.svg


def memory_bars(
    bars: Mapping[str, Mapping[str, int]], budget_bytes: int | None, *, name: str, label: str
) -> str:
    """One stacked bar a row, by component, and a line where the budget ends."""
    highest = max([sum(parts.values()) for parts in bars.values()] + [budget_bytes or 0, 1])
    unit_bytes, unit = _unit(highest)
    with Drawing(name, label, (_SIZE_INCHES[0], 0.9 + 0.72 * len(bars))) as drawing:
        axes: Axes = drawing.axes
        for row, (title, parts) in enumerate(bars.items()):
            begun = 0.0
            for component, size in parts.items():
                colour = COMPONENTS.get(component, COMPONENTS[UNUSED])
                axes.barh(-row, size / unit_bytes, left=begun, height=0.5, color=colour)
                begun += size / unit_bytes
            axes.annotate(title, (0, -row + 0.32), verticalalignment="bottom")
        if budget_bytes is not None:
            axes.axvline(budget_bytes / unit_bytes, color=INK, linewidth=1.8, linestyle="--")
        axes.set_ylim(0.45 - len(bars), 0.85)
        axes.set_xlim(0, 1.03 * highest / unit_bytes)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(visible=True, axis="x")
        axes.set_xlabel(unit)
    return drawing.svg


def memory_over_time(
    now: Points,
    peak: Points,
    *,
    budget_bytes: int | None,
    marks: Sequence[float],
    name: str,
    label: str,
    x_label: str,
) -> str:
    """Bytes over steps: the area is what was in use, the line the most until then.

    `marks` are the steps of adjustments; they are numbered as in the page's table.
    """
    highest = max([value for _, value in (*now, *peak)] + [budget_bytes or 0, 1])
    unit_bytes, unit = _unit(highest)
    used, most = thin(now, highest=True), thin(peak, highest=True)
    with Drawing(name, label, _SIZE_INCHES) as drawing:
        axes: Axes = drawing.axes
        x, y = [point[0] for point in used], [point[1] / unit_bytes for point in used]
        axes.fill_between(x, y, color=SERIES[0], alpha=0.25, linewidth=0)
        axes.plot(x, y, color=SERIES[0], marker="o" if len(x) == 1 else None)
        x, y = [point[0] for point in most], [point[1] / unit_bytes for point in most]
        axes.plot(x, y, color=SERIES[1])
        if budget_bytes is not None:
            axes.axhline(budget_bytes / unit_bytes, color=INK, linewidth=1.8, linestyle="--")
        axes.set_ylim(0, 1.15 * highest / unit_bytes)
        axes.set_xlabel(x_label)
        axes.set_ylabel(unit)
        _whole_steps(axes, [now])
        for number, step in enumerate(marks[:MOST_MARKS], 1):
            axes.axvline(step, color=INK, linewidth=1, linestyle=":")
            axes.annotate(
                str(number), (step, 1), xycoords=("data", "axes fraction"),
                horizontalalignment="center", verticalalignment="bottom", annotation_clip=False,
            )  # fmt: skip
    return drawing.svg


def histogram(
    bins: Sequence[tuple[float, float, float]],
    *,
    mark: float | None,
    name: str,
    label: str,
    x_label: str,
    y_label: str,
) -> str:
    """Bars of (first, last, rows), with a line where texts are cut."""
    with Drawing(name, label, _SIZE_INCHES) as drawing:
        axes: Axes = drawing.axes
        axes.bar(
            [first for first, _, _ in bins],
            [rows for _, _, rows in bins],
            width=[last - first + 1 for first, last, _ in bins],
            align="edge",
            color=SERIES[0],
            edgecolor="none",
        )
        if mark is not None:
            axes.axvline(mark, color=SERIES[1], linewidth=1.8, linestyle="--")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
    return drawing.svg


def thin(points: Points, *, highest: bool = False) -> list[tuple[float, float]]:
    """At most MOST_POINTS of them, evenly taken, the last always among them.

    With `highest` each is the highest of its stretch: no peak gets lost.
    """
    if len(points) <= MOST_POINTS:
        return list(points)
    stride = -(-(len(points) - 1) // (MOST_POINTS - 1))
    if not highest:
        return [*points[:-1:stride], points[-1]]
    stretches = (points[begin : begin + stride] for begin in range(0, len(points), stride))
    return [(part[-1][0], max(value for _, value in part)) for part in stretches]


def _whole_steps(axes: Axes, series: Sequence[Points]) -> None:
    """From 0 to the last step; none of them is a half."""
    from matplotlib.ticker import MaxNLocator

    last = max((points[-1][0] for points in series if points), default=1)
    axes.set_xlim(0, max(last, 1) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))


def _unit(highest_bytes: float) -> tuple[int, str]:
    if highest_bytes >= GIB:
        return GIB, "GiB"
    return (MIB, "MiB") if highest_bytes >= MIB else (1, "B")
