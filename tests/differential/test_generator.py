"""The generator draws everything there is, and a case is a script."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.training_args import OptimizerNames

from differential import Case, cases, check, drawn
from differential.explained import EXPLAINED
from differential.models import CLASSIFIER_HEADS, FAMILIES, TASKS
from memfit.engine.loss import ClassWeightedLoss
from memfit.strategies import ORDER

TOP = Path(__file__).resolve().parents[2]
# Captured steps need a card: tests/gpu compares them. What is divided over ranks needs several: see
# several_ranks.py, and tests/faults/test_several_ranks.py for fully sharded models.
ELSEWHERE = {"cuda_graphs", "fully_sharded"}
DRAWN = [drawn(seed) for seed in range(3000)]


def test_every_optimizer_of_the_arguments_is_drawn_or_says_what_it_needs() -> None:
    named = {one.value for one in OptimizerNames}
    assert set(cases.OPTIMIZERS) | set(cases.NEEDS_MORE) == named
    assert not set(cases.OPTIMIZERS) & set(cases.NEEDS_MORE)
    assert {case.optim for case in DRAWN} == {*cases.OPTIMIZERS, *cases.OWN_OPTIMIZERS}


def test_every_strategy_of_the_registry_is_drawn() -> None:
    asked = {text.partition("(")[0] for case in DRAWN for text in case.strategies}
    assert asked == {kind.__name__ for kind in ORDER if kind.name not in ELSEWHERE}


def test_every_task_head_family_loss_and_collator_is_drawn() -> None:
    assert {case.task for case in DRAWN} == set(TASKS)
    assert {case.head for case in DRAWN} == {"own", *CLASSIFIER_HEADS}
    assert {case.family for case in DRAWN} == set(FAMILIES)
    assert len(FAMILIES) == 15
    assert {case.loss for case in DRAWN} == set(cases.LOSSES)
    assert {case.collator for case in DRAWN} == set(cases.COLLATORS)
    assert {case.schedule for case in DRAWN} == set(cases.SCHEDULES)


def test_whatever_a_case_may_ask_for_is_asked_for_by_some() -> None:
    usual = Case()
    for field in dataclasses.fields(Case):
        others = {repr(getattr(case, field.name)) for case in DRAWN}
        assert others - {repr(getattr(usual, field.name))}, field.name


def test_a_case_is_what_it_prints_and_a_seed_is_one_case() -> None:
    for case in DRAWN[:50]:
        assert eval(repr(case), {"Case": Case}) == case
        assert drawn(case.seed) == case


def test_differences_that_are_meant_are_in_the_documents() -> None:
    words = " ".join((TOP / "docs" / "differences.md").read_text(encoding="utf-8").split())
    assert [reason for reason in EXPLAINED.values() if reason not in words] == []


def test_a_case_that_differs_is_printed_as_a_script_that_finds_it_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = Case(task="multi", loss="class_weights", micro_rows=3)
    check(case)
    with monkeypatch.context() as changed:
        changed.setattr(ClassWeightedLoss, "weight_of", lambda _, labels: len(labels) ** 2)
        with pytest.raises(AssertionError, match="loss is") as found:
            check(case)
    script = tmp_path / "case.py"
    script.write_text(str(found.value).partition("by:\n\n")[2])
    done = subprocess.run([sys.executable, str(script)], cwd=TOP, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # nothing is broken any more
    assert repr(case) in script.read_text()
