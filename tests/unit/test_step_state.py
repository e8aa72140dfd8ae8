"""Buffers that move in forward: as if only the steps that count had been run."""

# ruff: noqa: ARG002 - the Trainer decides what callbacks are given.
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertForSequenceClassification, TrainerCallback

from memfit import BudgetTrainer, TrainingArguments
from memfit.engine.step_state import Buffers
from memfit.strategies import LowBitAdamW
from small_training import collate, model_of, texts

STEPS = 3


class Normed(BertForSequenceClassification):
    """A batch norm below the head, and a count that is made anew in every step."""

    passes = 0
    """All that were begun, which nothing puts back."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = nn.BatchNorm1d(config.num_labels, affine=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        output = super().forward(input_ids, attention_mask)
        output.logits = self.norm(output.logits.float()).to(output.logits.dtype)
        if self.training:
            self.seen = self.seen + 1
            self.passes += 1
        if labels is not None:
            output.loss = nn.functional.cross_entropy(output.logits.float(), labels)
        return output


class FailOnce(TorchDispatchMode):
    """One backward finds no memory, after the forward has moved its buffers."""

    def __init__(self, at_step: int) -> None:
        super().__init__()
        self.at_step = at_step
        self.step = self.raised = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_backward = torch._C._current_autograd_node() is not None
        if self.step == self.at_step and not self.raised and in_backward:
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


class Tells(TrainerCallback):
    def __init__(self, fault: FailOnce) -> None:
        self.fault = fault

    def on_step_begin(self, args, state, control, **kwargs):
        self.fault.step = state.global_step + 1


def buffers_after(
    folder: Path, kind: Any = BudgetTrainer, fail_at: int = -1, **settings: Any
) -> dict[str, torch.Tensor]:
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=STEPS, learning_rate=0.0,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, seed=1,
        weight_decay=0.0, max_grad_norm=settings.pop("max_grad_norm", 1.0),
    )  # fmt: skip
    torch.manual_seed(0)
    model = Normed(model_of(dropout=0.0).config)
    fault = FailOnce(fail_at)
    trainer = kind(model, args, collate, texts(), callbacks=[Tells(fault)], **settings)
    trainer.remove_callback(transformers.PrinterCallback)
    with fault:
        trainer.train()
    assert fault.raised == (fail_at > 0)
    if fail_at > 0:  # in the backward of its first micro-batch
        assert int(model.seen) == int(model.norm.num_batches_tracked) == model.passes - 1 >= STEPS
    return {name: value.clone() for name, value in model.named_buffers()}


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.allclose(mine[name].float(), theirs[name].float(), atol=1e-6), name


@pytest.mark.filterwarnings("ignore:the memory of Normed cannot be predicted")
@pytest.mark.parametrize(
    "settings", [{}, {"budget": "4GB", "strategies": []}], ids=["plain", "rehearsed"]
)
def test_only_steps_that_count_move_the_buffers(tmp_path: Path, settings: dict[str, Any]) -> None:
    stock = buffers_after(tmp_path, transformers.Trainer)
    assert int(stock["norm.num_batches_tracked"]) == int(stock["seen"]) == STEPS
    assert_same(buffers_after(tmp_path, **settings), stock)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("strategies", [[], [LowBitAdamW()]], ids=["plain", "low-bit"])
def test_a_step_that_is_run_again_moves_them_once(
    tmp_path: Path, step: int, strategies: list[Any]
) -> None:
    buffers_after(tmp_path, fail_at=step, strategies=strategies)


def test_what_moves_is_known_after_one_pass_and_nothing_else_is_copied() -> None:
    model, buffers = Normed(model_of().config), Buffers()
    batch = collate(texts(4))
    before = buffers.now(model)
    assert len(before._kept) == len(dict(model.named_buffers()))
    start = {name: value.clone() for name, value in model.named_buffers()}
    model(**batch)
    buffers.learn(before)
    before.restore()
    assert all(torch.equal(value, start[name]) for name, value in model.named_buffers())
    moving = {name for _, name in buffers._moving or ()}
    assert moving == {"running_mean", "running_var", "num_batches_tracked", "seen"}
    plain, still = Buffers(), model_of()
    before = plain.now(still)
    still(**batch)
    plain.learn(before)
    assert plain.now(still)._kept == []
