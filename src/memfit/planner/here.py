"""Plans for the machine at hand: its card, measured, or its CPU, and what is free of it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from memfit.half_on_cpu import half_on_cpu
from memfit.memory.cards import DeviceProfile
from memfit.planner.given import fit_strategies
from memfit.planner.kept import Task, keep_plan, kept_plan
from memfit.planner.plan import Checked, Decision, Plan, check
from memfit.planner.preflight import disk_note
from memfit.planner.search import Planning, make_plan
from memfit.planner.values import Pricer, Workload
from memfit.runtime.checkpoint import preserved_rng
from memfit.runtime.watch import CpuReader, CudaReader
from memfit.strategies import Strategy
from memfit.units import Budget


def card_here(device: torch.device) -> DeviceProfile | None:
    """The card with its speeds as measured; None is the CPU."""
    if device.type != "cuda":
        half_on_cpu()  # before anything is computed
        return None
    from memfit.planner.calibration import calibrate

    with preserved_rng():
        return calibrate(device)


def budget_here(budget: Budget, device: torch.device) -> int:
    """What the process may hold now: the budget, as far as others leave room for it."""
    read = CudaReader(device) if device.type == "cuda" else CpuReader(lambda: 0)
    return read().limit_bytes(budget)


def plan_here(
    workload: Workload,
    budget: Budget,
    device: torch.device,
    *,
    exact: bool = False,
    allow: frozenset[str] = frozenset(),
    folder: Path | None = None,
    reserve_bytes: int = 0,
    pricer: Pricer | None = None,
) -> Planning:
    """The fastest plan inside the budget; `folder` is where checkpoints will go.

    `reserve_bytes` of the budget are left free; `pricer` is that of an earlier plan for the same.
    """
    card = card_here(device)
    with preserved_rng():
        return make_plan(
            workload,
            max(budget_here(budget, device) - reserve_bytes, 0),
            card,
            exact=exact,
            allow=allow,
            disk_bytes_free=None if folder is None else free_disk_bytes(folder),
            pricer=pricer,
        )


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The plan for this machine, and what there is to say about it."""

    plan: Plan
    notes: tuple[Decision, ...] = ()
    kept: bool = False
    """Whether it is that of an earlier run."""
    pricer: Pricer | None = None
    """Knows what other plans cost; None where none was asked."""


def chosen_here(
    workload: Workload,
    budget: Budget,
    device: torch.device,
    *,
    exact: bool = False,
    allow: frozenset[str] = frozenset(),
    folder: Path | None = None,
    reserve_bytes: int = 0,
    pricer: Pricer | None = None,
) -> Chosen:
    """As `plan_here`; a task that was planned on this machine before is not planned again."""
    task = Task(
        workload=workload,
        card=card_here(device),
        budget=budget,
        budget_bytes=max(budget_here(budget, device) - reserve_bytes, 0),
        exact=exact,
        allow=allow,
        reserve_bytes=reserve_bytes,
    )
    if (plan := kept_plan(task)) is not None:
        assert plan.price is not None
        free_bytes = None if folder is None else free_disk_bytes(folder)
        notes = tuple(disk_note(workload, plan.price, free_bytes))
        return Chosen(plan=plan, notes=notes, kept=True)
    made = plan_here(
        workload,
        budget,
        device,
        exact=exact,
        allow=allow,
        folder=folder,
        reserve_bytes=reserve_bytes,
        pricer=pricer,
    )
    if not made.notes:  # what is scarce now may not be next time
        keep_plan(task, made.chosen)
        if reserve_bytes:  # the plan without it missed its budget, and would again
            whole_bytes = task.budget_bytes + reserve_bytes
            keep_plan(replace(task, reserve_bytes=0, budget_bytes=whole_bytes), made.chosen)
    return Chosen(plan=made.chosen, notes=made.notes, pricer=made.pricer)


def fit_here(
    workload: Workload, strategies: Sequence[Strategy], budget: Budget, device: torch.device
) -> Plan:
    """Strategies given by hand with the micro-batches that fit."""
    card = card_here(device)
    with preserved_rng():
        return fit_strategies(workload, strategies, budget_here(budget, device), card)


def check_here(plan: Plan, workload: Workload, budget: Budget, device: torch.device) -> Checked:
    """A plan from a file, priced for this machine."""
    card = card_here(device)
    with preserved_rng():
        return check(plan, workload, card, budget_here(budget, device))


def free_disk_bytes(folder: Path) -> int:
    """What may still be written where a folder is, or will be made."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    return shutil.disk_usage(there).free
