"""The task the planner is given: what a run or a Trainer really trains, and what the user set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers import TrainingArguments as StockArguments

from memfit import BudgetTrainer, TrainingArguments
from memfit.config import RunConfig
from memfit.data import LabelSpace
from memfit.engine.micro_batches import MicroBatching
from memfit.models.layers import add_lora, freeze
from memfit.planner.search import plan_for
from memfit.planner.task import Task, changed_fields, task_of_model, task_of_run
from memfit.strategies import Checkpointing, Packing
from memfit.units import Budget
from traced_plans import used

ROWS = [{"input_ids": [5] * count, "attention_mask": [1] * count, "labels": count % 2}
        for count in range(3, 23)]  # fmt: skip


def args_in(folder: Path, **fields: Any) -> TrainingArguments:
    fields = {"per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True, **fields}
    return TrainingArguments(str(folder), **fields)


def task_of(model: Any, args: TrainingArguments) -> Task:
    return task_of_model(model, args, ROWS).placed(Budget(bytes=10**9), args.device)


@pytest.fixture
def model(tiny_model_dir: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(tiny_model_dir)


def test_a_run_hands_over_its_lengths_labels_and_what_was_set_by_name(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = RunConfig.build(
        data="a.csv", model=str(tiny_model_dir), freeze="embeddings", optim="sgd", bf16=False,
        attn_implementation="eager",
    )  # fmt: skip
    settings = AutoConfig.from_pretrained(tiny_model_dir)
    labels = LabelSpace("multi_label", ("a", "b", "c"))
    workload = task_of_run(config, settings, args_in(tmp_path), labels, [4, 9], eval_rows=7)
    assert workload.lengths == (4, 9)
    assert (workload.num_labels, workload.problem_type) == (3, "multi_label_classification")
    assert workload.user_set == {"optim", "bf16", "attn_implementation"}
    assert (workload.freeze, workload.lora, workload.eval_rows) == ("embeddings", None, 7)
    assert workload.config._attn_implementation == "eager"
    assert settings._attn_implementation != "eager"  # the run's own settings stay as they were


def test_a_trainers_arguments_tell_what_differs_from_the_defaults(tmp_path: Path) -> None:
    args = StockArguments(str(tmp_path), optim="adafactor", learning_rate=1e-3, report_to="none")
    assert {"optim", "learning_rate"} <= changed_fields(args)
    assert not {"bf16", "gradient_checkpointing", "max_grad_norm"} & changed_fields(args)


def test_a_model_hands_over_what_is_frozen(model: Any, tmp_path: Path) -> None:
    args = args_in(tmp_path)
    for what in (None, "embeddings", "1", "encoder"):
        if what is not None:
            freeze(model, what)
        assert task_of_model(model, args, ROWS).freeze == what


def test_a_model_hands_over_its_adapters_and_its_weights_type(model: Any, tmp_path: Path) -> None:
    args = args_in(tmp_path)
    assert task_of_model(model, args, ROWS).dtype == "float32"
    assert task_of_model(model.bfloat16(), args, ROWS).dtype == "bfloat16"
    adapted = task_of_model(add_lora(model.float(), 4), args, ROWS)
    assert (adapted.lora, adapted.freeze) == (4, None)


def test_rows_that_cannot_be_looked_at_are_as_long_as_the_model_reads(
    model: Any, tmp_path: Path
) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(ROWS)

    workload = task_of_model(model, args_in(tmp_path, gradient_accumulation_steps=3), Stream())
    assert workload.lengths == (64,) * 6  # positions of the model, rows of a step
    assert workload.worst_tokens == 6 * 64


def test_an_optimizer_of_the_users_own_stays(model: Any, tmp_path: Path) -> None:
    args = args_in(tmp_path)
    workload = task_of_model(model, args, ROWS, own_optimizer="SGD")
    assert "optim" in workload.user_set
    assert (workload.args.optim, args.optim) == ("SGD", "adamw_torch_fused")


# ---- BudgetTrainer ----


@pytest.fixture
def collate() -> Any:
    def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        return {
            "input_ids": torch.tensor(
                [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
            ),
            "attention_mask": torch.tensor(
                [row["attention_mask"] + [0] * (longest - len(row["input_ids"])) for row in rows]
            ),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }

    return pad


def test_a_binding_budget_keeps_the_effective_batch_and_every_weight(
    model: Any, tmp_path: Path, collate: Any
) -> None:
    args = args_in(tmp_path, per_device_train_batch_size=10, max_steps=2, save_strategy="no")
    roomy = plan_for(task_of(model, args), strategies=(Packing(),)).chosen
    assert roomy.price is not None
    budget_bytes = int(0.6 * roomy.price.device_bytes)
    trainer = BudgetTrainer(
        model, args, train_dataset=ROWS, data_collator=collate, budget=f"{budget_bytes}B"
    )
    plan = trainer.plan
    assert plan is not None
    assert plan.price is not None
    assert plan.price.device_bytes <= budget_bytes
    assert plan.micro_batching != MicroBatching() or used(plan, "checkpointing")
    assert plan.fidelity <= 1
    assert trainer.effective_rows == 10
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())
    assert trainer.train().global_step == 2


def test_strategies_given_by_hand_are_kept_and_their_micro_batches_planned(
    model: Any, tmp_path: Path, collate: Any
) -> None:
    args = args_in(tmp_path, per_device_train_batch_size=10)
    named: dict[str, Any] = {"train_dataset": ROWS, "data_collator": collate}
    trainer = BudgetTrainer(model, args, strategies=[Checkpointing()], budget="1GB", **named)
    assert trainer.plan is not None
    assert trainer.plan.strategies == (Checkpointing(),)
    assert trainer.micro_batching == MicroBatching()


def test_the_arguments_a_user_set_are_constraints_of_the_plan(
    model: Any, tmp_path: Path, collate: Any
) -> None:
    args = args_in(tmp_path, optim="adafactor", gradient_checkpointing=True)
    trainer = BudgetTrainer(model, args, train_dataset=ROWS, data_collator=collate, budget="1GB")
    assert trainer.plan is not None
    said = " ".join(trainer.plan.sentences())
    assert "optim=adafactor: you set it; it is kept" in said
    assert "gradient_checkpointing: you set it; it is kept" in said
    assert used(trainer.plan, "checkpointing") is None  # twice would be of no use
    assert trainer.args.optim == "adafactor"


def test_what_of_a_plan_the_stock_trainer_can_do_trains_there(
    model: Any, tmp_path: Path, collate: Any
) -> None:
    from transformers import Trainer

    args = args_in(tmp_path, per_device_train_batch_size=8, max_steps=2, save_strategy="no")
    plan = plan_for(task_of(model, args), strategies=(Packing(), Checkpointing())).chosen
    plain = plan.training_arguments()
    assert plain.gradient_checkpointing
    assert plain.per_device_train_batch_size * plain.gradient_accumulation_steps == 8
    assert not args.gradient_checkpointing  # the user's own are left alone
    model.accepts_loss_kwargs = False
    stock = Trainer(model, plain, train_dataset=ROWS, data_collator=collate)
    assert stock.train().global_step == 2
    assert plan.beyond_stock == ("packing",)
