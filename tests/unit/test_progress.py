"""The progress bar: what it says, in a terminal and in a pipe."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import TrainerControl, TrainerState

from memfit.training.progress import MemfitProgress, MemoryMeter, MemoryUse


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def play(
    steps: int = 40, *, terminal: bool = False, first: int = 0, evaluate_at: int | None = None,
    **settings: Any,
) -> str:  # fmt: skip
    """What is printed for a training of 2 s a step, 10 s the first."""
    written, clock = io.StringIO(), Clock()
    console = Console(file=written, force_terminal=terminal, width=160, color_system=None)
    progress = MemfitProgress(console=console, clock=clock, **settings)
    args: Any = SimpleNamespace(device=torch.device("cpu"), metric_for_best_model="f1")
    state, control = TrainerState(max_steps=steps, global_step=first), TrainerControl()
    progress.on_train_begin(args, state, control)
    for step in range(first + 1, steps + 1):
        clock.seconds += 10 if step == first + 1 else 2
        state.global_step, state.epoch = step, step / 20
        progress.on_step_end(args, state, control)
        progress.on_log(args, state, control, logs={"loss": 1 / step})
        if step == evaluate_at:
            progress.on_prediction_step(args, state, control)
            clock.seconds += 500
            progress.on_evaluate(args, state, control, metrics={"eval_f1": 0.9312, "eval_loss": 1})
    progress.on_train_end(args, state, control)
    return written.getvalue()


def test_in_a_pipe_there_are_plain_lines_and_not_too_many():
    lines = play().splitlines()
    assert lines[0] == "training: 40 steps"
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 20
    assert steps[0].startswith("step 2/40  loss 1.0000  process ")
    assert steps[0].endswith("  1 min 16 s left")
    assert "\x1b" not in "".join(lines)


def test_the_total_time_is_said_after_the_first_steps_without_the_slow_first_one():
    said = [line for line in play().splitlines() if "will take" in line]
    assert said == [
        "training will take about 6 min 40 s by the first step, evaluation aside",
        "training will take about 1 min 20 s, evaluation aside",
    ]


def test_a_short_run_says_its_time_after_the_first_step():
    lines = play(3).splitlines()
    assert "training will take about 30 s by the first step, evaluation aside" in lines
    assert not any("will take" in line for line in play(1).splitlines())


def test_a_predicted_time_is_said_before_the_first_step():
    lines = play(step_seconds=3.0).splitlines()
    assert lines[0] == "training: 40 steps, about 2 min 00 s"
    assert not any("will take" in line for line in lines)


def test_evaluation_does_not_count_as_training_time_and_its_metric_is_shown():
    lines = play(evaluate_at=20).splitlines()
    assert "epoch 1.00: f1 0.9312" in lines
    after = next(line for line in lines if line.startswith("step 30/40"))
    assert "f1 0.9312" in after
    assert after.endswith("20 s left")  # 10 steps of 2 s, not the 500 s of the evaluation


def test_a_resumed_run_counts_what_is_left():
    lines = play(first=30).splitlines()
    assert lines[0] == "training: 10 steps"
    assert "training will take about 20 s, evaluation aside" in lines


def test_the_bar_in_a_terminal_shows_loss_memory_budget_and_time():
    use = MemoryUse(2**30, 3 * 2**30)
    settings: Any = {"budget_bytes": 4 * 2**30, "read_memory": lambda: use}
    shown = play(terminal=True, evaluate_at=20, **settings)
    assert "40/40" in shown
    assert "loss 0.0256" in shown
    assert "memory 1.00 GiB (peak 3.00 GiB of 4.00 GiB)" in shown
    assert "left" in shown


def test_on_a_cpu_the_process_is_called_so_and_held_against_no_budget():
    shown = play(budget_bytes=4 * 2**30)
    assert "  process " in shown
    assert not any(word in shown for word in ("memory", "peak", "4.00 GiB"))


def test_the_meter_of_a_cpu_reads_the_process_and_keeps_the_peak():
    meter = MemoryMeter(torch.device("cpu"))
    before = meter.read()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    held = meter.read()
    assert held.now_bytes - before.now_bytes == pytest.approx(block.nbytes, rel=0.2)
    del block
    after = meter.read()
    assert after.now_bytes < held.now_bytes
    assert after.peak_bytes == held.peak_bytes
