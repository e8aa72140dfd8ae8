"""A plan on a terminal: the decisions, the memory bar, and what else could be done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.i18n import language, pt, t
from memfit.report.formatting import FIDELITY_SENTENCES, named
from memfit.report.memory_bar import memory_bar
from memfit.units import format_both, format_bytes, format_seconds, step_time

if TYPE_CHECKING:
    from memfit.planner.advice import Alternatives
    from memfit.planner.plan import Decision, Plan
    from memfit.planner.search import Planning
    from memfit.records.results import RunSeconds


def settings_in_words(plan: Plan) -> dict[str, str]:
    """Every strategy of a plan by its name, and how its batches are cut."""
    said = {one.name: one.in_words() for one in plan.strategies}
    tokens = plan.micro_batching.max_tokens
    if tokens is not None:
        said["micro_batching"] = t("micro-batches of {tokens} tokens", tokens=f"{tokens:,}")
    return said


def difference_in_words(these: Mapping[str, str], those: Mapping[str, str]) -> str:
    """What one plan does that another does not, then what it leaves."""
    more = [words for name, words in these.items() if those.get(name) != words]
    less = [t("without {what}", what=those[name]) for name in those if name not in these]
    return pt("clauses", ", ").join([*more, *less])


_SAID_ELSEWHERE = ("memory",)
"""Decisions that the bar shows."""


def plan_view(
    planning: Planning,
    other: Alternatives | None,
    seconds: RunSeconds,
    model: str,
    *,
    planned_seconds: float,
) -> RenderableType:
    """All of it, from what is decided to what else could be done.

    `planned_seconds` is what the user waited for it, which is more than the search.
    """
    parts: list[RenderableType] = [
        _headline(planning.chosen, model),
        Text(_total(seconds)),
        Text(),
        _bar(planning.chosen, t("Highest moment of the run")),
        *_section(t("Decisions"), _decisions(planning.chosen)),
    ]
    if planning.candidates:
        parts += [Text(), Text(t("Other plans that fit"), style="bold"), _others(planning)]
    if other is not None:
        chosen = planning.chosen.price
        assert chosen is not None
        spoken = language()
        allowed = [one.decision(chosen).sentence(spoken) for one in other.allow]
        parts += _section(t("What more permission would reach"), allowed)
        more = [other.more.decision(chosen).sentence(spoken)] if other.more is not None else []
        parts += _section(t("What more budget would buy"), more)
        smaller = [one.decision().sentence(spoken) for one in other.smaller]
        parts += _section(t("Smaller models of the family"), smaller)
    parts += _notes(planning.notes)
    figures = t(
        "planned in {seconds}: {considered} ways priced, {traced} traced in full",
        seconds=format_seconds(planned_seconds),
        considered=f"{planning.considered:,}",
        traced=planning.traced,
    )
    return Group(*parts, Text(), Text(figures, style="dim"))


def smallest_view(smallest: Plan, notes: Iterable[Decision]) -> RenderableType:
    """The plan that comes nearest to a budget nothing fits."""
    return Group(
        _bar(smallest, t("The smallest plan found")),
        *_section(t("Decisions"), _decisions(smallest)),
        *_notes(notes),
    )


def _on_cpu(plan: Plan) -> bool:
    return plan.digest.card == "cpu"


def _headline(plan: Plan, model: str) -> Text:
    ranks, card = plan.digest.ranks, t("this CPU") if _on_cpu(plan) else plan.digest.card
    if ranks > 1 and _on_cpu(plan):
        card = t("each of {ranks} processes on this CPU", ranks=ranks)
    elif ranks > 1:
        card = t("each of {ranks} x {card}", ranks=ranks, card=card)
    sentence = t(
        "{model} on {card}, budget {budget}: {fidelity}",
        model=model,
        card=card,
        budget=format_both(plan.digest.budget_bytes),
        fidelity=t(FIDELITY_SENTENCES[str(plan.fidelity)]),
    )
    return Text(sentence, style="bold")


def _total(seconds: RunSeconds) -> str:
    total = format_seconds(seconds.total)
    if not seconds.evaluations:
        return t("{total} in all, of training", total=total)
    return t(
        "{total} in all: {training} of training, {evaluation} of {count} evaluations",
        total=total,
        training=format_seconds(seconds.training),
        evaluation=format_seconds(seconds.evaluation),
        count=seconds.evaluations,
    )


def _bar(plan: Plan, title: str) -> RenderableType:
    assert plan.price is not None
    return memory_bar(plan.price.peak, plan.digest.budget_bytes, title=title)


def _decisions(plan: Plan) -> list[str]:
    return [one.sentence(language()) for one in plan.decisions if one.about not in _SAID_ELSEWHERE]


def _notes(notes: Iterable[Decision]) -> Iterator[RenderableType]:
    return _section(t("Notes"), [one.sentence(language()) for one in notes])


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
    memory = t("memory") if _on_cpu(planning.chosen) else pt("of a GPU", "memory")
    for title in (pt("per step", "step"), memory):
        shown.add_column(Text(title, style="dim"), justify="right", overflow="fold")
    for title in (t("fidelity"), t("differs by")):
        shown.add_column(Text(title, style="dim"), overflow="fold")
    for plan in planning.candidates:
        assert plan.price is not None
        shown.add_row(
            step_time(plan.price.step_seconds),
            format_bytes(plan.price.device_bytes),
            named("fidelity", str(plan.fidelity)),
            Text(difference_in_words(settings_in_words(plan), chosen)),
        )
    return Padding(shown, (0, 0))
