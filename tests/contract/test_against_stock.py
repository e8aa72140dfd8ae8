"""BudgetTrainer against transformers.Trainer: the same training, however a batch is cut."""

# ruff: noqa: ARG002 - the Trainer decides what callbacks and losses are given.

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import BertForSequenceClassification, TrainerCallback

import small_training
from memfit import BudgetTrainer
from memfit.engine.micro_batches import MicroBatching
from memfit.strategies import Packing
from small_training import collate

EFFECTIVE = 32
# 13 steps an epoch, the last one of 13 rows: an epoch must end right too.
ROWS = 12 * EFFECTIVE + 13
STEPS = 26
MICRO_ROWS = (1, 3, 7, 32)


def model_of(labels: int = 3, **settings: Any) -> BertForSequenceClassification:
    """BERT of 2 layers x 32 without dropout."""
    return small_training.model_of(
        0.0, vocab_size=60, hidden_size=32, intermediate_size=64, max_position_embeddings=48,
        num_labels=labels, **settings,
    )  # fmt: skip


def texts(rows: int, labels: str = "single", seed: int = 1) -> list[dict[str, Any]]:
    """Token ids of very different lengths, 2 to 40; each class has its own third of the ids."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(rows):
        length, kind = torch.randint(0, 39, (2,), generator=generator).tolist()
        label: Any = kind % 3
        ids = torch.randint(5, 23, (length + 2,), generator=generator) + 18 * label
        if labels == "multi":
            label = [float(label == 0), float(label > 0), float(length > 20)]
        if labels == "regression":
            label = float(label)
        made.append({"input_ids": ids.tolist(), "labels": label})
    return made


class Watch(TrainerCallback):
    """What a user's callback sees: gradients of the first step, losses, rates, steps, epochs."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.events: list[tuple[str, int, float | None]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self.gradients:
            self.gradients = {
                name: parameter.grad.clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.rates.append(logs["learning_rate"])

    def on_step_begin(self, args, state, control, **kwargs):
        self.events.append(("step begins", state.global_step, state.epoch))

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(("step ends", state.global_step, state.epoch))

    def on_epoch_end(self, args, state, control, **kwargs):
        self.events.append(("epoch ends", state.global_step, state.epoch))


def arguments(folder: Path, batch: int = EFFECTIVE, **settings: Any) -> Any:
    """fp32 on the CPU, a loss logged every step, no clipping."""
    defaults = {
        "max_steps": STEPS, "logging_steps": 1, "max_grad_norm": 0.0, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "optim": "sgd",
        "learning_rate": 0.1, "warmup_steps": 5,
    }  # fmt: skip
    return transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=batch, **{**defaults, **settings}
    )


def run(
    trainer: type[transformers.Trainer],
    args: transformers.TrainingArguments,
    model: torch.nn.Module,
    rows: list[dict[str, Any]],
    **settings: Any,
) -> tuple[Watch, dict[str, torch.Tensor]]:
    """Train; what a callback saw and the final weights."""
    watch = Watch()
    made = trainer(
        model=model, args=args, train_dataset=rows, data_collator=collate,
        callbacks=[watch], **settings,
    )  # fmt: skip
    made.remove_callback(transformers.PrinterCallback)
    made.train()
    return watch, {name: value.clone() for name, value in model.state_dict().items()}


