"""Choosing a plan: the fastest that fits, nothing the user did not allow."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as values
from planner_fixtures import BERT_LARGE, FormulaPricer, bert, h200, planned, pricer_of, task

from memfit.errors import ConfigError, DoesNotFitError
from memfit.planner.advice import NothingFitsError
from memfit.planner.candidates import Candidate
from memfit.planner.search import Planning
from memfit.planner.space import PlanRequest, candidates
from memfit.planner.workload import Workload
from memfit.strategies import Fidelity, half_precision

pytestmark = pytest.mark.slow
PLENTY_OF_HOST = 10**12


def plan(workload: Workload, budget_bytes: float, **options: Any) -> Planning:
    card = options.pop("card", h200())
    pricer = options.pop("pricer", None) or pricer_of(workload, card)
    options.setdefault("host_bytes_free", PLENTY_OF_HOST)
    return planned(workload, int(budget_bytes), card, pricer=pricer, **options)


TASK = BERT_LARGE
SMALL = task(bert(layers=6))
"""A third of the candidates, for tests that plan many times; 0.93 GB is its least."""


@cache
def made(budget_bytes: float) -> Planning:
    """The plan of BERT-Large for a budget; tests that only read it share it."""
    return plan(TASK, budget_bytes)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return TASK


def seconds(planning: Planning) -> float:
    assert planning.chosen.price is not None
    return planning.chosen.price.step_seconds


def test_slack_budget_recomputes_nothing_and_runs_whole_batches() -> None:
    chosen = made(80e9).chosen
    assert chosen.candidate.get("checkpointing") is None
    assert chosen.candidate.get("activation_offload") is None
    assert chosen.candidate.get("optimizer_offload") is None
    assert chosen.micro_batching.max_tokens is None
    assert chosen.candidate.get("cuda_graphs") is not None


def test_binding_budget_is_kept_and_nearly_used() -> None:
    chosen = made(4e9).chosen
    assert chosen.price is not None
    assert 0.9 * 4e9 < chosen.price.device_bytes <= 4e9
    assert chosen.fidelity <= Fidelity.ROUNDING


def test_a_planning_and_its_plan_print_in_a_line() -> None:
    planning = made(4e9)
    assert repr(planning).startswith(f"<Planning: <Plan {planning.chosen.fidelity}: packing, ")
    assert repr(planning).endswith(f" a step> of {planning.considered} candidates>")
    assert len(repr(planning)) < 400


@pytest.mark.parametrize("budget", [2e9, 3e9, 4e9])
def test_every_parameter_learns_in_small_budgets(budget: float) -> None:
    chosen = made(budget).chosen
    assert chosen.price is not None
    assert chosen.price.device_bytes <= budget
    assert chosen.fidelity <= Fidelity.ROUNDING


def test_exact_forbids_rounding_and_fits_16_gb(workload: Workload) -> None:
    chosen = plan(workload, 16e9, exact=True).chosen
    assert chosen.fidelity is Fidelity.EXACT
    assert chosen.price is not None
    assert chosen.price.device_bytes <= 16e9


def test_infeasible_budget_names_the_smallest_plan_and_what_is_missing(workload: Workload) -> None:
    with pytest.raises(NothingFitsError) as caught:
        plan(workload, 0.925e9)
    error = caught.value
    assert isinstance(error, DoesNotFitError)
    assert error.exit_code == 3
    assert error.smallest.price is not None
    assert error.missing_bytes == error.smallest.price.device_bytes - 925_000_000
    assert error.budget_bytes == 925_000_000
    assert {one.kind for one in error.helps} == {"budget", "allow", "length", "model"}
    assert [one.value for one in error.helps if one.kind == "allow"] == ["truncate"]
    for one in error.helps:  # nothing is offered that would not help
        assert (one.device_bytes <= 925_000_000) == (one.kind != "budget")
    assert "0.93 GB" in str(error)
    (budget,) = (one for one in error.helps if one.kind == "budget")
    assert f"--budget {budget.device_bytes / 1e9:.2f}GB or more" in str(error)  # can be pasted


def test_budget_of_the_smallest_plan_fits() -> None:
    with pytest.raises(NothingFitsError) as caught:
        plan(SMALL, 0.9e9)
    price = caught.value.smallest.price
    assert price is not None
    found = plan(SMALL, price.device_bytes).chosen
    assert found.price is not None
    assert found.price.device_bytes <= price.device_bytes
    with pytest.raises(NothingFitsError):
        plan(SMALL, price.device_bytes - 1)


class NoisyPricer(FormulaPricer):
    """Half precision is faster than fp32 by so much, and recomputing layers by 0.4 %."""

    def __init__(self, workload: Workload, faster: float) -> None:
        super().__init__(workload, None)
        self.faster = faster

    def _seconds(self, candidate: Candidate) -> float:
        exact = candidate.fidelity is Fidelity.EXACT
        noise = 0.004 if candidate.get("checkpointing") is not None else 0.0
        return (1.0 if exact else 1.0 - self.faster) - noise


@pytest.mark.parametrize(
    ("faster", "fidelity"),
    [(-0.02, Fidelity.EXACT), (0.02, Fidelity.EXACT), (0.1, Fidelity.ROUNDING)],
)
def test_what_is_faster_by_a_calibrations_noise_costs_no_fidelity_and_no_strategy(
    faster: float, fidelity: Fidelity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_precision, "has_fast_bf16", lambda: True)  # whatever CPU this is
    small = task(bert(layers=2, width=64, vocabulary=100), lengths=(9, 12, 16, 20))
    chosen = plan(small, 80e9, card=None, pricer=NoisyPricer(small, faster)).chosen
    assert chosen.fidelity is fidelity
    assert chosen.candidate.get("checkpointing") is None


@pytest.mark.parametrize("exact", [False, True])
def test_more_memory_never_gives_a_slower_plan(exact: bool) -> None:
    pricer = FormulaPricer(SMALL, h200(), off=0.01)
    budgets = [budget / 10 * 1e9 for budget in range(12 if exact else 10, 40 if exact else 27, 2)]
    times = [seconds(plan(SMALL, one, exact=exact, pricer=pricer)) for one in budgets]
    for smaller, larger in itertools.pairwise(times):
        assert larger <= smaller
    assert len(set(times)) > 4  # all of them are met by other plans


@settings(max_examples=5, deadline=None)
@given(
    budget=values.integers(1_000_000_000, 4_000_000_000),
    more=values.integers(0, 1_000_000_000),
)
def test_more_memory_never_gives_a_slower_plan_at_any_two_budgets(budget: int, more: int) -> None:
    small, large = (plan(SMALL, one) for one in (budget, budget + more))
    assert seconds(large) <= seconds(small)


@pytest.mark.parametrize("budget", [2e9, 2.5e9, 3e9, 6e9, 20e9])
def test_effective_batch_learning_and_lengths_are_never_changed(budget: float) -> None:
    planning = made(budget)
    for one in (planning.chosen, *planning.candidates):
        names = {strategy.name for strategy in one.strategies}
        assert not names & {"freezing", "lora", "truncation", "frozen_features"}
        assert not names & {"small_state_optimizer"}
        assert one.digest.effective_rows == 32


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("lora", "lora"), ("freeze", "freezing"), ("truncate", "truncation")],
)
def test_allowed_strategy_is_used_where_it_is_faster(
    workload: Workload, name: str, strategy: str
) -> None:
    without = made(2e9)
    chosen = plan(workload, 2e9, allow=frozenset({name}))
    assert chosen.chosen.candidate.get(strategy) is not None
    assert seconds(chosen) < seconds(without)


def test_unknown_permission_is_refused_with_the_nearest_name(workload: Workload) -> None:
    with pytest.raises(ConfigError, match="'truncate'"):
        plan(workload, 4e9, allow=frozenset({"truncat"}))


def test_exact_with_permissions_is_refused(workload: Workload) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        plan(workload, 4e9, exact=True, allow=frozenset({"lora"}))


def test_missing_host_memory_rules_a_plan_out_and_is_said() -> None:
    rich = plan(SMALL, 1e9).chosen
    assert rich.candidate.get("optimizer_offload") is not None
    with pytest.raises(NothingFitsError):
        plan(SMALL, 1e9, host_bytes_free=2 * 10**9)


def test_passed_over_plan_is_noted(workload: Workload) -> None:
    # Gradients in host memory make room for fewer recomputed layers.
    pricer = FormulaPricer(workload, h200(), host_is_fast=True)
    rich = plan(workload, 2.7e9, pricer=pricer)
    assert rich.chosen.candidate.get("gradient_release").mode == "host"
    poor = plan(workload, 2.7e9, pricer=pricer, host_bytes_free=10**9)
    assert poor.chosen.candidate.get("gradient_release").mode != "host"
    assert [note.about for note in poor.notes] == ["note.host"]
    assert seconds(poor) > seconds(rich)


def test_full_disk_is_noted(workload: Workload) -> None:
    planning = plan(workload, 4e9, disk_bytes_free=10**9)
    assert [note.about for note in planning.notes] == ["note.disk"]
    assert "1.00 GB" in planning.notes[0].sentence()
    assert not plan(workload, 4e9, disk_bytes_free=10**12).notes


def test_plan_that_does_not_fit_when_traced_is_not_chosen(workload: Workload) -> None:
    pricer = FormulaPricer(workload, h200(), off=0.02)
    for budget in (2.6e9, 3.3e9):
        chosen = plan(workload, budget, pricer=pricer).chosen
        assert chosen.price is not None
        assert chosen.price.traced
        assert chosen.price.device_bytes <= budget


def test_short_masters_only_where_they_are_worth_it() -> None:
    for budget in (2.3e9, 2.7e9, 3e9, 5e9):
        planning = made(budget)
        low = planning.chosen.candidate.get("lowbit_adamw")
        if low is None or low.master_bits == 24:
            continue
        # Nothing with longer masters that fits is nearly as fast.
        others = [
            one.step_seconds
            for one in planning.prices
            if one.device_bytes <= budget
            and (stored := one.candidate.get("lowbit_adamw")) is not None
            and stored.master_bits == 24
        ]
        assert min(others, default=1.0) > seconds(planning)
    assert made(20e9).chosen.candidate.get("lowbit_adamw").master_bits == 24


def test_plan_is_within_a_tenth_of_the_fastest_that_rounds(workload: Workload) -> None:
    pricer = pricer_of(workload, h200())
    asked = PlanRequest(workload, h200(), pricer.problem)
    every = [pricer.quick(one) for one in candidates(asked)]
    for budget in (2.2e9, 3e9):
        best = min(one.step_seconds for one in every if one.device_bytes <= budget)
        assert seconds(made(budget)) <= best / 0.9


def test_users_precision_and_optimizer_are_kept() -> None:
    workload = task(bf16=True, user_set=frozenset({"bf16"}))
    planning = plan(workload, 8e9)
    for one in (planning.chosen, *planning.candidates):
        names = {strategy.name for strategy in one.strategies}
        assert not names & {"lowbit_adamw", "half_precision"}
    assert any(one.about == "yours.precision" for one in planning.chosen.decisions)


def test_users_checkpointing_is_kept_and_not_doubled() -> None:
    workload = task(gradient_checkpointing=True, user_set=frozenset({"gradient_checkpointing"}))
    planning = plan(workload, 8e9)
    for one in (planning.chosen, *planning.candidates):
        assert one.candidate.get("checkpointing") is None
    assert any(one.about == "yours.checkpointing" for one in planning.chosen.decisions)


def test_checkpointing_the_user_forbade_is_not_used() -> None:
    workload = task(gradient_checkpointing=False, user_set=frozenset({"gradient_checkpointing"}))
    assert plan(workload, 4e9).chosen.candidate.get("checkpointing") is None


def test_own_loss_is_not_captured() -> None:
    workload = dataclasses.replace(SMALL, stock_loss=False)
    planning = plan(workload, 80e9)
    assert planning.chosen.candidate.get("cuda_graphs") is None
    assert "cuda_graphs" in planning.left_out
    assert any("CUDA graphs, because" in one for one in planning.chosen.sentences())


def test_cpu_plan_has_no_gpu_strategies() -> None:
    planning = plan(TASK, 8e9, card=None)
    names = {one.name for one in planning.chosen.strategies}
    assert names <= {"packing", "checkpointing", "half_precision", "fused_attention"}
    assert "packing" in names


def test_padded_batches_where_packing_is_not_possible(workload: Workload) -> None:
    pricer = FormulaPricer(workload, h200(), packs=False)
    planning = plan(workload, 4e9, pricer=pricer)
    assert planning.chosen.candidate.get("packing") is None
    assert planning.chosen.candidate.get("cuda_graphs") is None
    limit = planning.chosen.micro_batching.max_tokens
    assert limit is None or limit % workload.longest_tokens == 0
