"""The largest batch tried before training: it tells time and memory, and leaves no trace."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from strategy_fixtures import arguments, build, collate, rows_of

from memfit import BudgetTrainer
from memfit.engine.micro_batches import MicroBatching
from memfit.errors import DoesNotFitError
from memfit.memory.memory_line import MemoryLine
from memfit.strategies import Checkpointing, GradientRelease, LowBitAdamW, Packing
from memfit.training.guard import rehearsal
from memfit.training.progress import MemfitProgress

ROWS = rows_of(48)
SINKS: dict[str, list[Any]] = {
    "adamw": [Packing()],
    "kept": [Packing(), LowBitAdamW()],
    "kept8": [Packing(), LowBitAdamW(), GradientRelease("kept8")],
    "host": [Packing(), LowBitAdamW(), GradientRelease("host")],
}


def trainer_of(
    folder: Path, strategies: list[Any], budget: str | None, model: Any = None, **named: Any
) -> BudgetTrainer:
    model = model or build("bert", hidden_size=128, intermediate_size=160, num_hidden_layers=4)
    args = arguments(folder, max_steps=4, learning_rate=1e-3, max_grad_norm=0.0, seed=3)
    given = {"train_dataset": ROWS, "data_collator": collate, **named}
    trainer = BudgetTrainer(model, args, strategies=strategies, budget=budget, **given)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


@pytest.mark.parametrize("name", SINKS)
def test_a_rehearsed_run_ends_with_the_weights_of_one_that_was_not(tmp_path, name, monkeypatch):
    monkeypatch.setattr(rehearsal, "_QUICK_SECONDS", 60.0)  # however busy the machine is
    ended = []
    for budget in (None, "10GB"):
        limits = MicroBatching()
        trainer = trainer_of(tmp_path, SINKS[name], budget, micro_batching=limits)
        torch.manual_seed(7)
        trainer.train()
        assert (trainer.guard.rehearsal is None) == (budget is None)
        ended.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(torch.equal(plain, rehearsed) for plain, rehearsed in zip(*ended, strict=True))


@pytest.mark.parametrize("rows_at_once", [1, 8])
def test_rows_without_a_label_may_be_the_longest(tmp_path, rows_at_once):
    """No batch of the training holds such rows only; the rehearsal's would."""
    longest = sorted(ROWS, key=lambda row: -len(row["input_ids"]))
    rows = [{**row, "labels": -100} for row in longest[:8]] + longest[8:]
    trainer = trainer_of(tmp_path, [], "10GB", train_dataset=rows)
    trainer.args.per_device_train_batch_size = rows_at_once
    stage = rehearsal.rehearse(trainer.guard, trainer.get_train_dataloader())
    assert stage is not None
    expected = longest[0] if rows_at_once > 1 else longest[8]
    assert max(stage.worst_lengths) == len(expected["input_ids"])


def test_the_longest_rows_are_what_is_tried(tmp_path):
    trainer = trainer_of(tmp_path, [], "10GB", micro_batching=MicroBatching())
    trainer.train()
    longest = sorted((len(row["input_ids"]) for row in ROWS), reverse=True)[:8]
    assert trainer.guard.rehearsal is not None
    assert list(trainer.guard.rehearsal.worst_lengths) == longest


def test_the_time_it_took_is_announced(tmp_path):
    written = io.StringIO()
    bar = MemfitProgress(console=Console(file=written))
    trainer = trainer_of(tmp_path, [], "10GB", micro_batching=MicroBatching(), callbacks=[bar])
    trainer.train()
    assert trainer.guard.rehearsal is not None
    assert 0 < trainer.guard.rehearsal.step_seconds < 60
    assert "training: 4 steps, about" in written.getvalue()


