"""The low-bit optimizer's state in host memory: the same numbers, other bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import BertConfig

from memfit.engine.micro_batches import MicroBatching
from memfit.memory.cards import find_card
from memfit.memory.components import Component
from memfit.planner.task import Task
from memfit.strategies import CudaGraphs, GradientRelease, Packing, StateOffload, Strategy
from memfit.strategies import LowBitAdamW as LowBit
from memfit.strategies.lowbit.gradient_sinks import KeptInt8
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.number_formats import to_lowbit
from memfit.strategies.offload.host_memory import HostMemory
from traced_plans import Candidate, price_memory, pricer_of, unavailable_reason

H200 = find_card("H200")
KEPT = GradientRelease("kept8")


@pytest.fixture(scope="module")
def task() -> Task:
    args = transformers.TrainingArguments(
        "unused", per_device_train_batch_size=8, report_to="none", use_cpu=True
    )
    config = BertConfig(
        vocab_size=3000, hidden_size=256, num_attention_heads=4, intermediate_size=1024,
        num_hidden_layers=6, max_position_embeddings=64,
    )  # fmt: skip
    return Task(config=config, lengths=tuple(range(8, 40)) * 2, args=args)


def large_parameters(task: Task) -> int:
    model = transformers.BertForSequenceClassification(task.config)
    return sum(p.numel() for p in model.parameters() if p.numel() > 16384)


def candidate(*strategies: Strategy, tokens: int | None = None) -> Candidate:
    return Candidate((Packing(), *strategies), MicroBatching(max_tokens=tokens))


# -------------------------------------------------------------------------- the same numbers


def trained(
    steps: int, *, on_host: bool, state: Any = None
) -> tuple[LowBitOptimizer, torch.Tensor]:
    """A linear layer's weights after some steps with kept gradients."""
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256, bias=False)
    remainders = to_lowbit(model, torch.bfloat16, master_bits=24)
    optimizer = LowBitOptimizer(
        model.parameters(), lr=1e-3, seed=1, remainders=remainders, state_on_host=on_host,
        gradients_on_host=on_host,
    )  # fmt: skip
    KeptInt8(optimizer, max_grad_norm=1.0)
    if state is not None:
        optimizer.load_state_dict(state)
    draw = torch.Generator().manual_seed(2)
    for _ in range(steps):
        batch = torch.randn(8, 256, generator=draw).bfloat16()
        model(batch).float().square().mean().backward()
        optimizer.step()
    return optimizer, model.weight.detach().clone()


def test_a_step_is_bit_for_bit_that_of_state_beside_the_weights() -> None:
    here, there = trained(5, on_host=False), trained(5, on_host=True)
    assert torch.equal(here[1], there[1])
    for mine, other in zip(here[0].state.values(), there[0].state.values(), strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_a_checkpoint_of_the_one_is_one_of_the_other() -> None:
    saved = trained(3, on_host=False)[0].state_dict()
    loaded, _ = trained(0, on_host=True, state=saved)
    (mine,), (other,) = loaded.state_dict()["state"].values(), saved["state"].values()
    assert all(torch.equal(mine[name], other[name]) for name in other)


def test_host_memory_is_zeroed_and_of_the_size_asked_for() -> None:
    memory = HostMemory(torch.device("cpu"))
    first, second = memory.zeros(1000, torch.int8), memory.zeros(10, torch.float32)
    first.fill_(7)
    assert second.shape == (10,)
    assert not second.any()


# ------------------------------------------------------------------------- where, and how much


@pytest.mark.parametrize(
    ("strategies", "reason"),
    [
        ((StateOffload(),), "needs the low-bit optimizer"),
        ((LowBit(), StateOffload(gradients=True)), "only gradients of eight bits"),
        ((LowBit(), KEPT, StateOffload(gradients=True)), ""),
        ((LowBit(), StateOffload()), ""),
    ],
)
def test_it_says_what_it_needs(task, strategies, reason):
    said = unavailable_reason(strategies, task, H200)
    assert (reason in said) if reason else not said


def test_on_a_cpu_there_is_nothing_to_take_away(task):
    assert "in host memory already" in unavailable_reason((LowBit(), StateOffload()), task, None)


@pytest.mark.parametrize(
    ("bits", "gradients", "bytes_each"), [(24, False, 3), (16, False, 2), (24, True, 4)]
)
def test_what_leaves_the_card_is_a_byte_a_number(task, bits, gradients, bytes_each):
    ways = (LowBit(bits), KEPT)
    here, _, _ = price_memory(task, candidate(*ways), H200)
    there, _, trace = price_memory(task, candidate(*ways, StateOffload(gradients)), H200)
    elements = large_parameters(task)
    assert trace.host_bytes == pytest.approx(bytes_each * elements, rel=0.005)
    names = (Component.OPTIMIZER, Component.GRADIENTS)
    saved = sum(here.components[name] - there.components[name] for name in names)
    assert saved == pytest.approx(bytes_each * elements, rel=0.02)


@pytest.mark.parametrize("away", [StateOffload(), StateOffload(gradients=True)])
def test_state_and_gradients_that_a_step_reaches_are_counted(task, away):
    one = candidate(LowBit(16), KEPT, away, CudaGraphs(64), tokens=96)
    price = pricer_of(task, H200).price(*one)
    # State is read and written; every micro-batch is added to a gradient that is read once more.
    each = 4 + (2 * price.counts.replays + 1 if away.gradients else 0)
    assert price.counts.reached_bytes == pytest.approx(each * large_parameters(task), rel=0.05)


def test_its_step_is_longer_by_what_crosses_the_bus(task):
    ways = (LowBit(), KEPT, CudaGraphs(64))
    found = pricer_of(task, H200)
    here, there = (found.price(*candidate(*ways, *more)) for more in ((), (StateOffload(),)))
    assert there.device_bytes < here.device_bytes
    assert there.step_seconds > here.step_seconds
