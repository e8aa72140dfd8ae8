"""The report's drawings, in one look: colours by day and night, and matplotlib's style.

A drawing is an SVG inside a page and takes its colours and font from there. matplotlib wants a
colour now, so stand-ins are drawn with, and `var(--…)` takes their place at the end.

Only numbers and short words stand in a drawing. matplotlib knows no Chinese and would lay out a
legend too narrow; the page does that, and it breaks lines on a phone.
"""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from memfit.errors import MemfitError
from memfit.i18n import language, t
from memfit.memory.components import Component
from memfit.report.formatting import UNUSED
from memfit.units import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PALETTE = {
    "paper": ("#ffffff", "#14181d"),
    "ink": ("#1c2127", "#e6e9ed"),
    "quiet": ("#56606b", "#9ea8b3"),
    "rule": ("#d5dae0", "#39424c"),
    "panel": ("#f5f7f9", "#1c2229"),
    "edge": ("#7a848f", "#7d8894"),
    "good": ("#0a6b4d", "#4fc79f"),
    "bad": ("#b3261e", "#ff8a80"),
    "series-1": ("#0b66b0", "#62b0f4"),
    "series-2": ("#b64707", "#f09a5b"),
    "series-3": ("#0a7f5c", "#4fc79f"),
    "series-4": ("#8a4fa3", "#c795dd"),
    "weights": ("#2f7fc1", "#4a97d6"),
    "gradients": ("#e3a008", "#e0ac2b"),
    "optimizer": ("#1a9b73", "#35b088"),
    "activations": ("#d4622a", "#e07a45"),
    "workspace": ("#b0609a", "#c47fb0"),
    "context": ("#8a939c", "#78828c"),
    "unused": ("#c3cad1", "#4b5560"),
    "shade": ("11 102 176", "74 151 214"),
}
"""A colour by day and by night."""

LIGHT = {name: day for name, (day, _) in _PALETTE.items()}

DARK = {name: night for name, (_, night) in _PALETTE.items()}

INK, RULE, PAPER = "#a1000f", "#a10010", "#a10011"

SERIES = ("#a10001", "#a10002", "#a10003", "#a10004")

_DASHES = (("", "-"), ("dashed", "--"), ("dotted", ":"))
"""After four colours the lines are dashed, then dotted: a CSS class and matplotlib's style."""

COMPONENTS: Mapping[str, str] = {
    name: f"#a1002{number}" for number, name in enumerate([*map(str, Component), UNUSED])
}

_PAGE_COLOURS = {
    INK: "currentColor",
    RULE: "var(--rule)",
    PAPER: "var(--paper)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES, 1)},
    **{colour: f"var(--{name})" for name, colour in COMPONENTS.items()},
}

STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: searchable, and in the page's font
    "font.size": 10,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": RULE,
    "xtick.labelcolor": INK,
    "ytick.color": RULE,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}

_OWN_ID = re.compile(r' id="(?![mp][0-9a-f]{8})[^"]*"')

_FONT_FAMILY = re.compile(r"font-family: [^;\"]*;? ?")

_FONT = re.compile(r"font: (?:[a-z0-9]+ )*?([\d.]+)px [^;\"]*")  # all in one before matplotlib 3.11


def palette_css() -> str:
    """The colours as variables: by the system's setting, by the page's own, and on paper."""
    light, dark = (_variables(colours) for colours in (LIGHT, DARK))
    return (
        f":root {{ color-scheme: light; {light} }}\n"
        "@media screen and (prefers-color-scheme: dark) {\n"
        f'  :root:not([data-theme="light"]) {{ color-scheme: dark; {dark} }}\n}}\n'
        f'@media screen {{ :root[data-theme="dark"] {{ color-scheme: dark; {dark} }} }}\n'
    )


