"""NEFTune's noise is as large as the stock Trainer's, however batches are cut and packed."""

# ruff: noqa: ARG002 - the Trainer decides what callbacks are given.
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import TrainerCallback

from memfit import BudgetTrainer, TrainingArguments
from memfit.engine.micro_batches import MicroBatching
from memfit.strategies import CudaGraphs, LowBitAdamW, Packing, Setup
from small_training import collate, model_of, texts

STEPS = 4


class Noise(TrainerCallback):
    """The largest noise of every step: what the embeddings give beside what they hold."""

    def __init__(self) -> None:
        self.largest: list[float] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.embeddings = model.get_input_embeddings()
        self.handle = self.embeddings.register_forward_hook(self._measure)

    def on_step_begin(self, args, state, control, **kwargs):
        self.largest.append(0.0)

    def on_train_end(self, args, state, control, **kwargs):
        self.handle.remove()

    def _measure(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        held = torch.nn.functional.embedding(inputs[0], module.weight)
        self.largest[-1] = max(self.largest[-1], float((output - held).detach().abs().max()))


def noise_of(folder: Path, kind: Any = BudgetTrainer, **settings: Any) -> list[float]:
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=STEPS, neftune_noise_alpha=5.0,
        learning_rate=0.0, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, seed=1,
    )  # fmt: skip
    model, noise = model_of(dropout=0.0, hidden_size=64), Noise()
    trainer = kind(model, args, collate, texts(), callbacks=[noise], **settings)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    assert not hasattr(model.get_input_embeddings(), "neftune_noise_alpha")
    assert not model.get_input_embeddings()._forward_pre_hooks
    return noise.largest


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"strategies": [Packing()]},
        {"micro_batching": MicroBatching(max_rows=3)},
        {"strategies": [Packing()], "micro_batching": MicroBatching(max_tokens=60)},
        {"strategies": [Packing()], "budget": "4GB"},
    ],
    ids=["whole", "packed", "micro-batches", "packed micro-batches", "rehearsed"],
)
def test_the_noise_is_the_stock_trainers(tmp_path: Path, settings: dict[str, Any]) -> None:
    stock = noise_of(tmp_path, transformers.Trainer)
    assert len(stock) == STEPS
    assert len(set(stock)) > 1  # batches of several widths
    assert noise_of(tmp_path, **settings) == pytest.approx(stock, rel=0.02)


def test_captured_steps_are_not_used_with_noise(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), neftune_noise_alpha=5.0, use_cpu=True, report_to="none")
    setup = Setup(model=model_of(), args=args, device=torch.device("cpu"))
    for strategy in (Packing(), LowBitAdamW()):
        strategy.apply(setup)
    setup.device = torch.device("cuda")
    assert "neftune_noise_alpha" in CudaGraphs().unavailable(setup)
    args.neftune_noise_alpha = None
    assert CudaGraphs().unavailable(setup) == ""
