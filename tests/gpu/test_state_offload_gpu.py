"""State in host memory on a CUDA card: kernels reach for it, launched and replayed, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification

from memfit import BudgetTrainer
from memfit.strategies import (
    CudaGraphs,
    GradientRelease,
    LowBitAdamW,
    Packing,
    StateOffload,
    Strategy,
)
from small_training import collate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WAYS: dict[str, tuple[list[Strategy], float]] = {
    "kept": ([LowBitAdamW()], 1.0),
    "kept8": ([LowBitAdamW(), GradientRelease("kept8")], 1.0),
    "kept8, 16-bit": ([LowBitAdamW(16), GradientRelease("kept8")], 1.0),
    "kept8, graphs": ([LowBitAdamW(), GradientRelease("kept8"), CudaGraphs(256)], 1.0),
    "kept, graphs": ([LowBitAdamW(), CudaGraphs(256)], 1.0),
}
CASES = [(name, False) for name in WAYS] + [(name, True) for name in WAYS if "kept8" in name]


def run(folder: Path, strategies: list[Strategy], clip: float) -> Any:
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=2000, hidden_size=256, num_hidden_layers=3, num_attention_heads=4,
            intermediate_size=1024, max_position_embeddings=96, num_labels=2,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=32, max_steps=12, learning_rate=1e-4, seed=3,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1,
        max_grad_norm=clip,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(128):
        length = int(torch.randint(20, 90, (), generator=draw))
        ids = torch.randint(5, 2000, (length,), generator=draw).tolist()
        rows.append({"input_ids": ids, "labels": ids[0] % 2})
    trainer = BudgetTrainer(
        model, args, strategies=[Packing(), *strategies], train_dataset=rows, data_collator=collate
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("name", "gradients"), CASES)
def test_it_trains_as_with_all_state_on_the_card(tmp_path, name, gradients):
    strategies, clip = WAYS[name]
    here = run(tmp_path, strategies, clip)
    there = run(tmp_path, [*strategies, StateOffload(gradients)], clip)
    # Attention adds up in another order each time: the same, as far as two runs are.
    assert losses(there) == pytest.approx(losses(here), abs=5e-3)
    optimizer = getattr(there.optimizer, "optimizer", there.optimizer)
    large = [optimizer.state[p] for p in optimizer.large]
    assert all(state["moment1"].is_pinned() for state in large)
    assert all(bool(state["moment2"].any()) for state in large)
    saved = there.optimizer.state_dict()["state"]
    assert all(bool(torch.isfinite(v.float()).all()) for s in saved.values() for v in s.values())


def test_the_update_itself_is_the_same_to_the_bit():
    from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer as Optimizer
    from memfit.strategies.lowbit.number_formats import to_lowbit

    ends = []
    for on_host in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(512, 512, bias=False).cuda()
        remainders = to_lowbit(model, torch.bfloat16, master_bits=24)
        optimizer = Optimizer(
            model.parameters(), lr=1e-3, seed=1, remainders=remainders, state_on_host=on_host
        )
        draw = torch.Generator("cuda").manual_seed(2)
        for _ in range(5):
            model.weight.grad = torch.randn(
                512, 512, device="cuda", generator=draw, dtype=torch.bfloat16
            )
            optimizer.step()
        ends.append((optimizer.fp32_state_dict(model)["weight"], optimizer.state_dict()["state"]))
    assert torch.equal(ends[0][0], ends[1][0])
    for name, value in ends[0][1][0].items():
        assert torch.equal(value.cpu(), ends[1][1][0][name].cpu()), name


def test_the_card_holds_three_bytes_a_parameter_less(tmp_path):
    held = []
    for more in ([], [StateOffload()]):
        trainer = run(tmp_path, [LowBitAdamW(), GradientRelease("kept8"), *more], 1.0)
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        elements = sum(p.numel() for p in optimizer.large)
        held.append(torch.cuda.memory_allocated())
        trainer.setup.restore()
        del trainer, optimizer
    assert held[0] - held[1] == pytest.approx(3 * elements, rel=0.05)
