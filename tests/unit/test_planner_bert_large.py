"""Real plans for BERT-Large: every step traced, for cards that are not here."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from planner_fixtures import BERT_LARGE, h200, planned, to_plan

from memfit.memory.cards import DeviceProfile, find_card
from memfit.planner.plans import Plan, check
from memfit.planner.pricing import step_trace
from memfit.planner.pricing.pricer import TracedPricer
from memfit.planner.search import Planning
from memfit.strategies import Fidelity

pytestmark = pytest.mark.slow
TASK = BERT_LARGE
PARAMETERS = 325_524_482
HOST = 64 * 10**9

_pricers: dict[str, TracedPricer] = {}


def plan(card: DeviceProfile, budget: float, *, exact: bool = False) -> Planning:
    pricer = _pricers.setdefault(card.name, TracedPricer(TASK, card))
    return planned(TASK, int(budget), card, exact=exact, pricer=pricer, host_bytes_free=HOST)


def holds(chosen: Plan, budget: float) -> None:
    """Inside the budget in every phase, all parameters trained, gradients clipped as asked."""
    assert chosen.price is not None
    assert chosen.price.traced
    assert set(chosen.price.phases) == {"training", "evaluation", "saving", "resuming"}
    assert max(one.device_bytes for one in chosen.price.phases.values()) <= budget
    assert chosen.fidelity <= Fidelity.ROUNDING
    release = chosen.candidate.get("gradient_release")
    assert release is None or release.mode in ("kept8", "host")


@dataclass
class Effort:
    """What making a plan took, in seconds of the CPU."""

    seconds: float = 0.0
    traces: list[float] = field(default_factory=list)


@pytest.fixture(scope="module")
def first() -> tuple[Planning, Effort]:
    """The plan for 4 GB, made before anything is traced for the card."""
    effort, trace_once = Effort(), step_trace._trace

    def counted(*args: Any, **named: Any) -> Any:
        started = time.process_time()
        made = trace_once(*args, **named)
        effort.traces.append(time.process_time() - started)
        return made

    assert h200().name not in _pricers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_trace, "_trace", counted)
        started = time.process_time()
        made = plan(h200(), 4e9)
        effort.seconds = time.process_time() - started
    return made, effort


@pytest.fixture(scope="module")
def on_h200(first: tuple[Planning, Effort]) -> dict[float, Planning]:
    return {4e9: first[0], **{budget: plan(h200(), budget) for budget in (3e9, 2e9)}}


def test_planning_takes_few_traces(first: tuple[Planning, Effort]) -> None:
    # A shallow trace takes a quarter of a second and all else a second: under 10 s together.
    _, effort = first
    assert 0 < len(effort.traces) <= 14
    assert effort.seconds < 40 * sum(effort.traces) / len(effort.traces)


@pytest.mark.parametrize("budget", [4e9, 3e9, 2e9])
def test_every_parameter_learns_on_a_large_card_capped(
    on_h200: dict[float, Planning], budget: float
) -> None:
    planning = on_h200[budget]
    holds(planning.chosen, budget)
    assert planning.pricer.learning_parameters(planning.chosen.candidate) == PARAMETERS


def test_more_memory_is_never_slower(on_h200: dict[float, Planning]) -> None:
    more = {**on_h200, 6e9: plan(h200(), 6e9), 2.5e9: plan(h200(), 2.5e9)}
    prices = [more[budget].chosen.price for budget in sorted(more)]
    seconds = [one.step_seconds for one in prices if one is not None]
    assert len(seconds) == len(more)
    assert all(larger <= smaller for smaller, larger in itertools.pairwise(seconds))


def test_quick_price_of_the_chosen_plan_is_close(on_h200: dict[float, Planning]) -> None:
    for planning in on_h200.values():
        price = planning.chosen.price
        assert price is not None
        quick = planning.pricer.quick(price.candidate)
        assert quick.device_bytes == pytest.approx(price.device_bytes, rel=0.04)


@pytest.mark.usefixtures("first")
def test_exact_plan_fits_16_gb() -> None:
    chosen = plan(h200(), 16e9, exact=True).chosen
    holds(chosen, 16e9)
    assert chosen.fidelity is Fidelity.EXACT
    assert chosen.candidate.get("lowbit_adamw") is None


@pytest.mark.parametrize("budget", [3.8e9, 3e9, 2e9])
def test_every_parameter_learns_on_a_small_card(budget: float) -> None:
    card = find_card("RTX 3050 Laptop 4GB")
    planning = plan(card, budget)
    holds(planning.chosen, budget)
    assert planning.pricer.learning_parameters(planning.chosen.candidate) == PARAMETERS


def test_chosen_plan_stands_its_own_check(on_h200: dict[float, Planning]) -> None:
    planning = on_h200[3e9]
    checked = check(planning.chosen, to_plan(TASK, 3 * 10**9, h200()), planning.pricer)
    assert checked.fits
    assert checked.changed == ()
