"""What callbacks and logs see of a step whose gradients go into a sink."""

# ruff: noqa: ARG002 - the Trainer decides what callbacks are given.
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import TrainerCallback

from memfit import BudgetTrainer, TrainingArguments
from memfit.strategies import GradientRelease, LowBitAdamW
from small_training import collate, model_of, texts

STEPS = 3
SINKS = {
    "kept": [LowBitAdamW()],
    "kept8": [LowBitAdamW(), GradientRelease("kept8")],
    "host": [LowBitAdamW(), GradientRelease("host")],
}


class Looks(TrainerCallback):
    """Weights at the start of each step and before its update, and which gradients are there."""

    def __init__(self) -> None:
        self.moved: list[bool] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self._before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        now = dict(model.named_parameters())
        self.moved.append(any(not torch.equal(now[n], p) for n, p in self._before.items()))
        grads = {name: p.grad.float() for name, p in now.items() if p.grad is not None}
        self.gradients.append(grads)


def run(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> BudgetTrainer:
    strategies = settings.pop("strategies", None)
    model = settings.pop("model", None) or model_of(dropout=0.0)
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=STEPS, logging_steps=1,
        save_strategy="steps", save_steps=STEPS, learning_rate=1e-2, report_to="none",
        use_cpu=True, disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = BudgetTrainer(
        model, args, collate, texts(), callbacks=list(callbacks),
        strategies=strategies,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer


@pytest.mark.parametrize("sink", ["kept", "kept8", "host"])
def test_before_the_update_no_weight_has_moved(tmp_path: Path, sink: str) -> None:
    looks = Looks()
    run(tmp_path, looks, strategies=SINKS[sink])
    assert looks.moved == [False] * STEPS


def test_gradients_that_are_kept_are_there_before_the_update(tmp_path: Path) -> None:
    ours, theirs = Looks(), Looks()
    run(tmp_path, ours, strategies=SINKS["kept"], max_grad_norm=0.0)
    run(tmp_path, theirs, max_grad_norm=0.0)
    for mine, stock in zip(ours.gradients, theirs.gradients, strict=True):
        assert mine.keys() == stock.keys()
    first, expected = ours.gradients[0], theirs.gradients[0]
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name in first:
        assert torch.allclose(first[name], expected[name], atol=0.05 * largest)


@pytest.mark.parametrize("vocabulary", [40, 2000], ids=["small", "large"])
def test_a_callback_may_change_a_kept_gradient(tmp_path: Path, vocabulary: int) -> None:
    class Drop(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            model.bert.embeddings.word_embeddings.weight.grad.zero_()

    model = model_of(dropout=0.0, vocab_size=vocabulary)
    before = model.bert.embeddings.word_embeddings.weight.detach().clone()
    trainer = run(tmp_path, Drop(), strategies=[LowBitAdamW()], weight_decay=0.0, model=model)
    embeddings = trainer.model.bert.embeddings
    # Far below an update of 1e-2: large weights are rounded anew in every step.
    assert torch.allclose(embeddings.word_embeddings.weight.float(), before, atol=1e-3)
    others = model_of(dropout=0.0, vocab_size=vocabulary).bert.embeddings.position_embeddings
    assert not torch.equal(embeddings.position_embeddings.weight, others.weight.bfloat16())


@pytest.mark.parametrize("sink", SINKS)
def test_without_clipping_the_logged_norm_is_the_gradients(tmp_path: Path, sink: str) -> None:
    stock = run(tmp_path / "stock", max_grad_norm=0.0)
    ours = run(tmp_path / "ours", strategies=SINKS[sink], max_grad_norm=0.0)

    def refuse(number: str) -> None:
        raise AssertionError(f"{number} is not JSON")

    found = []
    for name in ("stock", "ours"):
        text = (tmp_path / name / f"checkpoint-{STEPS}" / "trainer_state.json").read_text()
        history = json.loads(text, parse_constant=refuse)["log_history"]
        found.append([entry["grad_norm"] for entry in history if "loss" in entry])
    assert len(found[1]) == len(ours.state.log_history) - 1 == STEPS
    assert found[1][0] == pytest.approx(found[0][0], rel=0.05)
    assert stock.state.global_step == STEPS
