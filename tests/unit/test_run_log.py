"""What a run writes down while it goes, how often, and how it says that it ended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from report_fixtures import Page
from transformers import TrainerControl, TrainerState

from memfit.errors import LossError
from memfit.records.results import OutputClaim, RunSummary
from memfit.records.run_log import FILE, read_log
from memfit.run.announcements import followed
from memfit.run.callbacks import RecordRun

ARGS: Any = SimpleNamespace(device=torch.device("cpu"))


class Run:
    """A Trainer's calls to its callback, with time that passes when told to."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.seconds = 0.0
        self.record = RecordRun(folder, earlier_seconds=10.0, clock=lambda: self.seconds)
        self.record.begin(RunSummary(model="m", task="single_label", status="running"))
        self.state = TrainerState(max_steps=steps, is_world_process_zero=True)
        self.control = TrainerControl()
        self.record.on_train_begin(ARGS, self.state, self.control)

    def step(self, seconds: float, **logged: Any) -> None:
        self.seconds += seconds
        self.state.global_step += 1
        self.record.on_step_end(ARGS, self.state, self.control)
        if logged:
            self.state.log_history.append({**logged, "step": self.state.global_step})
            self.record.on_log(ARGS, self.state, self.control)


def test_short_runs_are_written_down_whole(tmp_path: Path) -> None:
    run = Run(tmp_path, 10)
    for _ in range(10):
        run.step(0.01, loss=0.5)
    run.record.on_train_end(ARGS, run.state, run.control)
    found = read_log(tmp_path)
    assert [sample.step for sample in found.samples] == list(range(1, 11))
    assert [entry["step"] for entry in found.logged] == list(range(1, 11))
    assert found.samples[0].now_bytes > 10**7  # this process
    assert found.samples[-1].seconds == pytest.approx(10.1)
    assert found.max_steps == 10
    assert found.begun is not None
    assert found.begun["model"] == "m"


def test_a_day_of_fast_steps_makes_a_small_file(tmp_path: Path) -> None:
    run = Run(tmp_path, 10**9)
    run.step(0.0)
    run.state.global_step = 1000
    for _ in range(9_000):  # a day of them
        run.step(9.6, loss=0.5)
    found = read_log(tmp_path)
    assert 1000 < len(found.samples) < 8000
    assert (tmp_path / FILE).stat().st_size < 2_000_000


def test_evaluations_and_adjustments_are_never_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path, 10**6)
    run.state.global_step = 1000
    run.step(10.0, loss=0.5)
    for number in range(50):
        run.state.log_history.append({"step": 1001, "adjustment": {"why": str(number)}})
        run.step(0.001, loss=0.5)
        run.state.log_history.append({"step": 1001, "eval_f1": number})
        run.record.on_log(ARGS, run.state, run.control)
    run.record.on_train_end(ARGS, run.state, run.control)
    logged = read_log(tmp_path).logged
    assert sum("adjustment" in entry for entry in logged) == 50
    assert sum("eval_f1" in entry for entry in logged) == 50
    assert sum("loss" in entry for entry in logged) == 1


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    record = RecordRun(tmp_path)
    state = TrainerState(is_world_process_zero=False)
    record.on_train_begin(ARGS, state, TrainerControl())
    record.on_step_end(ARGS, state, TrainerControl())
    record.on_log(ARGS, state, TrainerControl())
    record.on_train_end(ARGS, state, TrainerControl())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "how", "why"),
    [
        (LossError("the loss is nan at step 3"), "failed", "the loss is nan at step 3"),
        (RuntimeError("broken\nmore"), "failed", "RuntimeError: broken"),
        (KeyboardInterrupt(), "stopped", ""),
    ],
)
def test_how_a_run_ended_is_written_down_with_its_page(
    tmp_path: Path, error: BaseException, how: str, why: str
) -> None:
    run, claim = Run(tmp_path, 10), OutputClaim(tmp_path)
    run.step(0.5, loss=0.7)
    claim.keep()
    with pytest.raises(type(error)), followed(claim):
        raise error
    found = read_log(tmp_path)
    assert (found.ended, found.step) == (how, 1)
    assert found.why.startswith(why)
    words = Page((tmp_path / "report.html").read_text(encoding="utf-8")).words
    assert f"{how.capitalize()} 10 s of training" in words
    assert why in words


def test_a_run_that_came_to_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="early"), followed(OutputClaim(tmp_path)):
        raise RuntimeError("early")
    assert list(tmp_path.iterdir()) == []


def test_a_page_of_an_earlier_end_is_removed_when_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("stopped")
    Run(tmp_path, 3)
    assert not (tmp_path / "report.html").exists()