def test_evaluations_between_steps_are_said_as_long_as_a_usual_batch_took(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, [], "10GB", micro_batching=MicroBatching(), eval_dataset=ROWS)
    trainer.args.eval_strategy, batches = "steps", []

    def predict(_: Any, batch: Any, prediction_loss_only: bool) -> None:
        assert not prediction_loss_only
        batches.append(batch["input_ids"])

    monkeypatch.setattr(trainer, "prediction_step", predict)
    moments = iter([0.0, 9.0, 10.0, 10.5])  # the longest rows, which may compile; usual ones
    monkeypatch.setattr(rehearsal, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    evaluation = rehearsal._Stage(trainer.guard, ROWS, collate)._evaluate()
    assert evaluation == 0.5 * len(ROWS) / 8
    assert [len(rows) for rows in batches] == [8, 8]
    assert batches[0].shape[1] == max(len(row["input_ids"]) for row in ROWS)
    assert batches[1].tolist() == collate([ROWS[6 * row] for row in range(8)])["input_ids"].tolist()
    assert trainer.model.training
    trainer.state = transformers.TrainerState(max_steps=4, num_train_epochs=1, eval_steps=1)
    found = rehearsal.Rehearsal(0.3, 0, (), evaluation_seconds=evaluation)
    assert rehearsal.seconds_between_steps(trainer, found) == 3 * evaluation
    not_tried = rehearsal.Rehearsal(0.3, 0, ())
    by_share = 3 * len(ROWS) / 8 * 0.3 / 3
    assert rehearsal.seconds_between_steps(trainer, not_tried) == pytest.approx(by_share)


def test_graphs_that_an_evaluation_dropped_are_captured_again(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, [], "10GB", micro_batching=MicroBatching(), eval_dataset=ROWS)
    stage = rehearsal._Stage(trainer.guard, ROWS, collate)
    trainer.executor = SimpleNamespace(captured_graphs=2)
    done: list[str] = []
    drops: list[bool] = []

    def evaluate(_: Any) -> float:
        done.append("evaluated")
        if drops[-1]:
            trainer.executor.captured_graphs = 0
        return 0.5

    def dress(*_: Any, dressed: int) -> None:
        assert dressed == 1
        done.append("dressed")
        trainer.executor.captured_graphs = 2

    monkeypatch.setattr(rehearsal._Stage, "_evaluate", evaluate)
    monkeypatch.setattr(rehearsal._Stage, "_until_it_fits", dress)
    monkeypatch.setattr(rehearsal._Stage, "_dress_fullest", lambda _: None)
    for dropping, expected in ((False, ["evaluated"]), (True, ["evaluated", "dressed"])):
        done.clear()
        drops.append(dropping)
        assert stage._evaluate_beside({}, [3]) == 0.5
        assert done == expected


@pytest.mark.parametrize("name", ["kept", "kept8"])
def test_the_update_is_part_of_what_is_tried(tmp_path, name, monkeypatch):
    """A shortage that only the update meets is found before the first step."""
    from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer as Optimizer

    trainer = trainer_of(tmp_path, SINKS[name], "10GB", micro_batching=MicroBatching())
    monkeypatch.setattr(Optimizer, "update_many", no_memory)
    monkeypatch.setattr(rehearsal, "_QUICK_SECONDS", 60.0)  # however busy the machine is
    with pytest.raises(DoesNotFitError, match="Tried to allocate 42"):
        trainer.train()
    assert trainer.state.global_step == 0


def no_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 42.00 MiB.")


def test_what_does_not_fit_is_made_smaller_before_the_first_step(tmp_path, caplog):
    whole = trainer_of(tmp_path, [], "10GB", micro_batching=MicroBatching())
    whole.train()
    assert whole.guard.rehearsal is not None
    held_bytes = whole.guard.budget_cap.held_bytes()
    needed_bytes = whole.guard.rehearsal.peak_bytes
    # Room for the weights and their state, and half of what else the whole batch takes.
    budget = held_bytes + (needed_bytes - held_bytes) * 2 // 3
    tight = trainer_of(tmp_path, [], str(budget), micro_batching=MicroBatching())
    tight.train()
    assert tight.state.global_step == 4
    made = tight.guard.adjustments.made
    assert made[0].step == 1
    assert made[0].why.startswith("the largest batch was tried and did not fit")
    assert tight.guard.budget_cap.peak_bytes <= budget
    assert "did not fit" in caplog.text


def test_a_row_that_never_fits_is_said_before_anything_is_trained(tmp_path):
    trainer = trainer_of(tmp_path, [], "1MB", micro_batching=MicroBatching())
    with pytest.raises(DoesNotFitError, match="the longest row alone does not fit"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("layers", [0, 4])
def test_without_a_plan_the_line_of_memory_is_measured(tmp_path, layers):
    """Through the largest batch and half of it; a batch of any size is foretold by it."""
    model = build("bert", num_hidden_layers=4, hidden_size=64, max_position_embeddings=64)
    rows = [{**row, "input_ids": (row["input_ids"] * 64)[:64]} for row in rows_of(8)]
    peaks, lines = {}, {}
    for count in (8, 6):
        strategies = [Packing(), Checkpointing(layers)] if layers else [Packing()]
        trainer = trainer_of(tmp_path, strategies, "10GB", model, train_dataset=rows[:count],
                             micro_batching=MicroBatching())  # fmt: skip
        trainer.args.max_steps = 1
        trainer.train()
        peaks[count], lines[count] = trainer.guard.rehearsal.peak_bytes, trainer.guard.line
    kept = trainer.guard.dials.kept_layers(trainer.guard.settings)
    assert lines[8].peak_bytes(8 * 64, kept) == pytest.approx(peaks[8], rel=1e-9)
    assert lines[8].peak_bytes(6 * 64, kept) == pytest.approx(peaks[6], rel=0.02)


def test_the_line_of_the_plan_is_corrected_by_the_largest_batch(tmp_path):
    trainer = trainer_of(tmp_path, [Packing()], "10GB", micro_batching=MicroBatching())
    trainer.guard.line = MemoryLine(5e9, 1000.0, 300.0)
    trainer.train()
    line, found = trainer.guard.line, trainer.guard.rehearsal
    assert (line.token_bytes, line.layer_token_bytes) == (1000.0, 300.0)
    assert line.peak_bytes(sum(found.worst_lengths), 4) == pytest.approx(found.peak_bytes)
    assert trainer.guard.adjustments.made == []


def test_a_plan_that_misses_its_budget_is_cut_by_its_line(tmp_path):
    rows = [{**row, "input_ids": (row["input_ids"] * 64)[:64]} for row in rows_of(48)]

    def trainer_in(budget: str) -> BudgetTrainer:
        model = build("bert", num_hidden_layers=4, max_position_embeddings=64)
        return trainer_of(tmp_path, [Packing()], budget, model, train_dataset=rows,
                          micro_batching=MicroBatching())  # fmt: skip

    free = trainer_in("10GB")
    free.train()
    budget = int(free.guard.rehearsal.peak_bytes * 0.98)
    tight = trainer_in(str(budget))
    tight.guard.line = free.guard.line
    tight.train()
    (made,) = tight.guard.adjustments.made
    assert made.before == "512 tokens at once"
    assert 400 < tight.guard.settings.max_tokens < 512
    assert tight.guard.budget_cap.peak_bytes <= budget


def test_a_stream_cannot_be_rehearsed_and_trains(tmp_path):
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(ROWS)

    trainer = trainer_of(
        tmp_path, [], "10GB", micro_batching=MicroBatching(), train_dataset=Stream()
    )
    trainer.train()
    assert trainer.guard.rehearsal is None
    assert trainer.state.global_step == 4
