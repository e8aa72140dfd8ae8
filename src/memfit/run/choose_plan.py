"""Chooses the plan of a run: the one given, the one it was begun by, or the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config import RunConfig
from memfit.errors import DoesNotFitError, TraceError
from memfit.i18n import language, t
from memfit.records.results import RunFolder
from memfit.units import Budget, format_bytes

if TYPE_CHECKING:
    from memfit.planner.plan import Checked, Plan
    from memfit.planner.task import Task

_SETTINGS = "settings"


@dataclass(frozen=True, kw_only=True)
class PlanSource:
    """Where the plan of a run comes from."""

    config: RunConfig
    folder: RunFolder
    given: Plan | None = None
    """A plan given in Python."""
    named: Mapping[str, Any] = field(default_factory=dict)
    """The plan that run.toml names, with a digest of the settings it was made for."""
    checkpoint: Path | None = None
    """The checkpoint a resumed run goes on from."""


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """A plan, and what there is to say about it."""

    plan: Plan | None
    """None where memory cannot be predicted and no budget was promised."""
    notes: tuple[str, ...] = ()
    cached: bool = False
    """Whether an earlier run of the same task made it."""


def choose_plan(source: PlanSource, task: Task) -> ChosenPlan:
    """Returns the plan for the task."""
    from memfit.planner.plan import Plan

    try:
        if source.checkpoint is not None and source.folder.plan.is_file():
            return ChosenPlan(plan=_plan_of_resumed(source, task))
        if source.given is not None:
            return ChosenPlan(plan=_fitting(source.given, task, t("the plan given")))
        if (path := source.config.plan) is not None:
            return ChosenPlan(plan=_fitting(Plan.read(Path(path)), task, path))
        why = ""
        if source.named:
            named = _plan_of_settings(source, task)
            if not isinstance(named, str):
                return ChosenPlan(plan=named)
            why = t("planned anew, not by [plan] of the settings: {why}", why=named)
        made = _made(source, task)
        return replace(made, notes=(*([why] if why else []), *made.notes))
    except TraceError as error:
        if task.budget != Budget():
            raise  # a promise that cannot be checked is not made
        note = t("memory cannot be predicted: {error}", error=error)
        return ChosenPlan(plan=None, notes=(note,))


def _made(source: PlanSource, task: Task) -> ChosenPlan:
    """The one call of the planner for a new plan."""
    from memfit.planner.search import plan_for

    found = plan_for(task, folder=source.folder.path)
    notes = tuple(note.sentence(language()) for note in found.notes)
    return ChosenPlan(plan=found.chosen, notes=notes, cached=found.cached)


def _plan_of_settings(source: PlanSource, task: Task) -> Plan | str:
    """The plan of the run that is run again, or why it is not for this task."""
    from memfit.planner.cache import cached_plan
    from memfit.planner.plan import Plan, changes, check, digest_of

    tables = dict(source.named)
    same_settings = tables.pop(_SETTINGS, "") == source.config.settings_digest()
    plan = Plan.from_tables(tables, "[plan]")
    # What is free for `auto` is never the same twice.
    now = replace(digest_of(task), budget_bytes=plan.digest.budget_bytes)
    if not same_settings:
        return t("other settings")
    if changed := list(changes(plan.digest, now)):
        return "; ".join(changed)
    cached = cached_plan(task)
    wanted = (plan.strategies, plan.micro_batching)
    if cached is not None and (cached.strategies, cached.micro_batching) == wanted:
        return cached
    checked = check(plan, task)
    return checked.plan if checked.fits else does_not_fit_sentence(checked, "[plan]")


def _fitting(plan: Plan, task: Task, name: str) -> Plan:
    from memfit.planner.plan import check

    checked = check(plan, task)
    if not checked.fits:
        raise DoesNotFitError(does_not_fit_sentence(checked, name))
    return checked.plan


def _plan_of_resumed(source: PlanSource, task: Task) -> Plan:
    """The plan it was begun by; where it no longer fits, with smaller micro-batches."""
    from memfit.planner.plan import Plan, check
    from memfit.planner.search import plan_for
    from memfit.strategies import FullySharded
    from memfit.training.checkpoints import recorded_micro_batching

    plan = Plan.read(source.folder.plan)
    if task.ranks == 1:  # checkpoints are whole, however many ranks wrote them
        alone = tuple(one for one in plan.strategies if not isinstance(one, FullySharded))
        plan = replace(plan, strategies=alone)
    stored = source.folder.config
    if (
        source.checkpoint is not None
        and stored.is_file()
        and RunConfig.from_toml(stored).budget == source.config.budget
        and (recorded := recorded_micro_batching(source.checkpoint)) is not None
    ):
        plan = replace(plan, micro_batching=recorded)
    checked = check(plan, task)
    return checked.plan if checked.fits else plan_for(task, strategies=plan.strategies).chosen


def naming(config: RunConfig, plan: Plan | None) -> RunConfig:
    """The settings with the plan that was made for them, so that a rerun trains by it."""
    if plan is None or config.plan is not None:
        return config
    return replace(config, named_plan={_SETTINGS: config.settings_digest(), **plan.tables()})


def does_not_fit_sentence(checked: Checked, name: str) -> str:
    """By how much a plan misses the budget, and what has changed since it was made."""
    price = checked.plan.price
    assert price is not None
    sentence = t(
        "{name} does not fit: it needs {needs} and the budget is {budget}, so "
        "{missing} are missing; make a new one with memfit plan",
        name=name,
        needs=format_bytes(price.device_bytes),
        budget=format_bytes(checked.plan.digest.budget_bytes),
        missing=format_bytes(checked.missing_bytes),
    )
    return f"{sentence} ({'; '.join(checked.changed)})" if checked.changed else sentence
