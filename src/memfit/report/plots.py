"""The report's drawings, in one look: colours by day and night, and matplotlib's style.

A drawing is an SVG inside a page and takes its colours and font from there. matplotlib wants a
colour now, so stand-ins are drawn with, and `var(--…)` takes their place at the end.

Only numbers and short words stand in a drawing. matplotlib knows no Chinese and would lay out a
legend too narrow; the page does that, and it breaks lines on a phone.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from memfit.errors import MemfitError
from memfit.memory.components import Component
from memfit.text import t
from memfit.units import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNUSED = "unused"
"""What the allocator holds beyond the components."""

LIGHT: Mapping[str, str] = {
    "paper": "#ffffff",
    "ink": "#1c2127",
    "quiet": "#56606b",
    "rule": "#d5dae0",
    "panel": "#f5f7f9",
    "edge": "#7a848f",
    "good": "#0a6b4d",
    "bad": "#b3261e",
    "series-1": "#0b66b0",
    "series-2": "#b64707",
    "series-3": "#0a7f5c",
    "series-4": "#8a4fa3",
    "weights": "#2f7fc1",
    "gradients": "#e3a008",
    "optimizer": "#1a9b73",
    "activations": "#d4622a",
    "workspace": "#b0609a",
    "context": "#8a939c",
    "unused": "#c3cad1",
    "shade": "11 102 176",
}

DARK: Mapping[str, str] = {
    "paper": "#14181d",
    "ink": "#e6e9ed",
    "quiet": "#9ea8b3",
    "rule": "#39424c",
    "panel": "#1c2229",
    "edge": "#7d8894",
    "good": "#4fc79f",
    "bad": "#ff8a80",
    "series-1": "#62b0f4",
    "series-2": "#f09a5b",
    "series-3": "#4fc79f",
    "series-4": "#c795dd",
    "weights": "#4a97d6",
    "gradients": "#e0ac2b",
    "optimizer": "#35b088",
    "activations": "#e07a45",
    "workspace": "#c47fb0",
    "context": "#78828c",
    "unused": "#4b5560",
    "shade": "74 151 214",
}

INK, RULE, PAPER = "#a1000f", "#a10010", "#a10011"

SERIES = ("#a10001", "#a10002", "#a10003", "#a10004")

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
    """The same for a part of somebody else's page, whose night is told by selectors."""
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


class Drawing:
    """One drawing: `axes` inside the with-block, `svg` after it; no global state is left.

    `name` tells it apart from others in the page, `label` is what a screen reader says.
    """

    def __init__(self, name: str, label: str, size_inches: tuple[float, float]) -> None:
        if not available():
            raise MemfitError(
                t("drawings need matplotlib; install it with: pip install 'memfit[report]'")
            )
        self.name, self.label, self.size_inches = name, label, size_inches
        self.svg = ""
        self.axes: Any = None
        self.figure: Any = None

    def __enter__(self) -> Drawing:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        # Element ids are made from the salt; two drawings in one page must not share them.
        self._style = rc_context({**STYLE, "svg.hashsalt": self.name})
        self._style.__enter__()
        self.figure = Figure(figsize=self.size_inches, layout="constrained")
        self.axes = self.figure.subplots()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                self.svg = _for_page(self._rendered(), self.label)
        finally:
            self._style.__exit__(*error)

    def _rendered(self) -> str:
        out = io.StringIO()
        with warnings.catch_warnings():
            # A Chinese word is not in matplotlib's font, but it is in the page's.
            warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
            self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        return out.getvalue()


def _for_page(svg: str, label: str) -> str:
    """Without XML header and foreign ids; with the page's colours and font and a spoken name."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = _OWN_ID.sub("", svg)
    svg = _FONT_FAMILY.sub("", svg)
    svg = _FONT.sub(r"font-size: \1px", svg)
    for stand_in, colour in _PAGE_COLOURS.items():
        svg = svg.replace(stand_in, colour)
    # The page sets the width; a fixed height would leave a gap on a phone.
    opening, rest = svg.split(">", 1)
    opening = re.sub(r' (width|height)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-label="{escape(label, quote=True)}">{rest}'.strip()


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
