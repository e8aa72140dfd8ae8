"""BudgetTrainer with what users bring: heads, adapters, frozen parts, metrics, callbacks."""

# ruff: noqa: ARG002 - the Trainer decides what callbacks are given.
from __future__ import annotations

import io
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console
from transformers import (
    BertForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    TrainerCallback,
)

from memfit import BudgetTrainer, TrainingArguments
from memfit.engine.micro_batches import MicroBatching, longest_row
from memfit.errors import BudgetError, ConfigError, ModelError
from memfit.training.progress import MemfitProgress
from small_training import collate, model_of, texts
from traced_plans import used

THREE_ROWS = MicroBatching(max_rows=3)
bert = partial(model_of, dropout=0.0)


def trainer_of(
    tmp_path, model: Any = None, kind: type = BudgetTrainer, named: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Any:  # fmt: skip
    defaults = {
        "per_device_train_batch_size": 8, "max_steps": 3, "learning_rate": 1e-2,
        "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    given: dict[str, Any] = {"data_collator": collate, "train_dataset": texts(24), **(named or {})}
    if kind is BudgetTrainer:
        given = {"micro_batching": THREE_ROWS, **given}
    args = TrainingArguments(str(tmp_path), **{**defaults, **fields})
    trainer = kind(model=model or bert(), args=args, **given)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def moved(trainer: Any) -> set[str]:
    """Train; the parameters that changed."""
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    return {name for name in before if not torch.equal(before[name], after[name])}


# ---- what learns ----


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_frozen_encoder_trains_only_the_head(tmp_path, checkpointing):
    model = bert(dropout=0.1)
    for _, parameter in model.bert.named_parameters():
        parameter.requires_grad = False
    trainer = trainer_of(tmp_path, model, gradient_checkpointing=checkpointing)
    assert moved(trainer) == {"classifier.weight", "classifier.bias"}


def test_checkpointing_below_frozen_embeddings_still_trains_every_layer(tmp_path):
    model = bert()
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad = False
    changed = moved(trainer_of(tmp_path, model, gradient_checkpointing=True))
    assert "bert.encoder.layer.0.attention.self.query.weight" in changed
    assert not any("embeddings" in name for name in changed)


def test_a_lora_model_trains_its_adapters_with_the_whole_batchs_gradient(tmp_path):
    from peft import LoraConfig, get_peft_model

    def lora() -> Any:
        torch.manual_seed(3)
        config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
        return get_peft_model(bert(), config)

    ours, stock = trainer_of(tmp_path, lora()), trainer_of(tmp_path, lora(), transformers.Trainer)
    changed = moved(ours)
    assert changed
    assert all("lora_" in name or "classifier" in name for name in changed)
    stock.train()
    for (name, mine), (_, theirs) in zip(
        ours.model.named_parameters(), stock.model.named_parameters(), strict=True
    ):
        # AdamW divides by the gradient's size, so what is almost zero may differ in its sign.
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, msg=name)


def test_a_model_in_which_nothing_can_learn_is_refused(tmp_path):
    model = bert().requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter of the model is trainable"):
        trainer_of(tmp_path, model).train()


def test_left_padded_rows_of_a_decoder_have_the_stock_gradient(tmp_path):
    def qwen() -> Qwen2ForSequenceClassification:
        torch.manual_seed(0)
        return Qwen2ForSequenceClassification(
            Qwen2Config(
                vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, intermediate_size=32, pad_token_id=0, num_labels=2,
            )
        )  # fmt: skip

    batch = collate(texts(9), "left")
    gradients = []
    for kind in (BudgetTrainer, transformers.Trainer):
        trainer = trainer_of(tmp_path, qwen(), kind)
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer.training_step(trainer.model, dict(batch))
        gradients.append(
            torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])
        )
    ours, stock = gradients
    assert float(loss) > 0
    assert float((ours - stock).norm() / stock.norm()) < 1e-6


# ---- what the user gives ----


def test_an_optimizer_and_a_schedule_of_the_users_own_are_used(tmp_path):
    model = bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
    trainer = trainer_of(tmp_path, model, named={"optimizers": (optimizer, schedule)})
    trainer.train()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.1**3)
    assert trainer.optimizer.optimizer is optimizer


def test_a_model_made_by_model_init_is_made_anew_for_each_training(tmp_path):
    args = TrainingArguments(
        str(tmp_path), max_steps=2, save_strategy="no", use_cpu=True, disable_tqdm=True
    )
    trainer = BudgetTrainer(
        args=args, model_init=lambda: bert(), train_dataset=texts(16), data_collator=collate
    )
    losses = [trainer.train().training_loss for _ in range(2)]
    assert losses[0] == losses[1]


