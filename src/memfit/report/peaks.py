"""The report on memory: the peak by component against the budget, and memory over the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit import drawing
from memfit.memory.components import Component, MemoryPeak
from memfit.messages import N_, pt, t
from memfit.report import plots
from memfit.report.story import Adjusted, Story
from memfit.report.terminal import UNUSED, peak_components, percent
from memfit.report.values import Picture, Table, named, number, together
from memfit.results import MemorySummary
from memfit.safe_text import clean
from memfit.units import format_both, format_bytes

MOST_ADJUSTMENTS = 50
SCALE_REACHES = 8
"""A picture's scale ends at the budget, if that is no more than so many times the peak."""
_PEAKS = {"predicted": N_("predicted"), "measured": N_("measured")}


def section(story: Story) -> dict[str, Any] | None:
    """Pictures, sentences and tables; None where nothing is known."""
    peaks = known_peaks(story.summary.memory)
    if not peaks and not story.samples:
        return None
    pictures = []
    if drawing.available():
        pictures += [bars(story.summary.memory)] if peaks else []
        pictures += [over_time(story)] if story.samples else []
    return {
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


def bars(memory: MemorySummary) -> Picture:
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
        said.append(t(which, share=f"{abs(off):.1%}".replace("%", " %")))
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
    return Picture(
        plots.memory_over_time(
            now,
            peak,
            budget_bytes=budget_bytes,
            marks=[float(one.step) for one in story.adjustments],
            name="time",
            label=t(
                "Memory over {steps:,} steps: at most {bytes}",
                steps=int(now[-1][0]),
                bytes=format_bytes(highest_bytes),
            ),
            x_label=t("step"),
        ),
        t("Memory of the whole process over the run") if story.on_cpu else t("Memory over the run"),
        [
            ("series-1", t("in use")),
            ("series-2", t("most until then")),
            *budget_key,
        ],
        t("Dotted lines are adjustments, numbered as in the table.") if story.adjustments else "",
    )


def _adjustments(made: Sequence[Adjusted]) -> Table | None:
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
    return Table(caption, rows, head, numbers=False)
