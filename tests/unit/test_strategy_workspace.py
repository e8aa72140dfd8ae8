"""Small cuBLAS workspaces: set for the process that trains, and put back as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from strategy_fixtures import build, setup_of

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
    assert os.environ[VARIABLE] == ":4096:2:16:8"
    assert len(cleared) == 1
    setup.restore()
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
    assert VARIABLE not in os.environ
    assert cleared == []


def test_where_it_has_no_use_it_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setup = setup_of(build(), tmp_path)
    assert SmallWorkspace().unavailable(setup) == "a cpu has no cuBLAS"
    setup.card = find_card("T4")
    assert SmallWorkspace().unavailable(setup) == "this card's workspace is small already"
    monkeypatch.setenv(VARIABLE, ":16:8")
    assert SmallWorkspace().unavailable(setup) == f"you set {VARIABLE} yourself"
