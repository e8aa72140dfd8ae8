"""One model and several trainers: what a trainer did to a model, and how it is undone."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.trainer_utils import HPSearchBackend

from memfit import BudgetTrainer, TrainingArguments
from memfit.engine.micro_batches import MicroBatching
from memfit.strategies import (
    Checkpointing,
    Freezing,
    GradientRelease,
    HalfPrecision,
    LowBitAdamW,
    Packing,
)
from small_training import collate, model_of, texts
from traced_plans import used

WAYS: dict[str, list[Any]] = {
    "packing": [Packing()],
    "recomputing": [Packing(), Checkpointing()],
    "half": [HalfPrecision()],
    "low bits": [Packing(), LowBitAdamW()],
    "waiting in 8 bits": [Packing(), LowBitAdamW(), GradientRelease("kept8")],
    "frozen": [Freezing("embeddings")],
}


def trainer_of(tmp_path: Any, model: Any = None, kind: type = BudgetTrainer, **named: Any) -> Any:
    fields = {
        "per_device_train_batch_size": 8, "max_steps": 2, "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, **named.pop("fields", {}),
    }  # fmt: skip
    given = {"train_dataset": texts(24), "data_collator": collate, **named}
    trainer = kind(model, TrainingArguments(str(tmp_path), **fields), **given)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def state_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_plain(model: Any) -> None:
    """Nothing of a trainer is left in the model."""
    fresh = model_of(0.0)
    for ours, plain in zip(model.modules(), fresh.modules(), strict=True):
        assert type(ours) is type(plain)
        assert not ours._forward_hooks
        assert not ours._forward_pre_hooks
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert "forward" not in vars(model) or model.forward.__func__ is type(model).forward
    assert model.bert.encoder.layer[0].attention.self.config is model.config


@pytest.mark.filterwarnings("ignore:this CPU has no bfloat16")
@pytest.mark.parametrize("way", WAYS)
def test_a_cell_run_again_trains_on_from_the_weights_that_are_there(way, tmp_path):
    model = model_of(0.0)
    first = trainer_of(tmp_path, model, strategies=WAYS[way])
    first.train()
    after_one = first.masters.joined() or state_of(model)
    again = trainer_of(tmp_path, model, strategies=WAYS[way])
    before = again.changes and state_of(model)
    for name, value in before.items():  # what low bits hold of the same numbers
        torch.testing.assert_close(value.float(), after_one[name], rtol=2**-8, atol=1e-6)
    again.train()
    assert any(not torch.equal(before[n], v) for n, v in state_of(model).items())


@pytest.mark.filterwarnings("ignore:this CPU has no bfloat16")
@pytest.mark.parametrize("way", WAYS)
def test_another_trainer_finds_the_model_as_it_was(way, tmp_path):
    model = model_of(0.0)
    first = trainer_of(tmp_path, model, strategies=WAYS[way])
    first.train()
    trained = first.masters.joined() or state_of(model)
    trainer_of(tmp_path, model)
    assert_plain(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained[name]), name


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_that_cannot_be_made_leaves_the_model_as_it_was(way, tmp_path):
    model = model_of(0.0)
    before = state_of(model)
    with pytest.raises(ValueError, match="eval_dataset"):
        trainer_of(
            tmp_path, model, strategies=WAYS[way], fields={"eval_strategy": "epoch"},
            eval_dataset=None,
        )  # fmt: skip
    assert_plain(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("way", ["packing", "low bits"])
def test_a_training_that_cannot_begin_leaves_the_model_and_earlier_trainers_alone(way, tmp_path):
    model = model_of(0.0)
    earlier = trainer_of(tmp_path, model, strategies=[Packing()])
    expected = earlier.predict(texts(9)).predictions
    before = state_of(model)
    failing = trainer_of(tmp_path, model, strategies=WAYS[way], train_dataset=None)
    with pytest.raises(ValueError, match="train_dataset"):
        failing.train()
    assert_plain(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    np.testing.assert_allclose(earlier.predict(texts(9)).predictions, expected, atol=1e-6)
    earlier.train()  # with its strategies, as before
    assert earlier.setup.packing is not None


@pytest.mark.parametrize("way", ["packing", "low bits"])
def test_after_a_training_that_failed_midway_earlier_trainers_predict(way, tmp_path):
    class Broken(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("broken")

    model = model_of(0.0)
    earlier = trainer_of(tmp_path, model, strategies=[Packing()])
    failing = trainer_of(tmp_path, model, strategies=WAYS[way], callbacks=[Broken()])
    with pytest.raises(RuntimeError, match="broken"):
        failing.train()
    found = earlier.predict(texts(9)).predictions  # by the weights as the failure left them
    np.testing.assert_allclose(found, failing.predict(texts(9)).predictions, atol=1e-6)
    last = trainer_of(tmp_path, model)
    assert_plain(model)
    np.testing.assert_allclose(found, last.predict(texts(9)).predictions, atol=1e-2)


def test_a_trainer_that_is_gone_is_undone_too(tmp_path):
    model = model_of(0.0)
    trainer_of(tmp_path, model, strategies=WAYS["low bits"]).train()
    gc.collect()
    trainer_of(tmp_path, model, strategies=WAYS["low bits"]).train()
    gc.collect()
    trainer_of(tmp_path, model)
    assert_plain(model)


def test_a_copy_of_a_model_belongs_to_nobody(tmp_path):
    model = model_of(0.0)
    trainer = trainer_of(tmp_path, model, strategies=[Checkpointing()])
    copied = copy.deepcopy(model)
    trainer_of(tmp_path, copied)
    assert trainer.setup.recomputed is not None  # of the model itself nothing was undone


# ---- models made by model_init ----


def test_a_model_that_is_made_is_changed_as_one_that_is_given(tmp_path):
    alive: list[weakref.ref[Any]] = []
    at_once: list[int] = []

    def make() -> Any:
        gc.collect()
        at_once.append(sum(one() is not None for one in alive))
        model = model_of(0.0)
        alive.append(weakref.ref(model))
        return model

    trainer = trainer_of(tmp_path, model_init=make, strategies=[Packing(), Checkpointing()])
    trainer.train()
    assert trainer.setup.model is trainer.model is alive[-1]()
    assert trainer.setup.packing.model is trainer.model
    trainer.train()
    assert len(alive) == 3
    assert at_once == [0, 0, 0]

    stock = trainer_of(tmp_path, kind=transformers.Trainer, model_init=lambda: model_of(0.0))
    stock.train()
    for name, value in stock.model.state_dict().items():
        # AdamW divides by the gradient's size, so what is almost zero may differ.
        torch.testing.assert_close(trainer.model.state_dict()[name], value, rtol=0, atol=1e-4)


def test_a_budget_is_kept_for_the_model_that_is_trained(tmp_path):
    trainer = trainer_of(tmp_path, model_init=lambda: model_of(0.0), budget="1GB")
    assert trainer.plan is not None
    assert used(trainer.plan, "packing") is not None
    trainer.train()
    assert trainer.setup.packing.model is trainer.model
    assert trainer.guard.rehearsal is not None


def test_a_made_model_trains_as_with_the_stock_trainer(tmp_path):
    def drawn() -> Any:
        return transformers.BertForSequenceClassification(model_of().config)

    found = []
    for kind in (transformers.Trainer, BudgetTrainer):
        trainer = trainer_of(tmp_path, kind=kind, model_init=drawn)
        trainer.train()
        found.append(trainer.model.state_dict())
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


def test_a_batch_size_that_is_tried_is_a_devices(tmp_path):
    trainer = trainer_of(
        tmp_path, model_init=lambda: model_of(0.0), fields={"gradient_accumulation_steps": 4}
    )
    trainer.hp_search_backend = HPSearchBackend.WANDB
    for tried, rows in (({"per_device_train_batch_size": 16}, 64), ({"learning_rate": 0.1}, 64)):
        trainer._hp_search_setup(tried)
        assert trainer.effective_rows == trainer._train_batch_size == rows
        assert trainer.args.gradient_accumulation_steps == 1
        assert trainer.accelerator.gradient_accumulation_steps == 1
    trainer._hp_search_setup({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2})
    assert trainer.effective_rows == 8


def test_a_search_over_the_batch_size_keeps_the_accumulation(tmp_path):
    pytest.importorskip("optuna")
    seen: list[int] = []

    class Rows(transformers.TrainerCallback):
        def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
            seen.append(args.per_device_train_batch_size)

    trainer = trainer_of(
        tmp_path, model_init=lambda: model_of(0.0), train_dataset=texts(128), budget="1GB",
        eval_dataset=texts(8), callbacks=[Rows()],
        fields={"gradient_accumulation_steps": 4, "eval_strategy": "epoch", "max_steps": 1},
    )  # fmt: skip
    sizes = iter([16, 4])

    def space(trial: Any) -> dict[str, Any]:
        value = next(sizes) if "size" not in trial.user_attrs else trial.user_attrs["size"]
        trial.set_user_attr("size", value)
        return {"per_device_train_batch_size": value}

    trainer.hyperparameter_search(space, n_trials=2, direction="minimize", backend="optuna")
    assert seen == [64, 16]


# ---- arguments that change later ----


def test_arguments_changed_after_the_trainer_was_made_are_followed(tmp_path):
    trainer = trainer_of(tmp_path, model_of(0.0), fields={"max_steps": 3})
    trainer.user_args.max_steps = 1
    trainer.user_args.gradient_accumulation_steps = 2
    assert trainer.train().global_step == 1
    assert trainer.effective_rows == 16
    trainer.args.max_steps, trainer.args.gradient_accumulation_steps = 2, 3
    assert trainer.train().global_step == 2
    assert trainer.effective_rows == 24
    trainer.user_args.per_device_eval_batch_size = 5
    trainer.evaluate(texts(8))
    assert trainer.args.per_device_eval_batch_size == 5


def test_micro_batches_stay_those_that_were_asked_for(tmp_path):
    trainer = trainer_of(
        tmp_path, model_init=lambda: model_of(0.0), micro_batching=MicroBatching(max_rows=3)
    )
    trainer.train()
    assert trainer.micro_batching == MicroBatching(max_rows=3)


# ---- as the stock Trainer says it ----


@pytest.mark.parametrize(
    ("wanted", "said"),
    [(True, "No valid checkpoint found in output"), ("gone", "Can't find a valid checkpoint at")],
)
def test_nothing_to_resume_is_the_stock_trainers_kind_of_error(wanted, said, tmp_path):
    for kind in (BudgetTrainer, transformers.Trainer):
        with pytest.raises(ValueError, match=said):
            trainer_of(tmp_path, model_of(0.0), kind).train(resume_from_checkpoint=wanted)


def test_accumulation_said_twice_is_the_stock_trainers_kind_of_error(tmp_path):
    twice = {"gradient_accumulation_kwargs": {"num_steps": 10}}
    fields = {"gradient_accumulation_steps": 2, "accelerator_config": twice}
    for kind in (BudgetTrainer, transformers.Trainer):
        with pytest.raises(ValueError, match="`num_steps` is set but"):
            trainer_of(tmp_path, model_of(0.0), kind, fields=fields)


def test_steps_and_epochs_that_contradict_each_other_are_said(tmp_path):
    with pytest.warns(UserWarning, match="max_steps=2 and num_train_epochs=7 are both set"):
        trainer_of(tmp_path, model_of(0.0), fields={"num_train_epochs": 7})


def test_the_items_of_a_batch_are_counted_as_the_stock_trainer_counts_them(tmp_path):
    batches = [collate(texts(8)), collate(texts(5))]
    stock, ours = (
        trainer_of(tmp_path, model_of(0.0), kind)._get_num_items_in_batch(batches, "cpu")
        for kind in (transformers.Trainer, BudgetTrainer)
    )
    assert int(ours) == int(stock) == 13
