"""The whole step as CUDA graphs, inside the Trainer, on a card."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract"))

import transformers
from test_against_stock import collate
from test_strategies import model_of, texts

from memfit import BudgetTrainer
from memfit.runtime.batching import MicroBatching
from memfit.strategies import CudaGraphs, GradientRelease, LowBitAdamW, Packing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SINKS = {
    "kept": [LowBitAdamW()],
    "kept8": [LowBitAdamW(), GradientRelease("kept8")],
    "two_pass": [LowBitAdamW(), GradientRelease("two_pass")],
    "release": [LowBitAdamW(), GradientRelease()],
    "fp16": [LowBitAdamW(dtype="float16")],
}


class Graphs(transformers.TrainerCallback):
    """The token counts of the graphs there are after a step; they go with the training."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.tokens: dict[str, set[int]] = {}
        self.held = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        executor = self.trainer.executor
        self.held = max(self.held, getattr(executor, "captured_graphs", 0))
        for name, cache in getattr(executor, "_caches", {}).items():
            self.tokens.setdefault(name, set()).update(cache.tokens)


def train(folder, strategies, clip, *, dropout=0.0, rows=None, **more):
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=16, max_steps=20, learning_rate=5e-4,
        lr_scheduler_type="linear", max_grad_norm=clip, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, seed=3,
    )  # fmt: skip
    trainer = BudgetTrainer(
        model_of(dropout), args, train_dataset=rows or texts(), strategies=strategies,
        **{"data_collator": collate, **more},
    )  # fmt: skip
    graphs = Graphs()
    graphs.trainer = trainer
    trainer.add_callback(graphs)
    trainer.train()
    return graphs, [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("name", SINKS)
def test_replayed_steps_train_as_launched_ones(tmp_path, name):
    clip = 0.0 if name == "release" else 0.5
    _, launched = train(tmp_path, [Packing(), *SINKS[name]], clip)
    graphs, replayed = train(tmp_path, [Packing(), *SINKS[name], CudaGraphs(64)], clip)
    assert graphs.tokens["whole"]
    assert replayed == pytest.approx(launched, abs=1e-2)
    assert replayed[-1] < replayed[0] - 0.1


def test_micro_batches_are_replayed_too(tmp_path):
    strategies = [Packing(), LowBitAdamW(), GradientRelease("kept8")]
    micro = MicroBatching(max_tokens=150)
    _, launched = train(tmp_path, strategies, 0.5, micro_batching=micro)
    graphs, replayed = train(tmp_path, [*strategies, CudaGraphs(64)], 0.5, micro_batching=micro)
    assert graphs.tokens["micro"]
    assert replayed == pytest.approx(launched, abs=1e-2)


def test_every_replay_draws_fresh_dropout(tmp_path):
    row = texts(1)[0]
    strategies = [Packing(), LowBitAdamW(), GradientRelease(), CudaGraphs(64)]
    args = {"dropout": 0.3, "rows": [row] * 320}
    graphs, losses = train(tmp_path, strategies, 0.0, **args)
    assert len(set(losses[2:])) == len(losses[2:])
    assert graphs.held == 1


class Stream(torch.utils.data.IterableDataset):
    """Rows that come one after another."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows * 40)


def test_a_stream_is_trained_by_graphs_too(tmp_path):
    strategies = [Packing(), LowBitAdamW(), CudaGraphs(64)]
    graphs, losses = train(tmp_path, strategies, 0.5, rows=Stream(texts()))
    assert graphs.tokens["whole"]
    assert losses[-1] < losses[0] - 0.1


def test_a_batch_without_a_mask_is_replayed_too(tmp_path):
    def unmasked(rows):
        batch = collate(rows)
        del batch["attention_mask"]
        return batch

    strategies = [Packing(), LowBitAdamW(), CudaGraphs(64)]
    row = texts(1)[0]
    graphs, losses = train(tmp_path, strategies, 0.5, rows=[row] * 320, data_collator=unmasked)
    assert graphs.tokens["whole"]
    assert losses[-1] < losses[0] - 0.1
