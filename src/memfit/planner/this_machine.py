"""Plans for the machine at hand: its card or CPU, what is free of it, and its cached plans.

`task_for` says what is to be planned, `choose` plans it, unless that was done before.

A plan is kept under everything it follows from: the model's configuration, every row's length, the
arguments, the card with its speeds, what is installed. Budget, context and host memory change from
run to run; whether the plan still holds for them is looked at each time. A file that cannot be
read, or whose content is not what is written here, is as good as none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from memfit.config import files
from memfit.engine.half_on_cpu import half_on_cpu
from memfit.engine.step_state import preserved_rng
from memfit.errors import MemfitError
from memfit.i18n import Message, message_of
from memfit.memory.available import MemoryReading, reader_of
from memfit.memory.cards import DeviceProfile
from memfit.memory.components import MemoryPeak
from memfit.memory.device import is_cuda
from memfit.memory.tracing.counting import StepCounts
from memfit.planner.advice import disk_note, fits_host
from memfit.planner.candidates import PlanTask, Price, Pricer
from memfit.planner.plans import Decision, Plan, digest_of
from memfit.planner.search import make_plan
from memfit.planner.workload import Workload
from memfit.units import Budget

_VERSION = 4

_NAMES_OF_A_RUN = frozenset({
    "output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "report_to", "project",
    "hub_model_id", "hub_token", "trackio_space_id", "local_rank",
})  # fmt: skip
"""Arguments that say where a run is written or what it is called."""

_MORE_ROOM = 1.1
"""How much more memory there must be before a faster plan is searched for."""

_OTHER_CONTEXT_BYTES = 32 << 20
"""A context may measure a little smaller or larger than it did then."""


def task_for(
    workload: Workload,
    budget: Budget,
    where: torch.device | DeviceProfile,
    *,
    exact: bool = False,
    allow: frozenset[str] = frozenset(),
) -> PlanTask:
    """The task of planning a workload for a device of this machine, or for a card by its profile.

    This is where a budget becomes bytes: what is shown, planned for and enforced.
    """
    return PlanTask(
        workload=workload,
        card=where if isinstance(where, DeviceProfile) else card_here(where),
        budget=budget,
        budget_bytes=budget_bytes(where, budget),
        exact=exact,
        allow=allow,
    )


def budget_bytes(where: torch.device | DeviceProfile, budget: Budget) -> int:
    """The budget in bytes; `auto` leaves room for a display, unless it was taken off already."""
    reading = memory_of(where)
    limit_bytes = reading.limit_bytes(budget)
    if isinstance(where, DeviceProfile) and budget == Budget():
        limit_bytes += min(where.reserved_bytes, reading.free_bytes - limit_bytes)
    return limit_bytes


def memory_of(where: torch.device | DeviceProfile) -> MemoryReading:
    """What there is now, and what this process holds; a card elsewhere holds what was said."""
    if isinstance(where, DeviceProfile):
        return MemoryReading(where.total_bytes, where.usable_bytes, 0)
    return reader_of(where, lambda: 0)()


def card_here(device: torch.device) -> DeviceProfile | None:
    """The card with its speeds as measured; None is the CPU, and devices planned for like one."""
    if not is_cuda(device):
        half_on_cpu()  # before anything is computed
        return None
    from memfit.planner.step_time import calibrate

    with preserved_rng():
        return calibrate(device)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The plan for a task, and what there is to say about it."""

    plan: Plan
    notes: tuple[Decision, ...] = ()
    kept: bool = False
    """Whether it is that of an earlier run."""
    pricer: Pricer | None = None
    """Knows what other plans cost; None where none was asked."""


def choose(task: PlanTask, *, folder: Path | None = None, pricer: Pricer | None = None) -> Chosen:
    """Returns the fastest plan, or the one that an earlier run made for the same task.

    `folder` is where checkpoints will go.
    """
    free_bytes = None if folder is None else free_disk_bytes(folder)
    if (plan := kept_plan(task)) is not None:
        assert plan.price is not None
        return Chosen(
            plan=plan, notes=tuple(disk_note(task.workload, plan.price, free_bytes)), kept=True
        )
    made = make_plan(task, disk_bytes_free=free_bytes, pricer=pricer)
    if not made.notes:  # what is scarce now may not be next time
        keep_plan(task, made.chosen)
    return Chosen(plan=made.chosen, notes=made.notes, pricer=made.pricer)


