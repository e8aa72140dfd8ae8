"""Memory over a training step as one HTML page: by component, with the peak and what holds it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from memfit.drawing import palette_css
from memfit.memory.allocator import round_request
from memfit.memory.chart import draw
from memfit.memory.components import COMPONENT_NAMES, Component
from memfit.memory.events import Event
from memfit.messages import language, t
from memfit.units import format_bytes

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


def moments(events: Sequence[Event], *, limit: int = MOST_POINTS) -> list[Moment]:
    """At most `limit` moments, evenly spread: the highest of each stretch, so the peak is in."""
    stride = max(1, -(-len(events) // limit))
    live = dict.fromkeys(Component, 0)
    kept: list[Moment] = []
    highest = total = 0
    for index, event in enumerate(events):
        nbytes = _nbytes(event) * (1 if event.birth else -1)
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
        groups.setdefault(key, []).append(_nbytes(event))
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
    shown = moments(events)
    peak = max(shown, key=lambda moment: moment.total_bytes)
    chart = draw(shown, peak, context_bytes=context_bytes, budget_bytes=budget_bytes, phases=phases)
    figures = {t("highest use of tensors"): peak.total_bytes}
    if reserved_bytes is not None:
        figures[t("reserved for them")] = reserved_bytes
    if context_bytes:
        figures[t("of the device")] = context_bytes + (reserved_bytes or peak.total_bytes)
    if budget_bytes is not None:
        figures[t("budget")] = budget_bytes
    page = Template(
        resources.files("memfit.memory").joinpath("timeline.html").read_text(encoding="utf-8")
    ).substitute(
        lang={"en": "en", "zh": "zh-Hans"}[language()],
        busy=escape(t("At work at the peak:")),
        by_component=escape(t("At the peak, by component")),
        held_by=escape(t("What holds it")),
        component=escape(t("component")),
        made_by=escape(t("made by")),
        blocks=escape(t("blocks")),
        memory=escape(t("memory")),
        share=escape(t("share")),
        palette=palette_css(),
        title=escape(title or t("Memory over the training step")),
        lead=escape(
            lead or t("Every tensor from its birth to its death, in the order they happen.")
        ),
        figures="\n".join(_figure(name, value) for name, value in figures.items()),
        at_work=escape(peak.module or t("no module")),
        chart=chart,
        components=_component_rows(peak, context_bytes),
        holders=_holder_rows(holders(events, peak.event), peak.total_bytes + context_bytes),
    )
    written = Path(path)
    written.write_text(page, encoding="utf-8")
    return written


def _figure(name: str, nbytes: int) -> str:
    return f"<li><b>{format_bytes(nbytes)}</b><span>{escape(name)}</span></li>"


def _component_rows(peak: Moment, context_bytes: int) -> str:
    sizes = {**peak.components, Component.CONTEXT: context_bytes}
    whole = sum(sizes.values())
    return "\n".join(
        f"<tr><td>{_swatch(component)}</td>{_numbers(nbytes, whole)}</tr>"
        for component, nbytes in sorted(sizes.items(), key=lambda item: -item[1])
        if nbytes
    )


def _holder_rows(found: Sequence[Holder], whole: int) -> str:
    rows = [
        f"<tr><td>{_swatch(holder.component)}</td><td><code>{escape(holder.module or '–')}</code>"
        f'</td><td class="number">{holder.blocks}</td>{_numbers(holder.nbytes, whole)}</tr>'
        for holder in found[:MOST_HOLDERS]
    ]
    rest = found[MOST_HOLDERS:]
    if rest:
        blocks, nbytes = sum(h.blocks for h in rest), sum(h.nbytes for h in rest)
        others = escape(t("{count} others", count=len(rest)))
        rows.append(
            f'<tr><td></td><td>{others}</td><td class="number">{blocks}</td>'
            f"{_numbers(nbytes, whole)}</tr>"
        )
    return "\n".join(rows)


def _swatch(component: Component) -> str:
    style = f"background: var(--{component})"
    return f'<span class="swatch" style="{style}"></span>{escape(t(COMPONENT_NAMES[component]))}'


def _numbers(nbytes: int, whole: int) -> str:
    return (
        f'<td class="number">{format_bytes(nbytes)}</td>'
        f'<td class="number">{nbytes / whole:.1%}</td>'
    )


def _nbytes(event: Event) -> int:
    return round_request(event.nbytes) if event.nbytes else 0
