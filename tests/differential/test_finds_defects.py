"""Defects that were found and put right are found by random cases when they are put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers

from differential import Case, check, differences
from differential.models import DECODERS
from differential.selection import first_cases
from memfit import BudgetTrainer
from memfit.engine.loss import BatchNoise
from memfit.engine.micro_batches import row_count
from memfit.strategies.lowbit.gradient_sinks import KeptInt8
from memfit.training import model_changes, trainer


def first(wanted: Callable[[Case], object]) -> list[Case]:
    """The generator's first cases of a kind, none of which differs."""
    cases = first_cases(lambda case: case.budget is None and wanted(case), 3)
    for case in cases:
        check(case)
    return cases


def reported(case: Case) -> bool:
    return bool(differences(case))


def test_an_own_loss_that_is_handed_packed_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = first(
        lambda c: (
            c.strategies == ("Packing()",) and c.loss in ("rows", "body") and c.head == "own"
            and c.family not in DECODERS and c.family not in ("mpnet", "deberta-v2")
            and c.collator != "maskless" and not c.outputs
        )
    )  # fmt: skip
    fields_of = model_changes.ModelChanges._fields_of

    def unseen(self: Any, *args: Any) -> Any:
        return {**fields_of(self, *args), "sees_inputs": False}

    monkeypatch.setattr(model_changes.ModelChanges, "_fields_of", unseen)
    assert all(map(reported, cases))


def test_items_of_several_labels_that_are_counted_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = first(lambda c: c.task == "multi" and c.loss == "func" and not _is_rounded(c))

    def rows(self: Any, batches: Any, device: Any) -> Any:  # noqa: ARG001
        return row_count(batches[0])

    monkeypatch.setattr(BudgetTrainer, "_get_num_items_in_batch", rows)
    assert all(map(reported, cases))


def test_a_search_over_the_batch_size_that_drops_accumulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = first(lambda c: c.trial and c.accumulation > 1)
    stock = transformers.Trainer._hp_search_setup
    monkeypatch.setattr(BudgetTrainer, "_hp_search_setup", stock)
    assert all(map(reported, cases))


def test_kept_gradients_of_the_last_step_added_where_a_weight_is_first_used_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = first(
        lambda c: (
            c.head == "branches" and "GradientRelease('kept8')" in c.strategies
            and c.effective > 2 and c.steps and c.steps > 2
        )
    )  # fmt: skip
    prepare, take = KeptInt8.prepare, KeptInt8.take

    def noted(self: Any, index: int) -> None:
        prepare(self, index)
        self._late = index > 0

    def added(self: Any, p: Any, grad: Any) -> None:
        if self._late:
            self._due.setdefault(p, None)
        take(self, p, grad)

    monkeypatch.setattr(KeptInt8, "prepare", noted)
    monkeypatch.setattr(KeptInt8, "take", added)
    assert any(map(reported, cases))


def test_noise_that_is_scaled_by_all_packed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = first(
        lambda c: (
            c.neftune and c.strategies == ("Packing()",) and c.effective >= 6 and not c.micro_rows
            and not c.micro_tokens and c.family not in (*DECODERS, "mpnet", "deberta-v2")
            and c.loss not in ("rows", "body", "weighted") and not c.outputs
        )
    )  # fmt: skip
    monkeypatch.setattr(BatchNoise, "begin_step", lambda _, __: None)
    assert all(map(reported, cases))


def test_changes_to_a_model_that_are_not_undone_for_the_next_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changing = {"Packing()", "LowBitAdamW()"}  # a layer may be recomputed twice and be the same
    cases = first(
        lambda c: (
            c.again == "trainer" and changing & set(c.strategies) and len(c.strategies) == 1
            and c.head == "own" and c.family in ("bert", "ernie", "electra", "roberta")
            and c.task == "single" and not c.outputs and c.collator != "left"
        )
    )  # fmt: skip
    for module in (trainer, model_changes):
        monkeypatch.setattr(module, "give_back", lambda _: None)
    assert all(map(reported, cases))


def _is_rounded(case: Case) -> bool:
    return any(text.startswith(("LowBit", "Half")) for text in case.strategies)
