"""A training that came to its end is not lost, whatever the last save or evaluation runs into."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import same_weights
from transformers import AutoModelForSequenceClassification

from memfit.cli import run
from memfit.run import train
from memfit.training import saving
from memfit.training.trainer import BudgetTrainer

STEPS = 7  # an epoch


def words_for(by_plan: list[str], output: Path) -> list[str]:
    return [*by_plan, "--epochs", "1", "--quiet", "--output-dir", str(output)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, by_plan: list[str]) -> Path:
    """The same training without a failure."""
    output = tmp_path_factory.mktemp("whole") / "out"
    assert run(words_for(by_plan, output)) == 0
    return output


def assert_model_is_kept(output: Path, whole: Path, said: str) -> None:
    assert f"its model is saved in {output}" in said
    assert "Traceback" not in said
    assert same_weights(output / "model.safetensors", whole / "model.safetensors")
    model = AutoModelForSequenceClassification.from_pretrained(output)
    assert torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all()
    assert not (output / "summary.json").exists()


@pytest.mark.parametrize("limit_bytes", [0, 2000])
def test_a_last_checkpoint_that_cannot_be_written_leaves_the_model(
    tmp_path: Path,
    by_plan: list[str],
    whole: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    limit_bytes: int,
) -> None:
    """The system refuses the optimizer's file."""
    save, limits = (
        BudgetTrainer._save_optimizer_and_scheduler,
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )

    def limited(trainer: BudgetTrainer, *args: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
        try:
            save(trainer, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(BudgetTrainer, "_save_optimizer_and_scheduler", limited)
    output = tmp_path / "out"
    capsys.readouterr()
    assert run(words_for(by_plan, output)) == 1
    said = capsys.readouterr().err
    assert "checkpoint-7 could not be written" in said
    assert_model_is_kept(output, whole, said)
    monkeypatch.undo()
    # The folder is no finished run; begun again it becomes one.
    assert run(["train", "--resume", "--output-dir", str(output), "--quiet"]) == 0
    assert same_weights(output / "model.safetensors", whole / "model.safetensors")
    assert (output / "summary.json").exists()


def test_an_evaluation_that_fails_leaves_the_model(
    tmp_path: Path,
    by_plan: list[str],
    whole: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("no such metric")

    monkeypatch.setattr(train, "evaluate_predictions", broken)
    output = tmp_path / "out"
    capsys.readouterr()
    assert run(words_for(by_plan, output)) == 1
    said = capsys.readouterr().err
    assert "ValueError: no such metric" in said
    assert_model_is_kept(output, whole, said)


def test_a_save_that_fails_half_way_leaves_no_model_that_looks_finished(
    tmp_path: Path,
    by_plan: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BudgetTrainer, "_save_optimizer_and_scheduler", broken)
    output = tmp_path / "out"
    capsys.readouterr()
    words = [*words_for(by_plan, output), "--save-strategy", "steps", "--save-steps", "2"]
    assert run([*words, "--load-best-model-at-end", "false", "--eval-strategy", "no"]) == 1
    assert "its model is saved" not in capsys.readouterr().err
    assert not (output / "model.safetensors").exists()


def test_a_last_checkpoint_that_cannot_be_sealed_leaves_the_model(
    tmp_path: Path,
    by_plan: list[str],
    whole: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(folder: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    monkeypatch.setattr(saving, "write_manifest", full)
    assert run(words_for(by_plan, tmp_path / "out")) == 1
    said = capsys.readouterr().err
    assert f"checkpoint-{STEPS} could not be written: the disk is full" in said
    assert_model_is_kept(tmp_path / "out", whole, said)
