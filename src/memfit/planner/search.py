"""The fastest way of training that fits.

Every candidate has a quick price, composed from a few traced layers. They are gone through from
the fastest to the slowest, and the first whose whole step, traced, stays inside the budget in
every phase is the fastest. Of those that take about as long the most faithful is chosen, and then
the simplest. What a candidate costs does not depend on the budget, so that what fits a small budget
is a candidate of every larger one: more memory never gives a slower plan, but for such a tie.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from memfit.engine.micro_batches import MicroBatching
from memfit.errors import ConfigError
from memfit.i18n import Message
from memfit.memory.cards import DeviceProfile
from memfit.memory.stock_estimate import no_collection
from memfit.planner.advice import (
    OtherWaysFinder,
    disk_note,
    does_not_fit,
    fits_host,
    guess_note,
    host_note,
    margin_note,
    other_ways,
)
from memfit.planner.candidates import Candidate, PlanTask, Price, Pricer, Timed
from memfit.planner.explain import explain
from memfit.planner.plans import Decision, Plan, digest_of
from memfit.planner.space import PlanRequest, candidates, limits_for
from memfit.planner.workload import Workload
from memfit.strategies import Strategy, Tier, ordered

_CLOSE = 0.02
"""What a quick price may be off by."""

_TIE = 0.03
"""Steps that differ by less take the same time: calibration measures no better than that."""

_TIES_TRACED = 4

_WORTH_ROUNDING = 0.9

_NEIGHBOURS = 2

_LISTED = 6


@dataclass(frozen=True, kw_only=True)
class Planning:
    """The plan that was chosen, and what it was chosen from."""

    chosen: Plan
    candidates: tuple[Plan, ...]
    """The best plan of each other kind that fits, fastest first."""
    left_out: dict[str, str]
    """Strategies that cannot be used here, each with its reason."""
    notes: tuple[Decision, ...]
    """What else to know: host memory or disk that is missing."""
    considered: int
    traced: int
    seconds: float
    """What planning took."""
    asked: PlanRequest
    prices: tuple[Price, ...]
    """Every candidate's quick price, fastest first."""
    pricer: Pricer

    def __repr__(self) -> str:
        return f"<Planning: {self.chosen!r} of {self.considered} candidates>"


@no_collection()
def make_plan(
    task: PlanTask,
    *,
    host_bytes_free: int | None = None,
    disk_bytes_free: int | None = None,
    pricer: Pricer | None = None,
    find: OtherWaysFinder = other_ways,
) -> Planning:
    """Returns the fastest plan inside the budget, or raises DoesNotFitError with the smallest one.

    `pricer` comes from an earlier plan for the same workload, with the traces it has made. Where
    nothing fits, `find` finds what would.
    """
    started = time.perf_counter()
    workload, budget_bytes, card = task.workload, task.budget_bytes, task.card
    asked, pricer = ask(workload, card, pricer, exact=task.exact, allow=task.allow)
    host_free = psutil.virtual_memory().available if host_bytes_free is None else host_bytes_free
    host_free //= workload.ranks  # each keeps its own there
    prices = price_all(asked, pricer, budget_bytes, host_free, find)
    possible = [one for one in prices if fits_host(one, host_free)]
    search = _Search(possible, budget_bytes, pricer)
    found = search.run()
    # Kinds may have been passed over for a plan that should have fitted.
    if found is None or found.step_seconds > _best_seconds(prices, budget_bytes, host_free):
        every = price_all(asked, pricer)
        if len(every) > len(prices):
            possible = [one for one in every if fits_host(one, host_free)]
            search = _Search(possible, budget_bytes, pricer)
            found = search.run()
        if found is None:
            raise does_not_fit(asked, pricer, every, budget_bytes, host_free, find)
    found = search.decide_tie(found)
    digest = digest_of(workload, budget_bytes, card)

    def plan_of(price: Price, decisions: tuple[Decision, ...] = ()) -> Plan:
        return Plan(
            candidate=price.candidate,
            price=price,
            digest=digest,
            decisions=decisions,
            args=workload.args,
        )

    passed_over = [one for one in prices if one.device_bytes <= budget_bytes]
    passed_over = [one for one in passed_over if not fits_host(one, host_free)]
    notes = [
        *host_note(passed_over, found, host_free),
        *disk_note(workload, found, disk_bytes_free),
        *guess_note(getattr(pricer, "guessed", ())),
        *margin_note(card),
    ]
    return Planning(
        chosen=plan_of(found, explain(found, asked, pricer, budget_bytes)),
        candidates=tuple(map(plan_of, best_of_each_kind(possible, budget_bytes, found))),
        left_out=dict(asked.left_out),
        notes=tuple(notes),
        considered=len(prices),
        traced=search.traces,
        seconds=time.perf_counter() - started,
        asked=asked,
        prices=tuple(prices),
        pricer=pricer,
    )