def distance(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> float:
    """L2 of the difference over L2 of the whole.

    Per tensor it would mean nothing where a gradient is zero on paper (the key's bias).
    """
    assert ours.keys() == stock.keys()
    difference = sum(float((ours[name] - stock[name]).double().pow(2).sum()) for name in stock)
    whole = sum(float(value.double().pow(2).sum()) for value in stock.values())
    return (difference / whole) ** 0.5


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return texts(ROWS)


@pytest.fixture(scope="module", params=["sgd", "adamw_torch"])
def stock(request, rows, tmp_path_factory) -> Any:
    """The stock Trainer at batch 32: optimizer, learning rate, what it saw, its weights."""
    optimizer, rate = request.param, 0.3 if request.param == "sgd" else 1e-3
    args = arguments(tmp_path_factory.mktemp("stock"), optim=optimizer, learning_rate=rate)
    return optimizer, rate, *run(transformers.Trainer, args, model_of(), rows)


@pytest.mark.parametrize("micro_rows", MICRO_ROWS)
def test_micro_batches_train_as_the_whole_batch(stock, rows, tmp_path, micro_rows):
    optimizer, rate, stock_watch, stock_weights = stock
    watch, weights = run(
        BudgetTrainer, arguments(tmp_path, optim=optimizer, learning_rate=rate), model_of(), rows,
        micro_batching=MicroBatching(max_rows=micro_rows),
    )  # fmt: skip

    assert len(watch.losses) == STEPS
    assert distance(watch.gradients, stock_watch.gradients) < 1e-6
    if optimizer == "sgd":
        assert distance(weights, stock_weights) < 1e-5
    # The reported loss is the mean over the effective batch: the stock Trainer's own at 32.
    assert watch.losses == pytest.approx(stock_watch.losses, abs=1e-4)
    assert watch.losses[-1] < watch.losses[0] - 0.05  # and there is something to agree on


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 200}], ids=["whole", "200 tokens"])
def test_packed_micro_batches_train_as_the_padded_batch(stock, rows, tmp_path, limits):
    optimizer, rate, stock_watch, stock_weights = stock
    watch, weights = run(
        BudgetTrainer, arguments(tmp_path, optim=optimizer, learning_rate=rate), model_of(), rows,
        micro_batching=MicroBatching(**limits), strategies=[Packing()],
    )  # fmt: skip

    assert distance(watch.gradients, stock_watch.gradients) < 1e-6
    if optimizer == "sgd":
        assert distance(weights, stock_weights) < 1e-5
    assert watch.losses == pytest.approx(stock_watch.losses, abs=1e-4)


def test_callbacks_and_the_schedule_cannot_tell(stock, rows, tmp_path):
    optimizer, rate, stock_watch, _ = stock
    watch, _ = run(
        BudgetTrainer,
        arguments(tmp_path, 4, gradient_accumulation_steps=8, optim=optimizer, learning_rate=rate),
        model_of(),
        rows,
        micro_batching=MicroBatching(max_tokens=100),
    )
    assert watch.events == stock_watch.events
    assert watch.rates == stock_watch.rates


def test_stock_accumulation_multiplies_a_classifiers_gradient_and_ours_does_not(rows, tmp_path):
    one_step = {"max_steps": 1, "warmup_steps": 0}
    whole, _ = run(transformers.Trainer, arguments(tmp_path, **one_step), model_of(), rows)
    for batch, accumulation in ((4, 8), (1, 32)):
        args = arguments(tmp_path, batch, gradient_accumulation_steps=accumulation, **one_step)
        stock, _ = run(transformers.Trainer, args, model_of(), rows)
        multiplied = {name: value * accumulation for name, value in whole.gradients.items()}
        assert distance(stock.gradients, multiplied) < 1e-5
        assert stock.losses[0] == pytest.approx(whole.losses[0] * accumulation, rel=1e-5)

        ours, _ = run(BudgetTrainer, args, model_of(), rows)
        assert distance(ours.gradients, whole.gradients) < 1e-6
        assert ours.losses[0] == pytest.approx(whole.losses[0], abs=1e-6)


def test_1x32_and_4x8_and_32_are_bit_for_bit_one_training(rows, tmp_path):
    results = []
    for batch, accumulation in ((32, 1), (4, 8), (1, 32)):
        args = arguments(
            tmp_path, batch, gradient_accumulation_steps=accumulation, max_steps=6,
            optim="adamw_torch", learning_rate=1e-3,
        )  # fmt: skip
        micro = MicroBatching(max_tokens=200)
        results.append(run(BudgetTrainer, args, model_of(), rows, micro_batching=micro))
    (first, first_weights), *others = results
    for watch, weights in others:
        assert watch.losses == first.losses
        assert all(torch.equal(weights[name], first_weights[name]) for name in weights)


