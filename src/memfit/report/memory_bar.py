"""Where the memory goes: a bar on the terminal, pictures and tables in the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from memfit.i18n import N_, pt, t
from memfit.memory.components import Component, MemoryPeak
from memfit.printing import clean
from memfit.report import plots
from memfit.report.formatting import UNUSED, Picture, named, together
from memfit.report.terminal import MAX_WIDTH
from memfit.report.view import PeakShown, RunView, peak_components
from memfit.units import format_both, format_bytes, percent, tenths_of_percent

SCALE_REACHES = 8
"""A picture's scale ends at the budget, unless that is more than this many times the peak."""

_PEAKS = {"predicted": N_("predicted"), "measured": N_("measured")}

_ORDER = (*map(str, Component), UNUSED)


# ---- the report ----


def memory_section(view: RunView) -> dict[str, Any] | None:
    """Pictures, sentences and tables; None where nothing is known."""
    if not view.peaks and not view.samples:
        return None
    predicted, measured = view.peaks.get("predicted"), view.peaks.get("measured")
    said = []
    if predicted and measured and measured.device_bytes:
        off = predicted.device_bytes / measured.device_bytes - 1
        which = (
            N_("The prediction was {share} above what was measured.")
            if off >= 0
            else N_("The prediction was {share} below what was measured.")
        )
        said.append(t(which, share=tenths_of_percent(abs(off))))
    if measured and measured.step is not None:
        kind = N_("Measured at step {step:,}; on a CPU the budget counts live tensors.")
        said.append(t(kind, step=measured.step))
    cpu = view.on_cpu
    return {
        "title": pt("heading of a CPU's run", "Memory") if cpu else pt("heading", "Memory"),
        "pictures": pictures(view),
        "verdicts": verdicts(view),
        "sentences": together(said),
        "table": peak_table(view.peaks) if view.peaks else None,
    }


def pictures(view: RunView) -> list[Picture]:
    """The peak by component, and memory over the run: as many as there are figures for."""
    if not plots.available():
        return []
    drawn = [_peak_bars(view)] if view.peaks else []
    return drawn + ([_over_time(view)] if view.samples else [])


def verdicts(view: RunView) -> list[tuple[str, bool]]:
    """A sentence on each peak, and whether it is too much."""
    said = []
    for name, peak in view.peaks.items():
        kind = N_("{title}: {bytes} at the peak")
        if peak.over_bytes > 0:
            kind = N_("{title}: {bytes} at the peak, {over} over the budget of {budget}")
        elif peak.share is not None:
            kind = N_("{title}: {bytes} at the peak, {share} of the budget of {budget}")
        sentence = t(
            kind,
            title=t(_PEAKS[name]).capitalize(),
            bytes=format_bytes(peak.device_bytes),
            over=format_bytes(peak.over_bytes),
            share=percent(peak.share or 0.0),
            budget=format_both(peak.budget_bytes or 0),
        )
        said.append((sentence, peak.over_bytes > 0))
    return said


def _peak_bars(view: RunView) -> Picture:
    """Predicted above measured, by component, with the budget as a line."""
    bars = {
        f"{t(_PEAKS[name])} {format_bytes(peak.device_bytes)}": peak.components
        for name, peak in view.peaks.items()
    }
    used = [name for name in _ORDER if any(parts.get(name) for parts in bars.values())]
    highest_bytes = max(peak.device_bytes for peak in view.peaks.values())
    budget_bytes, budget_key = _budget_line(view, highest_bytes)
    svg = plots.memory_bars(
        {name: {one: parts[one] for one in used if one in parts} for name, parts in bars.items()},
        budget_bytes,
        name="bars",
        label="; ".join(text for text, _ in verdicts(view)),
    )
    keys = [(name, named("component", name)) for name in used]
    return Picture(svg, t("The peak by component"), keys + budget_key)


def _budget_line(view: RunView, highest_bytes: int) -> tuple[int | None, list[tuple[str, str]]]:
    """The budget as it is drawn, and its key; on its scale a small peak could not be seen."""
    budget = view.summary.memory.budget_bytes
    if not budget:
        return None, []
    near = budget <= SCALE_REACHES * highest_bytes
    kind = N_("budget {bytes}") if near else N_("budget {bytes}, beyond the scale")
    key = t(kind, bytes=format_both(budget))
    return (budget if near else None), [("dashes" if near else "none", key)]


def _over_time(view: RunView) -> Picture:
    """What the allocator held, the context on top; on a CPU the process."""
    extra = view.context_bytes
    now = [(float(one.step), float(one.now_bytes + extra)) for one in view.samples]
    peak = [(float(one.step), float(one.peak_bytes + extra)) for one in view.samples]
    highest_bytes = int(max(value for _, value in (*now, *peak)))
    budget_bytes, budget_key = _budget_line(view, highest_bytes)
    if view.on_cpu:  # there the budget counts tensors, not what the process holds
        budget_bytes, budget_key = None, []
    lines = [plots.Line(t("in use"), now, 0), plots.Line(t("most until then"), peak, 1)]
    chart = plots.memory_over_time(
        *lines,
        budget_bytes=budget_bytes,
        marks=[float(one.step) for one in view.adjustments],
        name="time",
        label=t(
            "Memory over {steps:,} steps: at most {bytes}",
            steps=int(now[-1][0]),
            bytes=format_bytes(highest_bytes),
        ),
        x_label=t("step"),
    )
    return Picture(
        chart.svg,
        t("Memory of the whole process over the run") if view.on_cpu else t("Memory over the run"),
        [*((line.css, line.name) for line in lines), *budget_key],
        t("Dotted lines are adjustments, numbered as in the table.") if view.adjustments else "",
        json.dumps(chart.hover, ensure_ascii=False),
    )