def ask(
    workload: Workload,
    card: DeviceProfile | None,
    pricer: Pricer | None,
    *,
    exact: bool,
    allow: frozenset[str],
) -> tuple[PlanRequest, Pricer]:
    """What is asked, and who prices it."""
    if exact and allow:
        raise ConfigError(
            Message(
                "--exact and --allow {allow} exclude each other; choose one",
                allow=",".join(sorted(allow)),
            )
        )
    if pricer is None:
        from memfit.planner.pricing.pricer import TracedPricer

        pricer = TracedPricer(workload, card)
    return PlanRequest(workload, card, pricer.problem, exact=exact, allow=allow), pricer


def price_all(
    asked: PlanRequest,
    pricer: Pricer,
    budget_bytes: int | None = None,
    host_free: int = 0,
    find: OtherWaysFinder = other_ways,
) -> list[Price]:
    """Every candidate's quick price, the fastest first.

    With a budget, without the slow tiers that cannot be faster than the best of the others: each
    costs traces. `find` begins before those.
    """
    tiers: dict[Tier, list[Candidate]] = {tier: [] for tier in Tier}
    for one in candidates(asked):
        tiers[one.tier].append(one)
    prices = [pricer.quick(one) for one in tiers.pop(Tier.USUAL)]
    find.begin(pricer.known)
    for tier, slow in tiers.items():
        best = _best_seconds(prices, budget_bytes, host_free)
        if slow and (best == math.inf or pricer.least_seconds(tier, prices) < best):
            prices += [pricer.quick(one) for one in slow]
    return sorted(_without_needless_rounding(prices), key=rank)


def _best_seconds(prices: Sequence[Price], budget_bytes: int | None, host_free: int) -> float:
    if budget_bytes is None:
        return math.inf
    inside = [
        one.step_seconds
        for one in prices
        if one.device_bytes * (1 + _CLOSE) <= budget_bytes
        and fits_host(one, host_free)
        and not one.candidate.effects.short_masters
    ]
    return min(inside, default=math.inf)


def rank(price: Price) -> tuple[float, int, int, int, int]:
    """Faster first; then better fidelity, 24-bit masters, less memory, fewer strategies."""
    return (*rank_in_time(price), price.device_bytes, len(price.candidate.strategies))


def rank_in_time(price: Price | Timed) -> tuple[float, int, int]:
    """The sort key of a price, without the part that memory decides."""
    return (
        float(f"{price.step_seconds:.6g}"),  # what differs by less is the same
        price.candidate.fidelity,
        int(price.candidate.effects.short_masters),
    )


def _is_better(one: Candidate, other: Candidate) -> bool:
    """Whether this candidate wins where both are equally fast."""
    mine, theirs = _roundings(one), _roundings(other)
    fewer = len(one.strategies) < len(other.strategies)
    return mine < theirs or (
        mine == theirs and fewer and one.micro_batching == other.micro_batching
    )


def _tied_rank(price: Price) -> tuple[object, ...]:
    candidate = price.candidate
    return (_roundings(candidate), len(candidate.strategies), rank(price))


def _roundings(candidate: Candidate) -> tuple[int, int]:
    return candidate.fidelity, int(candidate.effects.short_masters)


def _without_needless_rounding(prices: Sequence[Price]) -> list[Price]:
    """Masters of 16 bits only where they make a step faster by more than a tenth.

    They cost up to half a point of F1 (ALBERT-tiny), 24 bits nothing that was measured. One is
    left out if some other candidate needs no more memory and is nearly as fast: that one fits
    wherever it does, whatever the budget.
    """
    kept: list[Price] = []
    fastest = math.inf
    for one in sorted(prices, key=lambda one: (one.device_bytes, one.step_seconds)):
        if not one.candidate.effects.short_masters:
            fastest = min(fastest, one.step_seconds)
        elif one.step_seconds >= _WORTH_ROUNDING * fastest:
            continue
        kept.append(one)
    return kept