def test_a_batch_run_whole_is_bit_for_bit_the_stock_trainer(rows, tmp_path):
    args = arguments(tmp_path, max_steps=6)
    watch, weights = run(BudgetTrainer, args, model_of(), rows)
    stock_watch, stock_weights = run(transformers.Trainer, args, model_of(), rows)
    assert watch.losses == stock_watch.losses
    assert all(torch.equal(weights[name], stock_weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("single", {"label_smoothing_factor": 0.1}),
        ("multi", {}),
        ("regression", {}),
        ("single", {"gradient_checkpointing": True}),
        ("single", {"bf16": True}),
    ],
    ids=["label smoothing", "multi-label", "regression", "checkpointing", "bf16"],
)
def test_every_task_and_setting_keeps_its_gradient(kind, settings, tmp_path):
    rows = texts(64, kind)
    labels = 1 if kind == "regression" else 3
    problem = "multi_label_classification" if kind == "multi" else None
    args = arguments(tmp_path, max_steps=2, warmup_steps=0, learning_rate=1e-2, **settings)
    stock, _ = run(transformers.Trainer, args, model_of(labels, problem_type=problem), rows)
    ours, _ = run(
        BudgetTrainer, args, model_of(labels, problem_type=problem), rows,
        micro_batching=MicroBatching(max_rows=5),
    )  # fmt: skip
    # bf16 rounds each product to 8 bits, in another order.
    assert distance(ours.gradients, stock.gradients) < (2e-2 if settings.get("bf16") else 1e-6)
    assert ours.losses == pytest.approx(stock.losses, abs=1e-2 if settings.get("bf16") else 1e-5)


class WeightedTrainer(transformers.Trainer):
    """Class weights as people write them today."""

    weights = torch.tensor([0.2, 1.0, 5.0])

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=self.weights)
        return (loss, outputs) if return_outputs else loss


class OverriddenTrainer(BudgetTrainer):
    """The same on ours, in the signature of older tutorials, saying what the mean is over."""

    def compute_loss(self, model, inputs, return_outputs=False):
        return WeightedTrainer.compute_loss(self, model, inputs, return_outputs)

    weights = WeightedTrainer.weights

    def loss_weight(self, inputs):
        return float(self.weights[inputs["labels"]].sum())


def summed_loss(outputs, labels, num_items_in_batch):
    """A compute_loss_func in the Trainer's convention: a sum over what it is told to divide by."""
    return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / (
        num_items_in_batch
    )


@pytest.mark.parametrize("way", ["class_weights", "compute_loss", "compute_loss_func"])
def test_losses_of_the_users_own_are_exact(way, tmp_path):
    rows = texts(64)
    args = arguments(tmp_path, max_steps=2, warmup_steps=0, learning_rate=1e-2)
    micro = {"micro_batching": MicroBatching(max_rows=3)}
    if way == "compute_loss_func":
        func = {"compute_loss_func": summed_loss}
        stock, _ = run(transformers.Trainer, args, model_of(), rows, **func)
        ours, _ = run(BudgetTrainer, args, model_of(), rows, **func, **micro)
    else:
        stock, _ = run(WeightedTrainer, args, model_of(), rows)
        if way == "class_weights":
            micro["class_weights"] = WeightedTrainer.weights.tolist()
        trainer = BudgetTrainer if way == "class_weights" else OverriddenTrainer
        ours, _ = run(trainer, args, model_of(), rows, **micro)
    assert distance(ours.gradients, stock.gradients) < 1e-6
    assert ours.losses == pytest.approx(stock.losses, abs=1e-5)
