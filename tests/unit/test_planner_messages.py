"""What the planner says: figures in every reason, both languages."""

from __future__ import annotations

import dataclasses
import re
from functools import cache

import pytest
from planner_fixtures import BERT_LARGE, FormulaPricer, h200, planned, pricer_of

from memfit.config.schema import FIDELITY_NAMES
from memfit.i18n import shown
from memfit.planner.search import Planning
from memfit.report.formatting import named
from memfit.strategies import BY_NAME, Fidelity, called

CHINESE = re.compile("[\u4e00-\u9fff]")


@pytest.mark.parametrize("name", BY_NAME)
def test_every_strategy_has_a_name_in_both_languages(name: str) -> None:
    said = called(name)
    assert said == BY_NAME[name].title
    assert said != name or name in ("packing", "freezing")
    assert CHINESE.search(shown(said, "zh")) or name in ("lora", "cuda_graphs")


def test_reports_call_strategies_and_fidelities_as_plans_do() -> None:
    assert {name: named("strategy", name) for name in BY_NAME} == {
        name: kind.title for name, kind in BY_NAME.items()
    }
    assert list(FIDELITY_NAMES) == [str(one) for one in Fidelity]


def test_a_weighted_loss_is_not_called_the_users_own() -> None:
    workload, card = dataclasses.replace(BERT_LARGE, stock_loss=False, weighted_loss=True), h200()
    found = planned(workload, int(80e9), card, pricer=FormulaPricer(workload, card)).chosen
    said = "\n".join(found.sentences())
    assert "the loss is weighted by class" in said
    assert "your own loss" not in said


def test_a_strategy_of_unknown_name_keeps_it() -> None:
    assert called("somebody_elses") == "somebody_elses"


@cache
def planning(budget: float, *, exact: bool = False) -> Planning:
    pricer = pricer_of(BERT_LARGE, h200())
    return planned(
        BERT_LARGE, int(budget), h200(), exact=exact, pricer=pricer, host_bytes_free=10**12
    )


def test_reasons_have_the_figures() -> None:
    said = "\n".join(planning(2.7e9).chosen.sentences())
    assert re.search(r"recomputes .*\d+ of 24 layers: saves \d+ MB, costs \d+ % of the step", said)
    assert re.search(r"peaks at \d\.\d\d GB of 2\.70 GB \(9\d(\.\d)? %\), while training", said)
    assert re.search(r"4 bytes a parameter instead of 12, saves 2\.\d\d GB", said)
    assert "35 % of every batch" in said
    assert "an epoch of 219 steps" in said


def test_reasons_are_also_said_in_chinese() -> None:
    chosen = planning(4e9).chosen
    english, chinese = chosen.sentences("en"), chosen.sentences("zh")
    assert len(english) == len(chinese)
    assert all(CHINESE.search(sentence) for sentence in chinese)
    assert re.search(r"重计算 24 层中", "\n".join(chinese))


def test_clipping_is_named_as_the_reason_for_kept_gradients() -> None:
    said = "\n".join(planning(2.7e9).chosen.sentences())
    assert "because the global norm is needed to clip at 1: saves" in said


def test_offload_names_the_host_memory() -> None:
    said = "\n".join(planning(2.0e9).chosen.sentences())
    assert re.search(r"AdamW runs on the CPU .*\d\.\d\d GB there: saves .* costs \d+ %", said)


def test_slack_plan_says_what_recomputing_would_cost() -> None:
    said = "\n".join(planning(40e9).chosen.sentences())
    assert re.search(r"not used: recomputing layers, because everything fits .* cost \d+ %", said)


def test_exact_plan_says_why_rounding_is_not_used() -> None:
    said = "\n".join(planning(16e9, exact=True).chosen.sentences())
    assert "not used: the low-bit optimizer, because --exact forbids rounding" in said