def kind_of(candidate: Candidate) -> tuple[object, ...]:
    """What makes two candidates differ by more than how many layers and how many tokens."""
    parts = [one.for_layers(None) for one in candidate.strategies]
    return (*parts, candidate.micro_batching == MicroBatching())


def best_of_each_kind(prices: Sequence[Price], budget_bytes: int, chosen: Price) -> Iterator[Price]:
    """The fastest of each other kind that fits by its quick price, fastest first."""
    seen = {kind_of(chosen.candidate)[:-1]}
    for price in prices:
        kind = kind_of(price.candidate)[:-1]
        if kind in seen or price.device_bytes > budget_bytes:
            continue
        seen.add(kind)
        yield price
        if len(seen) > _LISTED:
            return


def first_that_fits(prices: Sequence[Price], budget_bytes: int, pricer: Pricer) -> Price | None:
    """The first of these, fastest first, whose whole step stays inside the budget."""
    return _Search(prices, budget_bytes, pricer).run()


class _Search:
    """Goes through the quick prices, fastest first, and traces what should fit."""

    def __init__(self, prices: Sequence[Price], budget_bytes: int, pricer: Pricer) -> None:
        self._prices = prices
        self._budget_bytes = budget_bytes
        self._pricer = pricer
        self.traces = 0

    def run(self) -> Price | None:
        """The first that fits when it is traced."""
        return self._fastest() or self._smallest()

    def _fastest(self) -> Price | None:
        off: dict[object, float] = {}
        """By how much the quick prices of a kind were too low."""
        for price in self._prices:
            kind = kind_of(price.candidate)
            if price.device_bytes * off.get(kind, 1.0) > self._budget_bytes:
                continue
            traced = self._trace(price)
            if traced.device_bytes <= self._budget_bytes:
                return self._faster_neighbour(price, traced) or traced
            off[kind] = traced.device_bytes / price.device_bytes
        return None

    def _smallest(self) -> Price | None:
        """Where nothing seems to fit, quick prices a little too high may be the reason."""
        close = [one for one in self._prices if self._is_close(one)]
        for price in sorted(close, key=lambda one: one.device_bytes)[:_NEIGHBOURS]:
            traced = self._trace(price)
            if traced.device_bytes <= self._budget_bytes:
                return traced
        return None

    def decide_tie(self, fastest: Price) -> Price:
        """Returns the most faithful plan that is about as fast; of those, the simplest.

        So that a plan does not change with the noise of a calibration. A strategy is not left out
        where smaller micro-batches would have to take its place.
        """
        tied = [
            one
            for one in self._prices
            if one.step_seconds <= (1 + _TIE) * fastest.step_seconds
            and one.device_bytes <= self._budget_bytes
            and _is_better(one.candidate, fastest.candidate)
        ]
        for price in sorted(tied, key=_tied_rank)[:_TIES_TRACED]:
            traced = self._trace(price)
            if traced.device_bytes <= self._budget_bytes:
                return traced
        return fastest

    def _faster_neighbour(self, price: Price, traced: Price) -> Price | None:
        """One less recomputed layer or a larger micro-batch, where the trace says it fits.

        Only where the quick price of the plan itself was too high may theirs be too high.
        """
        ratio = traced.device_bytes / price.device_bytes
        kind = kind_of(price.candidate)
        close = [
            one
            for one in self._prices
            if self._is_close(one)
            and one.step_seconds < price.step_seconds
            and kind_of(one.candidate) == kind
            and one.device_bytes * ratio <= self._budget_bytes
        ]
        for one in close[:_NEIGHBOURS]:
            neighbour = self._trace(one)
            if neighbour.device_bytes <= self._budget_bytes:
                return neighbour
        return None

    def _is_close(self, price: Price) -> bool:
        """Whether its quick price is above the budget by less than it may be off."""
        return self._budget_bytes < price.device_bytes <= self._budget_bytes * (1 + _CLOSE)

    def _trace(self, price: Price) -> Price:
        self.traces += 1
        return self._pricer.full(price.candidate, self._budget_bytes)


def fit_strategies(task: PlanTask, strategies: Sequence[Strategy]) -> Plan:
    """These strategies with the fastest micro-batches inside the budget, or DoesNotFitError."""
    workload, budget_bytes, card = task.workload, task.budget_bytes, task.card
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