def scoped_palette_css(scope: str, *dark_scopes: str) -> str:
    """The palette for a part of another page, whose dark mode these selectors match."""
    night = ", ".join(f"{dark} {scope}" for dark in dark_scopes)
    return f"{scope} {{ {_variables(LIGHT)} }}\n{night} {{ {_variables(DARK)} }}\n"


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def available() -> bool:
    """Whether anything can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass
class Drawing:
    """A figure with one pair of axes, and what became of it."""

    figure: Any
    axes: Any
    svg: str = ""
    frame: Mapping[str, list[float]] = field(default_factory=dict)
    """Where the axes lie in the drawing, and from where to where they reach."""


@contextmanager
def drawing_of(name: str, label: str, size_inches: tuple[float, float]) -> Iterator[Drawing]:
    """Draws on the `axes` inside the block; `svg` and `frame` are there after it.

    `name` tells it apart from others in the page, `label` is what a screen reader says. No global
    state is left.
    """
    if not available():
        raise MemfitError("drawings need matplotlib; install it with: pip install 'memfit[report]'")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Element ids are made from the salt; two drawings in one page must not share them.
    with rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size_inches, layout="constrained")
        made = Drawing(figure, figure.subplots())
        yield made
        out = io.StringIO()
        with warnings.catch_warnings():
            # A Chinese word is not in matplotlib's font, but it is in the page's.
            warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
            figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        made.svg = _for_page(out.getvalue(), label)
        place = made.axes.get_position()
        width, height = (72 * inches for inches in size_inches)  # an SVG's unit is a point
        box = (place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height)
        made.frame = {
            "box": [round(value, 1) for value in box],
            "x": [_short(value) for value in made.axes.get_xlim()],
            "y": [_short(value) for value in made.axes.get_ylim()],
        }


def _for_page(svg: str, label: str) -> str:
    """Without XML header and foreign ids; with the page's colours and font and a spoken name."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = _FONT.sub(r"font-size: \1px", _FONT_FAMILY.sub("", _OWN_ID.sub("", svg)))
    for stand_in, colour in _PAGE_COLOURS.items():
        svg = svg.replace(stand_in, colour)
    # The page sets the width; a fixed height would leave a gap on a phone.
    opening, rest = svg.split(">", 1)
    opening = re.sub(r' (width|height)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-label="{escape(label, quote=True)}">{rest}'.strip()


P = ParamSpec("P")

R = TypeVar("R")


def _drawn_once(draw: Callable[P, R]) -> Callable[P, R]:
    """Draws a picture again only if what it shows has changed: one takes about 0.1 s.

    A live page is drawn every few seconds.
    """
    last: dict[Any, tuple[str, R]] = {}

    @functools.wraps(draw)
    def drawn(*args: P.args, **named: P.kwargs) -> R:
        shown = repr((args, named, language()))
        name = named["name"]
        if name not in last or last[name][0] != shown:
            last[name] = shown, draw(*args, **named)
        return last[name][1]

    return drawn


Points = Sequence[tuple[float, float]]

MOST_POINTS = 400
"""A curve has no more, so that a long run's page stays small; that is one a pixel."""

MOST_MARKS = 40

_SIZE_INCHES = (4.5, 2.6)  # letters of 11 pixels on a phone, 15 beside another on a screen


@dataclass(frozen=True, slots=True)
class Line:
    """A curve: its points, its name, and its number, which gives it colour and dashes."""

    name: str
    points: Points
    number: int

    @property
    def css(self) -> str:
        """The classes of its swatch."""
        return f"series-{self.number % len(SERIES) + 1} {_DASHES[self._dash][0]}".strip()

    @property
    def _dash(self) -> int:
        return self.number // len(SERIES) % len(_DASHES)

    @property
    def look(self) -> dict[str, Any]:
        """For matplotlib."""
        style = _DASHES[self._dash][1]
        return {"color": SERIES[self.number % len(SERIES)], "linestyle": style}


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing with the values a pointer over it asks for."""

    svg: str
    hover: Mapping[str, Any]


@_drawn_once
def line_chart(
    lines: Sequence[Line],
    *,
    name: str,
    label: str,
    x_label: str,
    steps_per_epoch: float | None = None,
    best: float | None = None,
    by_epoch: bool = False,
    until: float = 0.0,
) -> Chart:
    """Lines over steps, epochs above them; a few points are drawn as dots, the best as a star.

    `by_epoch` the points are over epochs already. The axis ends at the last point or at `until`.
    """
    with drawing_of(name, label, _SIZE_INCHES) as drawing:
        axes: Axes = drawing.axes
        for line in lines:
            shown = thin(line.points)
            x, y = [point[0] for point in shown], [point[1] for point in shown]
            marker = "o" if len(shown) <= 12 else None
            axes.plot(x, y, marker=marker, markersize=3.5, **line.look)
        if best is not None:
            axes.axvline(best, color=INK, linewidth=0.8, alpha=0.5)
            for line in lines:
                star = [value for step, value in line.points if step == best][-1:]
                axes.plot(
                    [best] * len(star), star, marker="*", markersize=11, color=line.look["color"],
                    markeredgecolor=PAPER, markeredgewidth=0.8, zorder=3,
                )  # fmt: skip
        axes.set_xlabel(x_label)
        _from_zero(axes, [*(line.points for line in lines), [(until, 0.0)]], whole=not by_epoch)
        axes.yaxis.set_major_formatter("{x:g}")
        if all(value >= 0 for line in lines for _, value in line.points):
            axes.set_ylim(bottom=max(axes.get_ylim()[0], 0))  # no loss and no metric is below 0
        if epoch := steps_per_epoch:
            from matplotlib.ticker import FuncFormatter, MaxNLocator

            scales = (lambda step: step / epoch, lambda number: number * epoch)
            above = axes.secondary_xaxis("top", functions=scales)
            above.xaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 5, 10]))
            above.xaxis.set_major_formatter(
                FuncFormatter(lambda at, _: t("epoch {number}", number=f"{at:g}") if at > 0 else "")
            )
            above.tick_params(length=3)
    return Chart(drawing.svg, _hover(drawing, lines, steps_per_epoch))


def _hover(
    drawing: Drawing, lines: Sequence[Line], steps_per_epoch: float | None, unit: str = ""
) -> dict[str, Any]:
    """What the page's script needs to say the values under a pointer."""
    return {
        **drawing.frame,
        "unit": unit,
        "epoch": steps_per_epoch,
        "lines": [
            {
                "name": line.name,
                "css": line.css,
                "points": [[_short(x), _short(y)] for x, y in thin(line.points)],
            }
            for line in lines
        ],
    }


def _short(value: float) -> float:
    """Six digits: more than a pixel shows."""
    return float(f"{value:.6g}")


@_drawn_once
def memory_bars(
    bars: Mapping[str, Mapping[str, int]], budget_bytes: int | None, *, name: str, label: str
) -> str:
    """One stacked bar a row, by component, and a line where the budget ends."""
    highest = max([sum(parts.values()) for parts in bars.values()] + [budget_bytes or 0, 1])
    unit_bytes, unit = _unit(highest)
    with drawing_of(name, label, (_SIZE_INCHES[0], 0.9 + 0.72 * len(bars))) as drawing:
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


@_drawn_once
def memory_over_time(
    now: Line,
    peak: Line,
    *,
    budget_bytes: int | None,
    marks: Sequence[float],
    name: str,
    label: str,
    x_label: str,
) -> Chart:
    """Bytes over steps: the area is what was in use, the line the most until then.

    `marks` are the steps of adjustments; they are numbered as in the page's table.
    """
    highest = max([value for _, value in (*now.points, *peak.points)] + [budget_bytes or 0, 1])
    unit_bytes, unit = _unit(highest)
    used, most = (
        replace(one, points=[(x, y / unit_bytes) for x, y in thin(one.points, highest=True)])
        for one in (now, peak)
    )
    with drawing_of(name, label, _SIZE_INCHES) as drawing:
        axes: Axes = drawing.axes
        x, y = [point[0] for point in used.points], [point[1] for point in used.points]
        axes.fill_between(x, y, color=used.look["color"], alpha=0.25, linewidth=0)
        axes.plot(x, y, marker="o" if len(x) == 1 else None, **used.look)
        x, y = [point[0] for point in most.points], [point[1] for point in most.points]
        axes.plot(x, y, **most.look)
        if budget_bytes is not None:
            axes.axhline(budget_bytes / unit_bytes, color=INK, linewidth=1.8, linestyle="--")
        axes.set_ylim(0, 1.15 * highest / unit_bytes)
        axes.set_xlabel(x_label)
        axes.set_ylabel(unit)
        _from_zero(axes, [now.points])
        for number, step in enumerate(marks[:MOST_MARKS], 1):
            axes.axvline(step, color=INK, linewidth=1, linestyle=":")
            axes.annotate(
                str(number), (step, 1), xycoords=("data", "axes fraction"),
                horizontalalignment="center", verticalalignment="bottom", annotation_clip=False,
            )  # fmt: skip
    return Chart(drawing.svg, _hover(drawing, [used, most], None, unit))


@_drawn_once
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
    with drawing_of(name, label, _SIZE_INCHES) as drawing:
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


def _from_zero(axes: Axes, series: Sequence[Points], *, whole: bool = True) -> None:
    """From 0 to the last point; where only `whole` steps are, none is a half."""
    from matplotlib.ticker import MaxNLocator

    last = max((points[-1][0] for points in series if points), default=1)
    axes.set_xlim(0, (max(last, 1) if whole else last) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=whole, steps=[1, 2, 5, 10]))


def _unit(highest_bytes: float) -> tuple[int, str]:
    if highest_bytes >= GIB:
        return GIB, "GiB"
    return (MIB, "MiB") if highest_bytes >= MIB else (1, "B")
