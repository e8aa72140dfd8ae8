"""Strategies chosen by hand: only the micro-batches are the planner's."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from memfit.memory.cards import DeviceProfile
from memfit.planner.explain import explain
from memfit.planner.missing import does_not_fit
from memfit.planner.plan import Plan, digest_of
from memfit.planner.rules import limits_for
from memfit.planner.search import ask, first_that_fits, rank
from memfit.planner.values import Candidate, Workload
from memfit.strategies import Strategy, ordered


def fit_strategies(
    workload: Workload,
    strategies: Sequence[Strategy],
    budget_bytes: int,
    card: DeviceProfile | None,
) -> Plan:
    """These strategies with the fastest micro-batches inside the budget, or DoesNotFitError."""
    asked, pricer = ask(workload, card, None, exact=False, allow=frozenset())
    chosen = tuple(ordered(strategies))
    prices = sorted(
        (pricer.quick(Candidate(chosen, limits)) for limits in limits_for(asked.workload, chosen)),
        key=rank,
    )
    found = first_that_fits(prices, budget_bytes, pricer)
    if found is None:
        free_bytes = int(psutil.virtual_memory().available)
        raise does_not_fit(asked, pricer, prices, budget_bytes, free_bytes)
    return Plan(
        candidate=found.candidate,
        price=found,
        digest=digest_of(workload, budget_bytes, card),
        decisions=explain(found, asked, pricer, budget_bytes),
        args=workload.args,
    )
