"""Plans of earlier runs, kept under everything they follow from.

That is the model's configuration, every row's length, the arguments, the card with its speeds, what
is installed. Budget, context and host memory change from run to run; whether the plan still holds
for them is looked at each time. A file that cannot be read, or whose content is not what is written
here, is as good as none.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import psutil

from memfit.config import files
from memfit.engine.half_on_cpu import half_on_cpu
from memfit.errors import MemfitError
from memfit.i18n import Message, message_of
from memfit.memory.components import MemoryPeak
from memfit.memory.memory_line import MemoryLine
from memfit.memory.tracing.counting import StepCounts
from memfit.planner.plan import Decision, Plan, digest_of
from memfit.planner.price import Price, fits_host
from memfit.planner.task import Task

_VERSION = 5

_NAMES_OF_A_RUN = frozenset({
    "output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "report_to", "project",
    "hub_model_id", "hub_token", "trackio_space_id", "local_rank",
})  # fmt: skip
"""Arguments that say where a run is written or what it is called."""

_MORE_ROOM = 1.1
"""How much more memory there must be before a faster plan is searched for."""

_OTHER_CONTEXT_BYTES = 32 << 20
"""A context may measure a little smaller or larger than it did then."""


def cache_file(task: Task) -> str:
    """The name of a task's plan in the cache folder; another for everything a plan follows from."""
    card = task.card
    given = {one.name: getattr(task, one.name) for one in dataclasses.fields(task)}
    lengths = ",".join(map(str, task.lengths))
    arguments: dict[str, Any] = task.args.to_dict()  # type: ignore[no-untyped-call]
    values = {
        **given,
        "version": _VERSION,
        "config": task.config.to_dict(),
        "lengths": hashlib.sha256(lengths.encode()).hexdigest(),
        "args": {key: one for key, one in arguments.items() if key not in _NAMES_OF_A_RUN},
        "user_set": sorted(task.user_set),
        "card": None if card is None else {**dataclasses.asdict(card), "context_bytes": 0},
        "cpu": [*files.processor(), str(half_on_cpu())] if card is None else None,
        "budget": dataclasses.asdict(task.budget),
        "budget_bytes": None,
        "allow": sorted(task.allow),
        "installed": files.installed_versions(),
    }
    return f"plan-{files.cache_digest(values)}.json"


def cached_plan(task: Task) -> Plan | None:
    """The plan of an earlier run, where it is for this task and still holds.

    Plans are cached by the model's configuration, and a model that was given is more than that.
    """
    is_cached = files.cache_is_used() and task.given is None
    values = files.remembered(cache_file(task)) if is_cached else None
    if values is None:
        return None
    try:
        plan = _plan_from(values, task)
        then = int(values["budget_bytes"]), int(values["context_bytes"])
    except (MemfitError, KeyError, TypeError, ValueError, AttributeError):
        return None
    return plan if _still_holds(plan, *then, task) else None


def write_plan(task: Task, plan: Plan) -> None:
    """Writes it down for the next run, also of the task without what was left free.

    Without its reserve the plan would miss the budget again.
    """
    if task.given is not None:
        return
    tasks = [task]
    if task.reserve_bytes:
        whole_bytes = task.budget_bytes + task.reserve_bytes
        tasks.append(dataclasses.replace(task, reserve_bytes=0, budget_bytes=whole_bytes))
    for one in tasks:
        files.remember(cache_file(one), _values_of(plan, one))
    files.tidy_cache("plan-*.json")


def _still_holds(plan: Plan, then_bytes: int, then_context: int, task: Task) -> bool:
    """Whether planning anew could come to the same.

    The fastest plan inside a budget is the fastest inside any smaller one that it fits.
    """
    price = plan.price
    assert price is not None
    if task.budget.bytes is not None and task.budget_bytes != then_bytes:
        return False
    grown_bytes = _context_bytes(task) - then_context
    if abs(grown_bytes) > _OTHER_CONTEXT_BYTES:
        return False
    needs_bytes = price.device_bytes + max(grown_bytes, 0)
    if not needs_bytes <= task.budget_bytes <= _MORE_ROOM * then_bytes:
        return False
    return fits_host(price.host_bytes, psutil.virtual_memory().available // task.ranks)


def _context_bytes(task: Task) -> int:
    return 0 if task.card is None else task.card.context_bytes


def _values_of(plan: Plan, task: Task) -> dict[str, Any]:
    price = plan.price
    assert price is not None
    return {
        "version": _VERSION,
        "budget_bytes": task.budget_bytes,
        "context_bytes": _context_bytes(task),
        "plan": plan.tables(),
        "price": {
            "peak": dataclasses.asdict(price.peak),
            "phases": {name: dataclasses.asdict(one) for name, one in price.phases.items()},
            "counts": dataclasses.asdict(price.counts),
            "step_seconds": price.step_seconds,
            "host_bytes": price.host_bytes,
            "trainable_parameters": price.trainable_parameters,
        },
        "decisions": [_stored(one) for one in plan.decisions],
        "line": None if plan.line is None else dataclasses.asdict(plan.line),
    }


def _stored(decision: Decision) -> dict[str, Any]:
    """Returns a decision with its sentence in parts, so that it can be shown in any language."""
    said = decision.message
    message = said.as_json() if isinstance(said, Message) else said
    return {"about": decision.about, "message": message, "strategy": decision.strategy}


def _plan_from(values: Mapping[str, Any], task: Task) -> Plan:
    if values["version"] != _VERSION:
        raise ValueError("another version")
    tables = {**values["plan"], "workload": dataclasses.asdict(digest_of(task))}
    read, said, line = Plan.from_tables(tables), values["price"], values["line"]
    price = Price(
        strategies=read.strategies,
        micro_batching=read.micro_batching,
        peak=MemoryPeak.from_json(said["peak"]),
        phases={str(name): MemoryPeak.from_json(one) for name, one in said["phases"].items()},
        counts=StepCounts(**{name: float(one) for name, one in said["counts"].items()}),
        step_seconds=float(said["step_seconds"]),
        host_bytes=int(said["host_bytes"]),
        trainable_parameters=int(said["trainable_parameters"]),
    )
    decisions = tuple(
        Decision(str(one["about"]), message_of(one["message"]), str(one["strategy"]))
        for one in values["decisions"]
    )
    return dataclasses.replace(
        read,
        price=price,
        decisions=decisions,
        args=task.args,
        line=None if line is None else MemoryLine(**{k: float(v) for k, v in line.items()}),
    )
