"""A plan on a terminal: the decisions, the memory bar, and what else could be done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.messages import language, t
from memfit.report.terminal import memory_bar, peak_components
from memfit.report.ways import difference_in_words, settings_in_words
from memfit.units import format_both, format_bytes, format_seconds

if TYPE_CHECKING:
    from memfit.planner.alternatives import Alternatives
    from memfit.planner.plan import Plan
    from memfit.planner.search import Planning
    from memfit.planning import RunSeconds

_SAID_ELSEWHERE = ("memory",)
"""Decisions that the bar shows."""


def plan_view(
    planning: Planning, other: Alternatives | None, seconds: RunSeconds, model: str
) -> RenderableType:
    """All of it, from what is decided to what else could be done."""
    parts: list[RenderableType] = [
        _headline(planning.chosen, model),
        Text(_total(seconds)),
        Text(),
        _bar(planning.chosen, t("planned.peak")),
        *_section(t("planned.decisions"), _decisions(planning.chosen)),
    ]
    if planning.candidates:
        parts += [Text(), Text(t("planned.next"), style="bold"), _others(planning)]
    if other is not None:
        chosen = planning.chosen.price
        assert chosen is not None
        spoken = language()
        allowed = [one.decision(chosen).sentence(spoken) for one in other.allow]
        parts += _section(t("planned.allow"), allowed)
        more = [other.more.decision(chosen).sentence(spoken)] if other.more is not None else []
        parts += _section(t("planned.more"), more)
        smaller = [one.decision().sentence(spoken) for one in other.smaller]
        parts += _section(t("planned.smaller"), smaller)
    notes = [one.sentence(language()) for one in planning.notes]
    parts += _section(t("planned.notes"), notes)
    figures = t(
        "planned.figures",
        seconds=format_seconds(planning.seconds),
        considered=f"{planning.considered:,}",
        traced=planning.traced,
    )
    return Group(*parts, Text(), Text(figures, style="dim"))


def smallest_view(smallest: Plan) -> RenderableType:
    """The plan that comes nearest to a budget nothing fits."""
    return Group(
        _bar(smallest, t("planned.peak.smallest")),
        *_section(t("planned.decisions"), _decisions(smallest)),
    )


def _headline(plan: Plan, model: str) -> Text:
    on_cpu = plan.digest.card == "cpu"
    sentence = t(
        "planned.headline",
        model=model,
        card=t("planned.cpu") if on_cpu else plan.digest.card,
        budget=format_both(plan.digest.budget_bytes),
        fidelity=t(f"planned.fidelity.{plan.fidelity}"),
    )
    return Text(sentence, style="bold")


def _total(seconds: RunSeconds) -> str:
    total = format_seconds(seconds.total)
    if not seconds.evaluations:
        return t("planned.total.alone", total=total)
    return t(
        "planned.total",
        total=total,
        training=format_seconds(seconds.training),
        evaluation=format_seconds(seconds.evaluation),
        count=seconds.evaluations,
    )


def _bar(plan: Plan, title: str) -> RenderableType:
    assert plan.price is not None
    return memory_bar(peak_components(plan.price.peak), plan.digest.budget_bytes, title=title)


def _decisions(plan: Plan) -> list[str]:
    return [
        one.sentence(language()) for one in plan.decisions if one.message not in _SAID_ELSEWHERE
    ]


def _section(title: str, sentences: Iterable[str]) -> Iterator[RenderableType]:
    """A heading and one line each; nothing where there is nothing to say."""
    said = list(sentences)
    if not said:
        return
    lines = Table.grid(padding=(0, 1))
    lines.add_column()
    lines.add_column(overflow="fold")
    for sentence in said:
        lines.add_row("-", Text(sentence))
    yield Text()
    yield Text(title, style="bold")
    yield lines


def _others(planning: Planning) -> RenderableType:
    chosen = settings_in_words(planning.chosen)
    shown = Table(box=None, pad_edge=False)
    heads = ("step", "memory", "fidelity", "differs")
    for name in heads:
        right = name in ("step", "memory")
        title = Text(t(f"planned.next.{name}"), style="dim")
        shown.add_column(title, justify="right" if right else "left", overflow="fold")
    for plan in planning.candidates:
        assert plan.price is not None
        shown.add_row(
            _step_time(plan.price.step_seconds),
            format_bytes(plan.price.device_bytes),
            str(plan.fidelity),
            Text(difference_in_words(settings_in_words(plan), chosen)),
        )
    return Padding(shown, (0, 0))


def _step_time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