def test_a_tokenizer_under_its_old_name_is_taken(tmp_path, tiny_model_dir):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model_dir)
    with pytest.warns(FutureWarning, match="tokenizer is now called processing_class"):
        trainer = trainer_of(tmp_path, named={"tokenizer": tokenizer})
    assert trainer.processing_class is tokenizer


def test_class_weights_and_another_loss_contradict_each_other(tmp_path):
    with pytest.raises(ConfigError, match="class_weights or compute_loss_func, not both"):
        trainer_of(tmp_path, named={"class_weights": [1, 2], "compute_loss_func": print})


def test_class_weights_are_not_called_the_users_own_loss(tmp_path):
    planned = {"budget": "10GB", "micro_batching": None, "strategies": ()}
    trainer = trainer_of(tmp_path, named={**planned, "class_weights": [1, 2]})
    said = "\n".join(trainer.plan.sentences())
    assert "the loss is weighted by class" in said
    assert "your own loss" not in said


def test_what_runs_is_in_args_and_what_the_user_wrote_in_user_args(tmp_path):
    trainer = trainer_of(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert trainer.args.per_device_train_batch_size == trainer.effective_rows == 8
    assert trainer.user_args.per_device_train_batch_size == 2
    assert trainer.user_args.gradient_accumulation_steps == 4


def test_accumulation_set_on_the_trainers_own_arguments_later_is_still_a_mean(tmp_path):
    trainer = trainer_of(tmp_path, logging_steps=1, max_steps=1)
    trainer.args.gradient_accumulation_steps = 3
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0.69, abs=0.1)


def test_an_effective_batch_stays_on_the_cpu_until_it_is_cut(tmp_path):
    trainer = trainer_of(tmp_path, named={"eval_dataset": texts(5)})
    assert trainer.get_train_dataloader().device is None
    assert trainer.get_eval_dataloader().device is None
    assert trainer.get_test_dataloader(texts(5)).device is None


@pytest.mark.parametrize("padding", [True, "max_length"])
def test_a_tutorials_datasets_collator_and_metric_train_and_keep_the_best(
    tmp_path, tiny_model_dir, padding
):
    from datasets import Dataset

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model_dir)
    table = Dataset.from_dict(
        {"review": ["房間很乾淨", "房間很髒，空調太吵"] * 6, "label": [1, 0] * 6}
    )

    def process(examples: Any) -> Any:
        tokens = tokenizer(examples["review"], max_length=32, truncation=True, padding=padding)
        return {**tokens, "labels": examples["label"]}

    data = table.map(process, batched=True, remove_columns=table.column_names)
    named = {
        "train_dataset": data, "eval_dataset": data, "compute_metrics": lambda _: {"f1": 0.5},
        "data_collator": transformers.DataCollatorWithPadding(tokenizer=tokenizer),
    }  # fmt: skip
    model = BertForSequenceClassification.from_pretrained(tiny_model_dir)
    trainer = trainer_of(
        tmp_path, model, named=named, per_device_train_batch_size=1, max_steps=-1,
        gradient_accumulation_steps=8, num_train_epochs=2, eval_strategy="epoch",
        save_strategy="epoch", metric_for_best_model="f1", load_best_model_at_end=True,
    )  # fmt: skip
    assert trainer.train().global_step == 4
    assert trainer.state.best_metric == 0.5
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()


def test_a_dataset_that_is_only_read_once_through_trains(tmp_path):
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(texts(24))

    trainer = trainer_of(tmp_path, named={"train_dataset": Stream()}, logging_steps=1)
    trainer.train()
    assert [round(log["loss"], 1) for log in trainer.state.log_history[:3]] == [0.7, 0.7, 0.7]


# ---- the budget ----


def test_a_budget_is_planned_for_and_the_plan_is_run(tmp_path):
    rows = texts(24)
    named = {"budget": "4GB", "micro_batching": None, "train_dataset": rows}
    trainer = trainer_of(tmp_path, named=named, gradient_accumulation_steps=2)
    assert trainer.plan.digest.effective_rows == 16
    assert trainer.plan.digest.longest_tokens == max(len(row["input_ids"]) for row in rows)
    assert trainer.micro_batching == trainer.plan.micro_batching
    assert used(trainer.plan, "packing") is not None
    assert trainer.setup.packing is not None
    trainer.train()
    for budget, match in (("4 apples", "cannot read"), (4, "did you mean 4GB")):
        with pytest.raises(BudgetError, match=match):
            trainer_of(tmp_path, named={"budget": budget})


