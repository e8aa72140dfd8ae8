"""Small cuBLAS workspaces: set for the process that trains, and put back as they were."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from strategy_fixtures import build, setup_of

from memfit import BudgetTrainer
from memfit.memory.cards import find_card
from memfit.strategies import SmallWorkspace

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Workspaces of this process as a card's torch would drop them, one entry a call."""
    calls: list[None] = []
    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append(None), raising=False
    )
    return calls


@pytest.mark.parametrize("before", [None, ":4096:2:16:8"])
def test_workspaces_are_made_anew_small_and_the_environment_is_given_back(
    before: str | None, cleared: list[None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    setup = setup_of(build(), tmp_path)
    SmallWorkspace().change(setup)
    assert os.environ.get(VARIABLE) == before
    (training,) = setup.around_training
    with training():
        assert os.environ[VARIABLE] == ":4096:2:16:8"
        assert len(cleared) == 1
    assert os.environ.get(VARIABLE) == before
    # One made small would be written to beyond its end under the large setting.
    assert len(cleared) == (2 if before is None else 1)


def test_a_plan_for_another_card_leaves_this_process_alone(
    cleared: list[None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    setup = setup_of(build(), tmp_path)
    setup.card = find_card("H200")
    assert SmallWorkspace().unavailable(setup) == ""
    SmallWorkspace().change(setup)
    assert setup.around_training == []
    assert VARIABLE not in os.environ
    assert cleared == []


def test_where_it_has_no_use_it_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setup = setup_of(build(), tmp_path)
    assert SmallWorkspace().unavailable(setup) == "a cpu has no cuBLAS"
    setup.card = find_card("T4")
    assert SmallWorkspace().unavailable(setup) == "this card's workspace is small already"
    monkeypatch.setenv(VARIABLE, ":16:8")
    assert SmallWorkspace().unavailable(setup) == f"you set {VARIABLE} yourself"


def test_a_training_enters_and_leaves_what_is_around_it(tmp_path: Path) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def noting() -> Iterator[None]:
        seen.append("begins")
        try:
            yield
        finally:
            seen.append("ends")

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append("step")
            raise KeyError("something of the user's")

    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": 0}] * 16
    trainer = BudgetTrainer(build(), args, train_dataset=rows, callbacks=[Stop()])
    trainer.setup.around_training.append(noting)
    with pytest.raises(KeyError, match="of the user's"):
        trainer.train()
    assert seen == ["begins", "step", "ends"]
