"""Plans of earlier runs, in the user's cache folder: the same task is planned once.

A plan is kept under everything it follows from: the model's configuration, every row's length, the
arguments, the card with its speeds, what is installed. Budget, context and host memory change from
run to run; whether the plan still holds for them is looked at each time. A file that cannot be
read, or whose content is not what is written here, is as good as none.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import psutil

from memfit import cache
from memfit.errors import MemfitError
from memfit.half_on_cpu import half_on_cpu
from memfit.memory.cards import DeviceProfile
from memfit.memory.components import Component, MemoryPeak
from memfit.memory.counts import StepCounts
from memfit.messages import Message, message_of
from memfit.planner.plan import Decision, Plan, digest_of, settings_of
from memfit.planner.preflight import fits_host
from memfit.planner.values import Price, Workload
from memfit.units import Budget

_VERSION = 2
_NAMES_OF_A_RUN = frozenset({
    "output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "report_to", "project",
    "hub_model_id", "hub_token", "trackio_space_id", "local_rank",
})  # fmt: skip
"""Arguments that say where a run is written or what it is called."""
_MORE_ROOM = 1.1
"""With a tenth more to use than then, a faster plan is not looked for."""
_OTHER_CONTEXT_BYTES = 32 << 20
"""A context may measure a little smaller or larger than it did then."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a plan is looked for, and what there is for it now."""

    workload: Workload
    card: DeviceProfile | None
    budget: Budget
    budget_bytes: int
    exact: bool = False
    allow: frozenset[str] = frozenset()
    reserve_bytes: int = 0

    @property
    def file(self) -> str:
        """Its name in the cache folder; another for everything a plan follows from."""
        workload, card = self.workload, self.card
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
            "cpu": [*cache.processor(), str(half_on_cpu())] if card is None else None,
            "budget": dataclasses.asdict(self.budget),
            "exact": self.exact,
            "allow": sorted(self.allow),
            "reserve": self.reserve_bytes,
            "installed": cache.installed(),
        }
        return f"plan-{cache.digest(values)}.json"


def kept_plan(task: Task) -> Plan | None:
    """The plan of an earlier run, where it is for this task and still holds."""
    values = cache.remembered(task.file) if cache.is_used() else None
    if values is None:
        return None
    try:
        plan = _plan_from(values, task)
        then = int(values["budget_bytes"]), int(values["context_bytes"])
    except (MemfitError, KeyError, TypeError, ValueError, AttributeError):
        return None
    return plan if _still_holds(plan, *then, task) else None


def keep_plan(task: Task, plan: Plan) -> None:
    """Writes it down for the next run."""
    assert plan.price is not None
    cache.remember(task.file, _values_of(plan, task))
    cache.tidy("plan-*.json")


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
    return fits_host(price, psutil.virtual_memory().available)


def _context_bytes(task: Task) -> int:
    return 0 if task.card is None else task.card.context_bytes


def _values_of(plan: Plan, task: Task) -> dict[str, Any]:
    price = plan.price
    assert price is not None
    return {
        "version": _VERSION,
        "budget_bytes": task.budget_bytes,
        "context_bytes": _context_bytes(task),
        "strategies": {one.name: settings_of(one) for one in plan.strategies},
        "micro_batching": {
            name: one
            for name, one in dataclasses.asdict(plan.micro_batching).items()
            if one is not None
        },
        "price": {
            "peak": dataclasses.asdict(price.peak),
            "phases": {name: dataclasses.asdict(one) for name, one in price.phases.items()},
            "counts": dataclasses.asdict(price.counts),
            "step_seconds": price.step_seconds,
            "host_bytes": price.host_bytes,
            "traced": price.traced,
        },
        "decisions": [_stored(one) for one in plan.decisions],
    }


def _stored(decision: Decision) -> dict[str, Any]:
    """Returns a decision with its sentence in parts, so that it can be shown in any language."""
    said = decision.message
    message = said.as_json() if isinstance(said, Message) else said
    return {"about": decision.about, "message": message, "strategy": decision.strategy}


def _plan_from(values: Mapping[str, Any], task: Task) -> Plan:
    if values["version"] != _VERSION:
        raise ValueError("another version")
    digest = digest_of(task.workload, task.budget_bytes, task.card)
    tables = {
        "strategies": values["strategies"],
        "micro_batching": values["micro_batching"],
        "workload": dataclasses.asdict(digest),
    }
    read, said = Plan.from_tables(tables), values["price"]
    price = Price(
        candidate=read.candidate,
        peak=_peak(said["peak"]),
        phases={str(name): _peak(one) for name, one in said["phases"].items()},
        counts=StepCounts(**{name: float(one) for name, one in said["counts"].items()}),
        step_seconds=float(said["step_seconds"]),
        host_bytes=int(said["host_bytes"]),
        traced=bool(said["traced"]),
    )
    decisions = tuple(
        Decision(str(one["about"]), message_of(one["message"]), str(one["strategy"]))
        for one in values["decisions"]
    )
    return dataclasses.replace(read, price=price, decisions=decisions, args=task.workload.args)


def _peak(values: Mapping[str, Any]) -> MemoryPeak:
    return MemoryPeak(
        components={Component(name): int(size) for name, size in values["components"].items()},
        allocated_bytes=int(values["allocated_bytes"]),
        reserved_bytes=int(values["reserved_bytes"]),
        device_bytes=int(values["device_bytes"]),
        module=str(values["module"]),
    )
