"""Curves and histograms as SVG that takes its colours and fonts from the page around it."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memfit.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]

MOST_POINTS = 400
"""A curve has no more, so that a long run's page stays small; that is one a pixel."""
_SIZE_INCHES = (4.8, 2.7)  # 460 pixels: two beside each other on a screen, one on a phone

# matplotlib wants a colour now, the page decides it later: these stand for the page's own.
_INK, _RULE = "#a1000f", "#a10010"
_SERIES = ("#a10001", "#a10002", "#a10003", "#a10004")
_PAGE_COLOURS = {
    _INK: "currentColor",
    _RULE: "var(--rule)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(_SERIES, 1)},
}
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: searchable, and in the page's font
    "font.size": 10,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": _INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _RULE,
    "xtick.labelcolor": _INK,
    "ytick.color": _RULE,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}
_OWN_ID = re.compile(r' id="(?![mp][0-9a-f]{8})[^"]*"')
_FONT_FAMILY = re.compile(r"font-family: [^;\"]*;? ?")
_FONT = re.compile(r"font: (?:[a-z0-9]+ )*?([\d.]+)px [^;\"]*")  # all in one before matplotlib 3.11


def curves(series: Mapping[str, Points], *, title: str, x_label: str = "step") -> str:
    """Lines over steps; a single point is drawn as a dot."""
    with _Figure(title) as figure:
        axes: Axes = figure.axes
        for colour, (name, points) in zip(_cycle(len(series)), series.items(), strict=True):
            shown = thin(points)
            marker = "o" if len(shown) <= 12 else None
            x, y = [point[0] for point in shown], [point[1] for point in shown]
            axes.plot(x, y, color=colour, label=name, marker=marker, markersize=3.5)
        axes.set_title(title)
        axes.set_xlabel(x_label)
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter("{x:g}")
        if len(series) > 1:  # below the plot, where it hides no line
            figure.drawing.legend(loc="outside lower center", ncols=4)
    return figure.svg


def histogram(bins: Sequence[tuple[float, float, float]], *, title: str, mark: float | None) -> str:
    """Bars of (first, last, rows), with a line where texts are cut."""
    with _Figure(title) as figure:
        axes: Axes = figure.axes
        axes.bar(
            [first for first, _, _ in bins],
            [rows for _, _, rows in bins],
            width=[last - first + 1 for first, last, _ in bins],
            align="edge",
            color=_SERIES[0],
            edgecolor="none",
        )
        axes.margins(y=0.15)  # room for the words over the bars
        if mark is not None:
            axes.axvline(mark, color=_SERIES[1], linewidth=1.6)
            axes.annotate(
                f" max_length {mark:g}",
                (mark, 1),
                xycoords=("data", "axes fraction"),
                verticalalignment="top",
                color=_SERIES[1],
            )
        axes.set_title(title)
        axes.set_xlabel("tokens")
        axes.set_ylabel("rows")
    return figure.svg


def thin(points: Points) -> list[tuple[float, float]]:
    """At most MOST_POINTS of them, evenly taken, the last always among them."""
    if len(points) <= MOST_POINTS:
        return list(points)
    stride = -(-(len(points) - 1) // (MOST_POINTS - 1))
    return [*points[:-1:stride], points[-1]]


def available() -> bool:
    """Whether plots can be drawn; the page does without."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def _cycle(count: int) -> list[str]:
    return [_SERIES[index % len(_SERIES)] for index in range(count)]


class _Figure:
    """One drawing: `axes` inside the with-block, `svg` after it; no global state is left."""

    def __init__(self, title: str) -> None:
        if not available():
            raise ConfigError("plots need matplotlib; install it with: pip install memfit[report]")
        self.title = title
        self.svg = ""
        self.axes: Any = None
        self.drawing: Any = None

    def __enter__(self) -> _Figure:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        # Element ids are made from the salt; two drawings in one page must not share them.
        self._style = rc_context({**_STYLE, "svg.hashsalt": self.title})
        self._style.__enter__()
        self.drawing = Figure(figsize=_SIZE_INCHES, layout="constrained")
        self.axes = self.drawing.subplots()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                self.svg = _for_page(self._rendered(), self.title)
        finally:
            self._style.__exit__(*error)

    def _rendered(self) -> str:
        out = io.StringIO()
        with warnings.catch_warnings():
            # A metric's Chinese name is not in matplotlib's font, but it is in the page's.
            warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
            self.drawing.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        return out.getvalue()


def _for_page(svg: str, title: str) -> str:
    """Without XML header and foreign ids; with the page's colours and font and a spoken name."""
    from html import escape

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
    return f'{opening} role="img" aria-label="{escape(title, quote=True)}">{rest}'.strip()