def free_disk_bytes(folder: Path) -> int:
    """What may still be written where a folder is, or will be made."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    return shutil.disk_usage(there).free


def cache_file(task: PlanTask) -> str:
    """The name of a task's plan in the cache folder; another for everything a plan follows from."""
    workload, card = task.workload, task.card
    given = {one.name: getattr(workload, one.name) for one in dataclasses.fields(workload)}
    lengths = ",".join(map(str, workload.lengths))
    arguments: dict[str, Any] = workload.args.to_dict()  # type: ignore[no-untyped-call]
    values = {
        **given,
        "version": _VERSION,
        "config": workload.config.to_dict(),
        "lengths": hashlib.sha256(lengths.encode()).hexdigest(),
        "args": {key: one for key, one in arguments.items() if key not in _NAMES_OF_A_RUN},
        "user_set": sorted(workload.user_set),
        "card": None if card is None else {**dataclasses.asdict(card), "context_bytes": 0},
        "cpu": [*files.processor(), str(half_on_cpu())] if card is None else None,
        "budget": dataclasses.asdict(task.budget),
        "exact": task.exact,
        "allow": sorted(task.allow),
        "reserve": task.reserve_bytes,
        "installed": files.installed_versions(),
    }
    return f"plan-{files.cache_digest(values)}.json"


def kept_plan(task: PlanTask) -> Plan | None:
    """The plan of an earlier run, where it is for this task and still holds.

    Plans are kept by the model's configuration, and a model that was given is more than that.
    """
    is_kept = files.cache_is_used() and task.workload.given is None
    values = files.remembered(cache_file(task)) if is_kept else None
    if values is None:
        return None
    try:
        plan = _plan_from(values, task)
        then = int(values["budget_bytes"]), int(values["context_bytes"])
    except (MemfitError, KeyError, TypeError, ValueError, AttributeError):
        return None
    return plan if _still_holds(plan, *then, task) else None


def keep_plan(task: PlanTask, plan: Plan) -> None:
    """Writes it down for the next run."""
    if task.workload.given is not None:
        return
    for one in _kept_for(task):
        files.remember(cache_file(one), _values_of(plan, one))
    files.tidy_cache("plan-*.json")


def keep_learnt(task: PlanTask, plan: Plan, learnt: Mapping[str, float]) -> None:
    """Writes down what the plan's rehearsal measured, if the plan itself was kept."""
    kept = kept_plan(task)
    if kept is None or kept.candidate != plan.candidate or kept.learnt == learnt:
        return
    for one in _kept_for(task):
        values = files.remembered(cache_file(one))
        if values is not None:  # of which the rest stays as it was when the plan was made
            files.remember(cache_file(one), {**values, "learnt": dict(learnt)})


def _kept_for(task: PlanTask) -> Iterator[PlanTask]:
    """The tasks a plan is kept for: without its reserve the plan would miss the budget again."""
    yield task
    if task.reserve_bytes:
        whole_bytes = task.budget_bytes + task.reserve_bytes
        yield replace(task, reserve_bytes=0, budget_bytes=whole_bytes)


def _still_holds(plan: Plan, then_bytes: int, then_context: int, task: PlanTask) -> bool:
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
    return fits_host(price, psutil.virtual_memory().available // task.workload.ranks)


def _context_bytes(task: PlanTask) -> int:
    return 0 if task.card is None else task.card.context_bytes


def _values_of(plan: Plan, task: PlanTask) -> dict[str, Any]:
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
            "traced": price.traced,
        },
        "decisions": [_stored(one) for one in plan.decisions],
        "learnt": plan.learnt,
    }


def _stored(decision: Decision) -> dict[str, Any]:
    """Returns a decision with its sentence in parts, so that it can be shown in any language."""
    said = decision.message
    message = said.as_json() if isinstance(said, Message) else said
    return {"about": decision.about, "message": message, "strategy": decision.strategy}


def _plan_from(values: Mapping[str, Any], task: PlanTask) -> Plan:
    if values["version"] != _VERSION:
        raise ValueError("another version")
    digest = digest_of(task.workload, task.budget_bytes, task.card)
    tables = {**values["plan"], "workload": dataclasses.asdict(digest)}
    read, said = Plan.from_tables(tables), values["price"]
    price = Price(
        candidate=read.candidate,
        peak=MemoryPeak.from_json(said["peak"]),
        phases={str(name): MemoryPeak.from_json(one) for name, one in said["phases"].items()},
        counts=StepCounts(**{name: float(one) for name, one in said["counts"].items()}),
        step_seconds=float(said["step_seconds"]),
        host_bytes=int(said["host_bytes"]),
        traced=bool(said["traced"]),
    )
    decisions = tuple(
        Decision(str(one["about"]), message_of(one["message"]), str(one["strategy"]))
        for one in values["decisions"]
    )
    learnt = values["learnt"]
    return dataclasses.replace(
        read,
        price=price,
        decisions=decisions,
        args=task.workload.args,
        learnt=None if learnt is None else {str(key): float(one) for key, one in learnt.items()},
    )
