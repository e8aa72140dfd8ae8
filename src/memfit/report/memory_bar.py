"""The memory bar and the report on memory: the peak by component against the budget."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from memfit.i18n import N_, pt, t
from memfit.memory.components import Component, MemoryPeak
from memfit.printing import clean
from memfit.records.results import MemorySummary
from memfit.report import plots
from memfit.report import plots as drawing
from memfit.report.formatting import PageTable, Picture, named, number, together
from memfit.report.story import Adjusted, Story
from memfit.report.terminal import MAX_WIDTH
from memfit.units import format_both, format_bytes, percent, tenths_of_percent

MOST_ADJUSTMENTS = 50

SCALE_REACHES = 8
"""A picture's scale ends at the budget, unless that is more than this many times the peak."""

_PEAKS = {"predicted": N_("predicted"), "measured": N_("measured")}


def memory_section(story: Story) -> dict[str, Any] | None:
    """Pictures, sentences and tables; None where nothing is known."""
    peaks = known_peaks(story.summary.memory)
    if not peaks and not story.samples:
        return None
    pictures = []
    if drawing.available():
        pictures += [peak_bars(story.summary.memory)] if peaks else []
        pictures += [over_time(story)] if story.samples else []
    return {
        "title": pt("heading of a CPU's run", "Memory")
        if story.on_cpu
        else pt("heading", "Memory"),
        "pictures": pictures,
        "verdicts": verdicts(story.summary.memory),
        "sentences": _sentences(story.summary.memory),
        "table": _table(peaks) if peaks else None,
        "adjustments": _adjustments(story.adjustments),
        "unadjusted": not story.adjustments and story.summary.memory.budget_bytes is not None,
    }


def known_peaks(memory: MemorySummary) -> dict[str, MemoryPeak]:
    """By their names in the page."""
    both = (("predicted", memory.predicted), ("measured", memory.measured))
    return {name: peak for name, peak in both if peak is not None}


def css_name(component: str) -> str:
    """The variable and class of a component's colour."""
    return component if component in set(Component) else drawing.UNUSED


def component_name(component: str) -> str:
    """In words."""
    return named("component", css_name(component))


def peak_bars(memory: MemorySummary) -> Picture:
    """Predicted above measured, by component, with the budget as a line."""
    peaks = known_peaks(memory)
    split = {name: peak_components(peak) for name, peak in peaks.items()}
    titles = {
        name: f"{t(_PEAKS[name])} {format_bytes(peak.device_bytes)}" for name, peak in peaks.items()
    }
    order = [*map(str, Component), UNUSED]
    used = [name for name in order if any(parts.get(name) for parts in split.values())]
    highest_bytes = max(peak.device_bytes for peak in peaks.values())
    budget_bytes, budget_key = _budget_line(memory, highest_bytes)
    return Picture(
        plots.memory_bars(
            {
                titles[name]: {css_name(part): parts[part] for part in used if part in parts}
                for name, parts in split.items()
            },
            budget_bytes,
            name="bars",
            label="; ".join(text for text, _ in verdicts(memory)),
        ),
        t("The peak by component"),
        [*((css_name(name), component_name(name)) for name in used), *budget_key],
    )


def _budget_line(
    memory: MemorySummary, highest_bytes: int
) -> tuple[int | None, list[tuple[str, str]]]:
    """The budget as it is drawn, and its key; on its scale a small peak could not be seen."""
    budget = memory.budget_bytes
    if not budget:
        return None, []
    near = budget <= SCALE_REACHES * highest_bytes
    kind = N_("budget {bytes}") if near else N_("budget {bytes}, beyond the scale")
    key = t(kind, bytes=format_both(budget))
    return (budget if near else None), [("dashes" if near else "none", key)]


def verdicts(memory: MemorySummary) -> list[tuple[str, bool]]:
    """A sentence on each peak, and whether it is too much."""
    said = []
    for name, peak in known_peaks(memory).items():
        fields: dict[str, Any] = {
            "title": t(_PEAKS[name]).capitalize(),
            "bytes": format_bytes(peak.device_bytes),
        }
        budget = memory.budget_bytes
        if not budget:
            said.append((t("{title}: {bytes} at the peak", **fields), False))
            continue
        fields["budget"] = format_both(budget)
        over_bytes = peak.device_bytes - budget
        if over_bytes > 0:
            said.append(
                (
                    t(
                        "{title}: {bytes} at the peak, {over} over the budget of {budget}",
                        over=format_bytes(over_bytes),
                        **fields,
                    ),
                    True,
                )
            )
        else:
            share = percent(peak.device_bytes / budget)
            said.append(
                (
                    t(
                        "{title}: {bytes} at the peak, {share} of the budget of {budget}",
                        share=share,
                        **fields,
                    ),
                    False,
                )
            )
    return said


def _sentences(memory: MemorySummary) -> str:
    said = []
    if memory.predicted and memory.measured and memory.measured.device_bytes:
        off = memory.predicted.device_bytes / memory.measured.device_bytes - 1
        which = (
            N_("The prediction was {share} above what was measured.")
            if off >= 0
            else N_("The prediction was {share} below what was measured.")
        )
        said.append(t(which, share=tenths_of_percent(abs(off))))
    if memory.measured and memory.measured_step is not None:
        said.append(
            t(
                "Measured at step {step:,}; on a CPU the budget counts live tensors.",
                step=memory.measured_step,
            )
        )
    return together(said)


