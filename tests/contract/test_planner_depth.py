"""k of n layers, from shallow traces of memfit's own step, against the full trace."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers import BertConfig, TrainingArguments

from memfit.engine.micro_batches import MicroBatching
from memfit.memory.cards import find_card
from memfit.memory.components import Component, Event
from memfit.memory.tracing.depth import Segments, cut, play
from memfit.planner.task import Task
from memfit.strategies import (
    ActivationOffload,
    Checkpointing,
    CudaGraphs,
    Freezing,
    FusedLayers,
    GradientRelease,
    HalfPrecision,
    LowBitAdamW,
    Packing,
    SmallWorkspace,
    Strategy,
)
from step_memory import peak_on_a_card
from traced_plans import Candidate, trace_step

H200 = find_card("H200")
SMALL: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512,
}  # fmt: skip
LOW = LowBitAdamW()


def workload(layers: int) -> Task:
    args = TrainingArguments(
        "unused", per_device_train_batch_size=8, per_device_eval_batch_size=16, max_grad_norm=0.0,
        report_to="none", use_cpu=True,
    )  # fmt: skip
    draw = random.Random(1)
    lengths = tuple(draw.randint(8, 64) for _ in range(200))
    return Task(config=BertConfig(num_hidden_layers=layers, **SMALL), lengths=lengths, args=args)


def candidate(*strategies: Strategy) -> Candidate:
    return Candidate(strategies, MicroBatching())


def assert_same(found: Segments, expected: Segments) -> None:
    assert found.parts.keys() == expected.parts.keys()
    for name, marks in expected.parts.items():
        ours = [(mark.birth, mark.kind[0]) for mark in found.parts[name]]
        assert ours == [(mark.birth, mark.kind[0]) for mark in marks], name
    order = ["build", "start", "micro", "update_first", "clear", "evaluate"]
    ours, theirs = peak_on_a_card(play(found, order)), peak_on_a_card(play(expected, order))
    assert ours.allocated_bytes == theirs.allocated_bytes
    assert ours.reserved_bytes == theirs.reserved_bytes


@pytest.mark.parametrize(
    ("strategies", "traced_layers"),
    [
        ([Packing(), Checkpointing(), LOW, GradientRelease("kept8")], (2, 3)),
        ([HalfPrecision(), Freezing(6), Checkpointing(7)], (4, 5, 5, 5)),
        ([Packing(), FusedLayers(), Checkpointing(6), LOW, GradientRelease("kept8")], (3, 4, 4)),
        ([Packing(), Checkpointing(), ActivationOffload(), LOW], (4, 5)),
        ([Packing(), FusedLayers(), LOW, SmallWorkspace(), CudaGraphs()], (2, 3)),
    ],
    ids=lambda value: "-".join(getattr(one, "name", str(one)) for one in value),
)
def test_k_of_n_layers_follow_from_shallow_traces_to_the_byte(
    strategies: list[Strategy], traced_layers: tuple[int, ...]
) -> None:
    count = 20 if len(traced_layers) == 4 else 12
    task = workload(count)
    chosen = candidate(*strategies)
    found = trace_step(task, chosen, H200)
    assert found.traced_layers == traced_layers
    full = trace_step(task, chosen, H200, layers=count)
    assert_same(found.segments, full.segments)
    assert found.parameters == full.parameters
    assert found.trainable_parameters == full.trainable_parameters
    assert found.host_bytes == pytest.approx(full.host_bytes, rel=0.05)
    assert found.counts.half_flops == pytest.approx(full.counts.half_flops)
    assert found.counts.launches == pytest.approx(full.counts.launches)


def test_when_a_single_number_dies_makes_no_difference() -> None:
    def events(*order: int) -> dict[str, list[Event]]:
        births = [Event(block, 4, True, Component.ACTIVATIONS, "layer.0") for block in (1, 2, 3)]
        deaths = [one._replace(birth=False) for one in births]
        every = [*births, *deaths]
        return {"micro": [every[index] for index in order]}

    assert cut(events(0, 1, 3, 2, 4, 5)) == cut(events(0, 1, 2, 3, 4, 5))


def test_layers_recomputed_are_computed_once_more() -> None:
    task, plain = workload(12), candidate(Packing(), LOW)
    flops = [
        trace_step(task, one, H200).counts.half_flops
        for one in (plain, candidate(Packing(), LOW, Checkpointing(6)),
                    candidate(Packing(), LOW, Checkpointing()))
    ]  # fmt: skip
    assert flops[1] - flops[0] == pytest.approx((flops[2] - flops[0]) / 2, rel=0.1)
    assert 1.25 < flops[2] / flops[0] < 1.34


def test_an_update_in_plain_torch_follows_from_shallow_traces() -> None:
    """Its temporaries grow with the depth where small parameters share them."""
    args = TrainingArguments("unused", report_to="none", use_cpu=True)
    base = Task(config=BertConfig(vocab_size=21128), lengths=(64,) * 64, args=args)
    chosen = candidate(Packing(), LowBitAdamW(24, "float16"))
    pascal = find_card("GTX 1050 Ti")  # no Triton
    order = ["build", "start", "micro", "update_first", "clear"]
    found, full = (
        peak_on_a_card(play(trace_step(base, chosen, pascal, layers=layers).segments, order))
        for layers in (None, 12)
    )
    assert found.allocated_bytes == full.allocated_bytes
    assert found.reserved_bytes == full.reserved_bytes