def peak_table(peaks: Mapping[str, PeakShown]) -> dict[str, Any]:
    """Bytes by component, a column a peak, and their sums."""
    rows: list[dict[str, Any]] = [
        {
            "name": named("component", name),
            "css": name,
            "cells": [
                format_bytes(size) if (size := peak.components.get(name)) else "–"
                for peak in peaks.values()
            ],
        }
        for name in _ORDER
        if any(peak.components.get(name) for peak in peaks.values())
    ]
    sums = {
        t("allocated"): [peak.peak.allocated_bytes for peak in peaks.values()],
        pt("component", "on the device"): [peak.device_bytes for peak in peaks.values()],
    }
    rows += [
        {"name": name, "css": "", "cells": [format_bytes(size) for size in sizes]}
        for name, sizes in sums.items()
    ]
    module = clean(next((one.peak.module for one in peaks.values() if one.peak.module), ""))
    caption = (
        t("Bytes by what they are for; the peak is in {module}", module=module)
        if module
        else t("Bytes by what they are for")
    )
    return {"caption": caption, "columns": [t(_PEAKS[name]) for name in peaks], "rows": rows}


# ---- the terminal ----

# One glyph each, so that the bar also reads without colours and in a log file.
COMPONENT_STYLES: Mapping[str, tuple[str, str, str]] = {
    Component.WEIGHTS: ("blue", "█", "W"),
    Component.GRADIENTS: ("yellow", "▓", "G"),
    Component.OPTIMIZER: ("green", "▒", "O"),
    Component.ACTIVATIONS: ("red", "░", "A"),
    Component.WORKSPACE: ("magenta", "▚", "S"),
    Component.CONTEXT: ("bright_black", "▞", "C"),
    UNUSED: ("white", "▤", "R"),
}


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """A stacked bar by component, against the budget where there is one."""

    components: Mapping[str, int]
    budget_bytes: int | None = None
    title: str = ""

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        width, total = min(options.max_width, MAX_WIDTH), sum(self.components.values())
        line = Text.assemble((self.title or t("Memory"), "bold"), "  ")
        if not self.budget_bytes:
            yield line.append(format_bytes(total))
        else:
            both = {"bytes": format_bytes(total), "budget": format_both(self.budget_bytes)}
            over = total - self.budget_bytes
            share = percent(total / self.budget_bytes)
            if over > 0:
                line.append(t("{bytes} of {budget}, ", **both))
                line.append(t("{bytes} too much", bytes=format_bytes(over)), style="bold red")
            else:
                line.append(t("{bytes} of {budget}, {share}", **both, share=share))
            yield line
        yield self._bar(width, ascii_only=options.ascii_only)
        line = Text()
        for name, size in self.components.items():  # side by side, broken between them
            style, glyph = _style(name, options.ascii_only)
            words = f" {named('component', name)} {format_bytes(size)}"
            item = Text.assemble((glyph, style), words)
            if line and line.cell_len + 3 + item.cell_len > width:
                yield line
                line = Text()
            line = Text.assemble(line, " " * 3, item) if line else item
        yield line

    def _bar(self, width: int, *, ascii_only: bool) -> Text:
        total = sum(self.components.values())
        scale = max(total, self.budget_bytes or 0, 1)
        cells = width - 1  # the last cell is the edge, or the budget's mark
        bar, begun, sum_bytes = Text(), 0, 0
        for name, size in self.components.items():
            sum_bytes += size
            style, glyph = _style(name, ascii_only)
            end = round(sum_bytes / scale * cells)
            bar.append(glyph * (end - begun), style=style)
            begun = end
        bar.append(("." if ascii_only else "·") * (cells - begun), style="dim")
        bar.append("|" if ascii_only else "│")
        if self.budget_bytes and self.budget_bytes < total:
            mark = round(self.budget_bytes / scale * cells)
            bar = Text.assemble(bar[:mark], ("|" if ascii_only else "┃", "bold"), bar[mark + 1 :])
        return bar


def _style(name: str, ascii_only: bool) -> tuple[str, str]:
    style, glyph, letter = COMPONENT_STYLES.get(name, ("white", "▨", "?"))
    return style, letter if ascii_only else glyph


def memory_bar(
    used: MemoryPeak | Mapping[Component, int], budget_bytes: int | None = None, *, title: str = ""
) -> MemoryBar:
    """A stacked bar of where the memory goes; of a peak with what is reserved and unused."""
    parts = peak_components(used) if isinstance(used, MemoryPeak) else used
    shown = {str(name): size for name, size in parts.items() if size > 0}
    return MemoryBar(shown, budget_bytes, title)
