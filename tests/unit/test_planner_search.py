"""Choosing a plan: the fastest that fits, nothing the user did not allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache

import pytest
from planner_fixtures import SMALL, bert, h200, laptop, planned, task, within

from memfit.engine.micro_batches import MicroBatching
from memfit.errors import ConfigError
from memfit.memory.components import MemoryPeak
from memfit.memory.tracing.counting import StepCounts
from memfit.planner import recipes
from memfit.planner.advice import NothingFitsError, alternatives
from memfit.planner.plan import Plan
from memfit.planner.price import Price, Pricer
from memfit.planner.search import Planning, Search, chosen_of, plan_for
from memfit.planner.task import Task
from memfit.strategies import (
    ActivationOffload,
    Checkpointing,
    Fidelity,
    GradientRelease,
    HalfPrecision,
    LowBitAdamW,
    Packing,
    StateOffload,
    Strategy,
    find,
)

ROOMY = 80e9


@cache
def pricer(card: str = "laptop") -> Pricer:
    """Traces that tests share: no price depends on the budget."""
    cards = {"laptop": laptop, "h200": h200, "cpu": lambda: None}
    return Pricer(within(SMALL, 1, cards[card]()))


def plan(budget_bytes: float, **asked: object) -> Planning:
    return planned(SMALL, budget_bytes, laptop(), pricer=pricer(), **asked)


@cache
def roomy() -> Planning:
    return plan(ROOMY)


@cache
def smallest() -> Plan:
    with pytest.raises(NothingFitsError) as caught:
        plan(1)
    return caught.value.smallest


def bytes_of(made: Plan) -> int:
    assert made.price is not None
    return made.price.device_bytes


def seconds_of(made: Plan) -> float:
    assert made.price is not None
    return made.price.step_seconds


def names_of(made: Plan) -> set[str]:
    return {one.name for one in made.strategies}


# ---- budgets that are slack, bind, or are too small ----


def test_slack_budget_recomputes_nothing_and_runs_whole_batches() -> None:
    chosen = roomy().chosen
    assert chosen.micro_batching == MicroBatching()
    assert names_of(chosen) == {"packing", "fused_layers", "lowbit_adamw", "cuda_graphs"}


def test_binding_budget_is_kept_by_a_slower_plan_that_trains_everything() -> None:
    least, most = bytes_of(smallest()), bytes_of(roomy().chosen)
    before = 0.0
    for share in (0.8, 0.4, 0.15):
        budget = int(least + share * (most - least))
        made = plan(budget)
        assert bytes_of(made.chosen) <= budget
        assert made.chosen.fidelity <= Fidelity.ROUNDING
        assert made.chosen.digest.effective_rows == 32
        assert seconds_of(made.chosen) >= seconds_of(roomy().chosen)
        # More memory is no slower, but for a tie.
        assert seconds_of(made.chosen) >= before / 1.03
        before = seconds_of(made.chosen)
        for other in made.candidates:
            assert bytes_of(other) <= budget
            assert other.fidelity <= Fidelity.ROUNDING


def test_infeasible_budget_names_the_smallest_plan_and_what_would_help() -> None:
    budget = bytes_of(smallest()) - 1
    with pytest.raises(NothingFitsError) as caught:
        plan(budget)
    error = caught.value
    assert error.exit_code == 3
    assert error.missing_bytes == 1
    assert (error.budget_bytes, bytes_of(error.smallest)) == (budget, budget + 1)
    assert "budget" in {one.kind for one in error.helps}
    for one in error.helps:  # nothing is offered that would not help
        assert (one.device_bytes <= budget) == (one.kind != "budget")
    (first,) = (one for one in error.helps if one.kind == "budget")
    assert f"--budget {first.device_bytes / 1e9:.2f}GB or more" in str(error)  # can be pasted


def test_budget_of_the_smallest_plan_fits() -> None:
    assert bytes_of(plan(bytes_of(smallest())).chosen) <= bytes_of(smallest())


def test_a_planning_prints_in_a_line() -> None:
    made = roomy()
    assert repr(made).startswith("<Planning: <Plan rounding: packing, ")
    assert repr(made).endswith(f" a step> of {made.considered} settings>")


# ---- prices ----


def test_prices_are_traces_and_the_line_passes_through_the_plan() -> None:
    least, most = bytes_of(smallest()), bytes_of(roomy().chosen)
    chosen = plan((least + most) // 2).chosen
    price = pricer().price(chosen.strategies, chosen.micro_batching)
    assert price == chosen.price
    traced = pricer().memory(chosen.strategies, chosen.micro_batching)
    assert (price.peak, price.host_bytes) == (traced.peak, traced.trace.host_bytes)
    again = pricer().seconds(chosen.strategies, chosen.micro_batching, price.counts)
    assert price.step_seconds == again
    assert chosen.line is not None
    recomputed = find(chosen.strategies, Checkpointing) or find(
        chosen.strategies, ActivationOffload
    )
    kept = 6 - (6 if recomputed and recomputed.layers is None else getattr(recomputed, "layers", 0))
    tokens = pricer().cutting(chosen.strategies, chosen.micro_batching).worst_tokens
    assert chosen.line.peak_bytes(tokens, kept) == pytest.approx(price.device_bytes, rel=1e-6)
    assert chosen.line.peak_bytes(tokens // 2, kept) < price.device_bytes


def test_the_time_of_every_setting_is_that_of_its_own_trace() -> None:
    search = Search(within(SMALL, ROOMY, laptop()), pricer())
    search.run()
    row = search.rows["low-bit, graphs"]
    price = row.fastest()
    assert row.fastest_seconds == pytest.approx(price.step_seconds, rel=0.05)
    small = row.smallest()
    assert row._seconds(row._least) == pytest.approx(small.step_seconds, rel=0.05)


# ---- what wins a tie ----


def priced(seconds: float, *strategies: Strategy, tokens: int | None = None) -> Price:
    return Price(
        strategies=strategies,
        micro_batching=MicroBatching(max_tokens=tokens),
        peak=MemoryPeak({}, 1, 1, 1),
        counts=StepCounts(),
        step_seconds=seconds,
    )


EXACT, HALF = priced(1.0), priced(0.98, HalfPrecision())
LOW, SHORT = priced(1.0, LowBitAdamW()), priced(0.92, LowBitAdamW(16))
KEPT8 = priced(0.98, LowBitAdamW(), GradientRelease("kept8"))


@pytest.mark.parametrize(
    ("prices", "wanted"),
    [
        ([EXACT, HALF], EXACT),  # 2 % is a calibration's noise
        ([EXACT, dataclasses.replace(HALF, step_seconds=0.9)], None),
        ([LOW, KEPT8], LOW),
        # A strategy is not left out where smaller micro-batches would take its place.
        ([dataclasses.replace(LOW, micro_batching=MicroBatching(max_tokens=9)), KEPT8], KEPT8),
        ([LOW, SHORT], LOW),  # 16-bit masters must be a tenth faster
        ([LOW, dataclasses.replace(SHORT, step_seconds=0.89)], None),
        ([SHORT], SHORT),
    ],
)
def test_about_as_fast_the_more_faithful_and_the_simpler_wins(
    prices: Sequence[Price], wanted: Price | None
) -> None:
    assert chosen_of(prices) is (wanted or prices[1])


# ---- what the user fixed, and permits ----


def test_exact_forbids_rounding() -> None:
    chosen = plan(ROOMY, exact=True).chosen
    assert chosen.fidelity is Fidelity.EXACT
    assert any("--exact forbids rounding" in one for one in chosen.sentences())


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("freeze", "freezing"), ("truncate", "truncation")],
)
def test_allowed_strategy_is_used_where_it_is_faster(name: str, strategy: str) -> None:
    made = plan(bytes_of(smallest()) * 1.02, allow=frozenset({name}))
    assert strategy in names_of(made.chosen)
    assert seconds_of(made.chosen) < seconds_of(smallest())


def test_an_allowed_strategy_that_is_slower_is_priced_and_not_chosen() -> None:
    made = plan(bytes_of(smallest()) * 1.02, allow=frozenset({"lora"}))
    (with_lora,) = (one for one in made.candidates if "lora" in names_of(one))
    assert seconds_of(made.chosen) < seconds_of(with_lora) < seconds_of(smallest())


def test_permissions_are_checked() -> None:
    with pytest.raises(ConfigError, match="'truncate'"):
        plan(4e9, allow=frozenset({"truncat"}))
    with pytest.raises(ConfigError, match="exclude each other"):
        plan(4e9, exact=True, allow=frozenset({"lora"}))


def small(**arguments: object) -> Task:
    shape = dict.fromkeys(arguments)
    return task(
        bert(4, 64, 100),
        lengths=(16,) * 64,
        user_set=frozenset(shape),
        **arguments,
    )


def test_users_precision_optimizer_and_layers_are_kept() -> None:
    made = planned(small(bf16=True), ROOMY, h200()).chosen
    assert not names_of(made) & {"lowbit_adamw", "half_precision"}
    assert any(one.about == "yours.precision" for one in made.decisions)
    made = planned(small(optim="adafactor"), ROOMY, h200()).chosen
    assert "lowbit_adamw" not in names_of(made)
    assert any("adafactor: you set it" in one for one in made.sentences())
    for layers in (True, False):
        given = small(gradient_checkpointing=layers)
        search = Search(within(given, ROOMY, h200()), Pricer(within(given, ROOMY, h200())))
        assert all(one.dial != "recomputed" for one in search.table.recipes)
        assert "checkpointing" not in search.table.left_out


def test_own_loss_is_not_captured() -> None:
    own = dataclasses.replace(small(), stock_loss=False)
    made = planned(own, ROOMY, h200())
    assert "cuda_graphs" not in names_of(made.chosen)
    assert any("CUDA graphs, because" in one for one in made.chosen.sentences())


def test_strategies_given_by_hand_are_kept_and_only_micro_batches_chosen() -> None:
    given = (Packing(), Checkpointing(2), LowBitAdamW())
    whole = plan_for(within(SMALL, ROOMY, laptop()), strategies=given).chosen
    assert (whole.strategies, whole.micro_batching) == (given, MicroBatching())
    less = within(SMALL, bytes_of(whole) - 20_000_000, laptop())
    cut = plan_for(less, strategies=given).chosen
    assert cut.strategies == given
    assert cut.micro_batching.max_tokens is not None


def test_cpu_plan_has_no_gpu_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "has_fast_bf16", lambda: False)
    made = planned(small(), ROOMY, None).chosen
    assert names_of(made) == {"packing"}
    tight = planned(small(), 0.8 * bytes_of(made), None).chosen
    assert names_of(tight) <= {"packing", "checkpointing"}
    assert bytes_of(tight) <= 0.8 * bytes_of(made)


# ---- the host ----


def test_missing_host_memory_rules_recipes_out() -> None:
    assert find(smallest().strategies, StateOffload) is not None
    with pytest.raises(NothingFitsError):
        plan(bytes_of(smallest()), host_bytes_free=10**9)


# ---- what else could be done ----


def test_other_permissions_more_budget_and_smaller_models_are_searched() -> None:
    least, most = bytes_of(smallest()), bytes_of(roomy().chosen)
    made = plan(least + (most - least) // 5)
    chosen = made.chosen.price
    assert chosen is not None
    found = alternatives(made)
    assert [one.name for one in found.allow] == ["optimizer", "lora", "freeze", "truncate"]
    for reach in found.allow:
        assert reach.smallest.fidelity > Fidelity.ROUNDING
        assert reach.decision(chosen).sentence().startswith(f"--allow {reach.name} (")
    if found.more is not None:
        assert found.more.budget_bytes > bytes_of(made.chosen)
        assert found.more.price.step_seconds <= 0.9 * chosen.step_seconds
    assert found.smaller == ()  # the family's models are all wider
    assert alternatives(plan(ROOMY, exact=True)).allow == ()