def _table(peaks: Mapping[str, MemoryPeak]) -> dict[str, Any]:
    split = [peak_components(peak) for peak in peaks.values()]
    order = dict.fromkeys([*map(str, Component), *(name for parts in split for name in parts)])
    rows = [
        {
            "name": component_name(name),
            "css": css_name(name),
            "cells": [format_bytes(parts[name]) if name in parts else "–" for parts in split],
        }
        for name in order
        if any(name in parts for parts in split)
    ]
    for title, which in (
        (t("allocated"), "allocated_bytes"),
        (pt("component", "on the device"), "device_bytes"),
    ):
        cells = [format_bytes(getattr(peak, which)) for peak in peaks.values()]
        rows.append({"name": title, "css": "", "cells": cells})
    module = clean(next((peak.module for peak in peaks.values() if peak.module), ""))
    caption = (
        t("Bytes by what they are for; the peak is in {module}", module=module) if module else ""
    )
    return {
        "caption": caption or t("Bytes by what they are for"),
        "columns": [t(_PEAKS[name]) for name in peaks],
        "rows": rows,
    }


def over_time(story: Story) -> Picture:
    """What the allocator held, the context on top; on a CPU the process."""
    memory, extra = story.summary.memory, story.context_bytes
    now = [(float(one.step), float(one.now_bytes + extra)) for one in story.samples]
    peak = [(float(one.step), float(one.peak_bytes + extra)) for one in story.samples]
    highest_bytes = int(max(value for _, value in (*now, *peak)))
    budget_bytes, budget_key = _budget_line(memory, highest_bytes)
    if story.on_cpu:  # there the budget counts tensors, not what the process holds
        budget_bytes, budget_key = None, []
    lines = [plots.Line(t("in use"), now, 0), plots.Line(t("most until then"), peak, 1)]
    chart = plots.memory_over_time(
        *lines,
        budget_bytes=budget_bytes,
        marks=[float(one.step) for one in story.adjustments],
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
        t("Memory of the whole process over the run") if story.on_cpu else t("Memory over the run"),
        [*((line.css, line.name) for line in lines), *budget_key],
        t("Dotted lines are adjustments, numbered as in the table.") if story.adjustments else "",
        json.dumps(chart.hover, ensure_ascii=False),
    )


def _adjustments(made: Sequence[Adjusted]) -> PageTable | None:
    if not made:
        return None
    many = len(made) > MOST_ADJUSTMENTS
    caption = (
        t(
            "What was adjusted while it trained: the first {shown} of {count:,}",
            shown=MOST_ADJUSTMENTS,
            count=len(made),
        )
        if many
        else t("What was adjusted while it trained")
    )
    rows = [
        [str(index), number(one.step), clean(one.why), clean(one.before), clean(one.after)]
        for index, one in enumerate(made[:MOST_ADJUSTMENTS], 1)
    ]
    head = [t("no."), t("step"), pt("adjustment", "why"), t("before"), t("after")]
    return PageTable(caption, rows, head, numbers=False)


# One glyph each, so that the bar also reads without colours and in a log file.
UNUSED = "reserved, unused"

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
        width = min(options.max_width, MAX_WIDTH)
        shown = {name: size for name, size in self.components.items() if size > 0}
        yield self._headline(sum(shown.values()))
        yield self._bar(shown, width, ascii_only=options.ascii_only)
        yield from _flow(self._legend(shown, options.ascii_only), width)

    def _headline(self, total: int) -> Text:
        line = Text.assemble((self.title or t("Memory"), "bold"), "  ")
        if not self.budget_bytes:
            return line.append(format_bytes(total))
        both = {"bytes": format_bytes(total), "budget": format_both(self.budget_bytes)}
        over = total - self.budget_bytes
        if over > 0:
            line.append(t("{bytes} of {budget}, ", **both))
            return line.append(t("{bytes} too much", bytes=format_bytes(over)), style="bold red")
        share = percent(total / self.budget_bytes)
        return line.append(t("{bytes} of {budget}, {share}", **both, share=share))

    def _bar(self, shown: Mapping[str, int], width: int, *, ascii_only: bool) -> Text:
        total = sum(shown.values())
        scale = max(total, self.budget_bytes or 0, 1)
        cells = width - 1  # the last one is the edge, or the budget's mark
        bar, begun, sum_bytes = Text(), 0, 0
        for name, size in shown.items():
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

    def _legend(self, shown: Mapping[str, int], ascii_only: bool) -> Iterator[Text]:
        for name, size in shown.items():
            style, glyph = _style(name, ascii_only)
            called = named("component", "unused" if name == UNUSED else name)
            yield Text.assemble((glyph, style), f" {called} {format_bytes(size)}")


def _style(name: str, ascii_only: bool) -> tuple[str, str]:
    style, glyph, letter = COMPONENT_STYLES.get(name, ("white", "▨", "?"))
    return style, letter if ascii_only else glyph


def _flow(items: Iterator[Text], width: int, gap: int = 3) -> Iterator[Text]:
    """Items side by side, broken between and never inside them."""
    line = Text()
    for item in items:
        if line and line.cell_len + gap + item.cell_len > width:
            yield line
            line = Text()
        line = Text.assemble(line, " " * gap, item) if line else item
    if line:
        yield line


def peak_components(peak: MemoryPeak) -> dict[str, int]:
    """A peak's components and what the allocator holds beyond them: together the device's bytes."""
    parts = {str(name): size for name, size in peak.components.items() if size > 0}
    unused = peak.device_bytes - sum(parts.values())
    return {**parts, UNUSED: unused} if unused > 0 else parts


def memory_bar(
    components: Mapping[Component, int] | Mapping[str, int],
    budget_bytes: int | None = None,
    *,
    title: str = "",
) -> MemoryBar:
    """A stacked bar of where the memory goes."""
    return MemoryBar({str(name): size for name, size in components.items()}, budget_bytes, title)
