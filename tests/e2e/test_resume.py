"""A run that was interrupted and resumed ends with the weights of the run that was not."""

# ruff: noqa: ARG002 - the Trainer decides what callbacks are given.
from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import BertForSequenceClassification, TrainerCallback

from memfit import BudgetTrainer, TrainingArguments
from memfit.engine.micro_batches import MicroBatching
from memfit.errors import OutputError
from memfit.training.checkpoints import recorded_micro_batching
from small_training import ROWS, STEPS_AN_EPOCH, collate, model_of, texts


class Interruption(Exception):  # noqa: N818
    """What stands in for the power cut."""


class InterruptAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step
        self.steps_begun = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.steps_begun += 1
        if state.global_step == self.step:
            raise Interruption


def trainer_in(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> BudgetTrainer:
    """Saved every step; evaluated every epoch, which must leave no trace in the random numbers."""
    # A new process begins with other random numbers than the one that was interrupted.
    torch.manual_seed(len(list(folder.iterdir())) + 100)
    micro_batching = settings.pop("micro_batching", MicroBatching(max_rows=3))
    defaults = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
        "num_train_epochs": 2, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1,
        "eval_strategy": "epoch", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    if "max_steps" in settings:
        del defaults["num_train_epochs"]
    trainer = BudgetTrainer(
        model_of(),
        TrainingArguments(str(folder), **{**defaults, **settings}),
        collate,
        texts(),
        texts()[:9],
        callbacks=list(callbacks),
        micro_batching=micro_batching,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def weights_of(trainer: BudgetTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("strategy", ["random", "group_by_length", "batch_rebalance"])
def test_resuming_at_any_step_gives_the_weights_bit_for_bit(strategy, tmp_path):
    folders = [tmp_path / name for name in ("whole", "cut")]
    for folder in folders:
        folder.mkdir()
    whole = trainer_in(folders[0], train_sampling_strategy=strategy)
    whole.train()
    expected, steps = weights_of(whole), whole.state.max_steps

    # first step, middle of an epoch, its end, the middle of the second epoch
    for step in (1, 3, STEPS_AN_EPOCH, STEPS_AN_EPOCH + 2):
        cut = trainer_in(folders[1], InterruptAfter(step), train_sampling_strategy=strategy)
        with pytest.raises(Interruption):
            cut.train(resume_from_checkpoint=step > 1)
        resumed = trainer_in(folders[1], train_sampling_strategy=strategy)
        resumed.train(resume_from_checkpoint=str(folders[1] / f"checkpoint-{step}"))
        assert resumed.state.global_step == steps
        weights = weights_of(resumed)
        assert all(torch.equal(weights[name], expected[name]) for name in expected), step
        for later in folders[1].glob("checkpoint-*"):
            if int(later.name.split("-")[1]) > step:
                shutil.rmtree(later)


def test_without_our_sampler_grouping_by_length_would_not_resume(tmp_path):
    """The stock sampler's order depends on the global generator: the reason for ours."""
    orders = []
    for seed in (1, 2):
        trainer = trainer_in(tmp_path, train_sampling_strategy="group_by_length")
        torch.manual_seed(seed)
        ours = list(trainer._get_train_sampler())
        stock = list(transformers.Trainer._get_train_sampler(trainer))
        orders.append((ours, stock))
    (ours, stock), (ours_again, stock_again) = orders
    assert ours == ours_again
    assert stock != stock_again
    assert sorted(ours) == list(range(ROWS))


def test_a_checkpoint_cut_off_while_being_written_is_passed_over(tmp_path):
    trainer_in(tmp_path, max_steps=3).train()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text('{"global_step": 3, "lo')
    interrupt = InterruptAfter(2)
    with (
        pytest.warns(UserWarning, match=r"checkpoint-3 is passed over: trainer_state.json has 2"),
        pytest.raises(Interruption),
    ):
        trainer_in(tmp_path, interrupt, max_steps=3).train(resume_from_checkpoint=True)
    assert interrupt.steps_begun == 1  # it went on from checkpoint-2
    with pytest.raises(OutputError, match="checkpoint-3 is not a complete checkpoint"):
        trainer_in(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for damaged in (tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"):
        (damaged / "manifest.json").unlink()
    with pytest.raises(OutputError, match=r"no checkpoint in .* is whole.*manifest.json.*missing"):
        trainer_in(tmp_path, max_steps=3).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_another_trainer_is_taken_unchecked_and_that_is_said(tmp_path):
    trainer_in(tmp_path, max_steps=2).train()
    for name in ("manifest.json", "memfit.json"):
        for checkpoint in tmp_path.glob("checkpoint-*"):
            (checkpoint / name).unlink()
    interrupt = InterruptAfter(2)
    with (
        pytest.warns(UserWarning, match=r"checkpoint-2 has no manifest.json.*taken unchecked"),
        pytest.raises(Interruption),
    ):
        trainer_in(tmp_path, interrupt, max_steps=3).train(resume_from_checkpoint=True)
    assert interrupt.steps_begun == 1


def test_nothing_to_resume_is_said(tmp_path):
    with pytest.raises(OutputError, match="No valid checkpoint found in output directory"):
        trainer_in(tmp_path).train(resume_from_checkpoint=True)


def test_other_micro_batches_or_a_missing_optimizer_are_not_exact_and_said(tmp_path):
    trainer_in(tmp_path, max_steps=2).train()
    with pytest.warns(UserWarning, match=r"max_rows=3.*max_rows=4.*not bit for bit"):
        trainer_in(tmp_path, max_steps=3, micro_batching=MicroBatching(max_rows=4)).train(True)
    bare = tmp_path / "bare"
    bare.mkdir()
    trainer_in(bare, max_steps=2, save_only_model=True).train()
    with pytest.warns(UserWarning, match="no optimizer state"):
        trainer_in(bare, max_steps=3).train(resume_from_checkpoint=True)


def test_a_checkpoint_records_the_micro_batches_that_memory_left(tmp_path):
    trainer = trainer_in(tmp_path, max_steps=2, save_steps=1)
    step, failed = trainer.executor.loss, []

    def first_fails(*parts):
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(*parts)

    trainer.executor = dataclasses.replace(trainer.executor, loss=first_fails)
    trainer.train()
    used = recorded_micro_batching(tmp_path / "checkpoint-1")
    assert used.max_tokens is not None
    with pytest.warns(UserWarning, match=rf"max_tokens={used.max_tokens}.*not bit for bit"):
        trainer_in(tmp_path, max_steps=3).train(resume_from_checkpoint=True)


def test_checkpoints_stay_within_the_limit_and_the_best_model_is_loaded(tmp_path):
    scores = iter([0.5, 0.9, 0.1, 0.2])
    trainer = trainer_in(
        tmp_path, num_train_epochs=4, save_strategy="epoch", save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="mse",
    )  # fmt: skip
    trainer.compute_metrics = lambda _: {"mse": next(scores)}
    trainer.train()
    # The smallest error is the best: after epoch 3, although later ones exist.
    best = tmp_path / f"checkpoint-{3 * STEPS_AN_EPOCH}"
    assert trainer.state.best_model_checkpoint == str(best)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {best.name, "checkpoint-20"}
    saved = BertForSequenceClassification.from_pretrained(best).state_dict()
    weights = weights_of(trainer)
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    written = json.loads((best / "trainer_state.json").read_text())
    assert written["best_model_checkpoint"] == str(best)  # its own place, not where it was written


def test_a_run_that_was_moved_still_finds_its_best_model(tmp_path):
    settings = {"save_strategy": "epoch", "load_best_model_at_end": True,
                "metric_for_best_model": "mse", "num_train_epochs": 3}  # fmt: skip
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    first = trainer_in(before, InterruptAfter(2 * STEPS_AN_EPOCH + 1), **settings)
    scores = iter([0.1, 0.5])
    first.compute_metrics = lambda _: {"mse": next(scores)}
    with pytest.raises(Interruption):
        first.train()
    before.rename(after)
    resumed = trainer_in(after, **settings)
    resumed.compute_metrics = lambda _: {"mse": 0.7}
    resumed.train(resume_from_checkpoint=True)
    best = after / f"checkpoint-{STEPS_AN_EPOCH}"
    assert resumed.state.best_model_checkpoint == str(best)
    saved = BertForSequenceClassification.from_pretrained(best).state_dict()
    weights = weights_of(resumed)
    assert all(torch.equal(weights[name], saved[name]) for name in saved)


def test_a_best_checkpoint_that_is_damaged_is_not_loaded_and_that_is_said(tmp_path):
    trainer = trainer_in(
        tmp_path, save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="mse"
    )

    scores = iter([0.1, 0.5])

    def spoil_the_first(_):
        for weights in tmp_path.glob("checkpoint-5/model.safetensors"):
            weights.write_bytes(weights.read_bytes()[:-1] + b"?")
        return {"mse": next(scores)}

    trainer.compute_metrics = spoil_the_first
    with pytest.warns(UserWarning, match=r"checkpoint-5 is damaged.*of the last step, 10, are"):
        trainer.train()
    assert trainer.state.best_model_checkpoint is None


def test_a_checkpoint_holds_the_users_own_arguments_without_a_token(tmp_path):
    token = "hf_" + "a1B2" * 9
    trainer_in(tmp_path, max_steps=1, hub_token=token).train()
    args = torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 4)
    assert args.hub_token is None
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or token.encode() not in path.read_bytes(), path