def test_the_longest_row_is_found_in_every_kind_of_dataset():
    from datasets import Dataset

    rows = texts(24)
    longest = max(len(row["input_ids"]) for row in rows)
    assert longest_row(Dataset.from_list(rows), bert()) == longest
    assert longest_row(rows, bert()) == longest
    assert longest_row(Dataset.from_dict({"length": [3, 17, 5]}), bert()) == 17
    assert longest_row(Dataset.from_list(rows).to_iterable_dataset(), bert()) == 32
    assert longest_row(None, bert()) == 32  # what the model can take at most


def test_micro_batches_can_change_between_steps(tmp_path):
    seen: list[int] = []

    class Shrink(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(len(trainer.executor.split(collate(texts(8)))))
            trainer.micro_batching = MicroBatching(max_rows=4 - state.global_step)

    trainer = trainer_of(tmp_path, named={"callbacks": [Shrink()]})
    trainer.train()
    assert seen == [3, 3, 4]


# ---- evaluation ----


@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
def test_predictions_come_back_in_the_order_of_the_rows(tmp_path, sampling):
    rows = texts(21)
    model = bert().eval()
    with torch.no_grad():
        expected = [model(**collate([row])).logits[0].numpy() for row in rows]
    trainer = trainer_of(
        tmp_path, model, per_device_eval_batch_size=8, train_sampling_strategy=sampling
    )
    answer = trainer.predict(rows)
    np.testing.assert_allclose(answer.predictions, np.stack(expected), atol=1e-6)
    assert answer.label_ids.tolist() == [row["labels"] for row in rows]


def test_evaluation_in_micro_batches_reports_the_stock_numbers(tmp_path):
    def share(predictions: Any) -> dict[str, float]:
        found = predictions.predictions.argmax(-1) == predictions.label_ids
        return {"accuracy": float(found.mean())}

    named = {"eval_dataset": texts(21), "compute_metrics": share}
    fields = {"per_device_eval_batch_size": 7, "label_smoothing_factor": 0.1}
    ours = trainer_of(tmp_path, named=named, **fields)
    stock = trainer_of(tmp_path, kind=transformers.Trainer, named=named, **fields)
    mine, theirs = ours.evaluate(), stock.evaluate()
    assert mine["eval_accuracy"] == theirs["eval_accuracy"]
    assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-6)


def test_hidden_states_of_different_widths_are_put_together(tmp_path):
    model = bert().eval()
    model.config.output_hidden_states = True
    trainer = trainer_of(tmp_path, model, per_device_eval_batch_size=8)
    logits, hidden = trainer.predict(texts(8)).predictions
    assert logits.shape == (8, 2)
    widest = max(len(row["input_ids"]) for row in texts(8))
    assert [layer.shape for layer in hidden] == [(8, widest, 16)] * 3


def test_evaluating_leaves_the_random_numbers_of_training_alone(tmp_path):
    trainer = trainer_of(tmp_path, named={"eval_dataset": texts(5)})
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    trainer.evaluate()
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


# ---- the bar ----


def test_memfits_bar_takes_the_place_of_the_stock_one_only_when_given(tmp_path):
    stock = (transformers.ProgressCallback, transformers.PrinterCallback)
    written = io.StringIO()
    ours = MemfitProgress(console=Console(file=written))
    for given, left in (([], 1), ([ours], 0)):
        args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=5, save_strategy="no")
        trainer = BudgetTrainer(
            bert(), args, collate, texts(8), callbacks=given, micro_batching=THREE_ROWS
        )
        bars = [one for one in trainer.callback_handler.callbacks if isinstance(one, stock)]
        assert len(bars) == left
    trainer.train()
    assert written.getvalue().startswith("training: 5 steps\n")
    assert "step 5/5" in written.getvalue()


def test_the_same_trainer_trains_once_more_as_the_stock_one(tmp_path):
    trained = []
    for kind in (BudgetTrainer, transformers.Trainer):
        trainer = trainer_of(tmp_path, kind=kind, optim="adamw_torch")
        trainer.train()
        trainer.train()
        trained.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    # Where a gradient is zero on paper AdamW makes steps of rounding: not every weight is close.
    assert float((trained[0] - trained[1]).abs().median()) < 1e-5
