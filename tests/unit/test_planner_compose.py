"""Quick prices, composed from shallow traces, against the whole step traced."""

from __future__ import annotations

import itertools

import pytest
from planner_fixtures import bert, h200, task

from memfit.engine.micro_batches import MicroBatching
from memfit.memory.cards import DeviceProfile
from memfit.planner.candidates import Candidate
from memfit.planner.pricing import shallow_traces
from memfit.planner.pricing.pricer import TracedPricer
from memfit.strategies import (
    ActivationOffload,
    Checkpointing,
    CudaGraphs,
    Freezing,
    FrozenFeatures,
    FusedLayers,
    GradientRelease,
    Lora,
    LowBitAdamW,
    OptimizerOffload,
    Packing,
    SmallWorkspace,
    Strategy,
    ordered,
)

pytestmark = pytest.mark.slow
DEPTH = 8
TASK = task(bert(DEPTH, 512, 3000))
LAYERS = (Packing(), FusedLayers(), SmallWorkspace())
KEPT8 = (LowBitAdamW(), GradientRelease("kept8"))

_pricers: dict[str, TracedPricer] = {}


def pricer_for(card: DeviceProfile | None) -> TracedPricer:
    name = "cpu" if card is None else card.name
    return _pricers.setdefault(name, TracedPricer(TASK, card))


def candidate(*strategies: Strategy, tokens: int | None = None) -> Candidate:
    return Candidate(tuple(ordered(strategies)), MicroBatching(max_tokens=tokens))


def off(one: Candidate, card: DeviceProfile | None) -> tuple[float, float]:
    """By how much the quick price is off: allocated bytes, and what must fit into a budget."""
    pricer = pricer_for(card)
    quick, full = pricer.quick(one).peak, pricer.full(one)
    training = full.phases["training"]
    return (
        quick.allocated_bytes / training.allocated_bytes - 1,
        quick.device_bytes / full.device_bytes - 1,
    )


@pytest.mark.parametrize(
    "one",
    [
        candidate(*LAYERS, *KEPT8),
        candidate(*LAYERS, *KEPT8, Checkpointing(3)),
        candidate(*LAYERS, *KEPT8, Checkpointing()),
        candidate(*LAYERS, *KEPT8, Checkpointing(), tokens=1366),
        candidate(*LAYERS, *KEPT8, CudaGraphs(), Checkpointing(3)),
        candidate(*LAYERS, LowBitAdamW()),
        candidate(*LAYERS, LowBitAdamW(16), Checkpointing(4)),
        candidate(*LAYERS, LowBitAdamW(), tokens=1024),
        candidate(*LAYERS, *KEPT8, ActivationOffload()),
        candidate(*LAYERS, OptimizerOffload(dtype="bfloat16"), Checkpointing(4)),
        # These learn less than the family they follow, and grow as it does.
        candidate(*LAYERS, Lora(), LowBitAdamW()),
        candidate(*LAYERS, Lora(), LowBitAdamW(), tokens=1024),
        candidate(*LAYERS, Freezing("embeddings"), LowBitAdamW()),
        candidate(*LAYERS, Freezing("encoder"), LowBitAdamW()),
    ],
    ids=lambda one: "-".join(s.name for s in one.strategies[2:]),
)
def test_composed_price_is_the_traced_one(one: Candidate) -> None:
    allocated, device = off(one, h200())
    assert abs(allocated) < 0.025
    assert abs(device) < 0.04


@pytest.mark.parametrize(
    "one",
    [
        candidate(Packing()),
        candidate(Packing(), Checkpointing(3)),
        candidate(Packing(), Checkpointing(), tokens=1024),
        candidate(Freezing(), FrozenFeatures(max_tokens=4096)),
    ],
)
def test_composed_price_on_a_cpu_is_the_traced_one(one: Candidate) -> None:
    allocated, device = off(one, None)
    assert abs(allocated) < 0.03
    assert allocated == pytest.approx(device, abs=0.03)


def test_counts_are_those_of_the_traced_step() -> None:
    # One micro-batch of the largest batch: what was composed for it against what was counted.
    from memfit.planner.pricing.step_trace import trace_step

    alike = task(bert(DEPTH, 512, 3000), lengths=(96,) * 64)
    pricer = TracedPricer(alike, h200())
    for one in (
        candidate(*LAYERS, *KEPT8),
        candidate(*LAYERS, *KEPT8, Checkpointing(3)),
        candidate(*LAYERS, LowBitAdamW()),
    ):
        counted = trace_step(alike, one, h200()).counts
        composed = pricer.quick(one).counts
        assert composed.half_flops == pytest.approx(counted.half_flops, rel=0.01)
        assert composed.bytes_moved == pytest.approx(counted.bytes_moved, rel=0.03)
        assert composed.launches == pytest.approx(counted.launches, rel=0.03)
        assert composed.half_attention_flops == pytest.approx(
            counted.half_attention_flops, rel=0.05
        )


def test_recomputing_saves_memory_and_costs_time_layer_by_layer() -> None:
    pricer = pricer_for(h200())
    counts = [None, *range(1, DEPTH + 1)]
    prices = [
        pricer.quick(candidate(*LAYERS, *KEPT8, *([] if n is None else [Checkpointing(n)])))
        for n in counts
    ]
    sizes = [one.device_bytes for one in prices]
    assert all(larger > 0.99 * smaller for larger, smaller in itertools.pairwise(sizes))
    assert sizes[-1] < 0.9 * sizes[0]
    flops = [one.counts.half_flops for one in prices]
    assert flops == sorted(flops)
    assert 1.2 < flops[-1] / flops[0] < 1.34


def test_strategies_on_the_host_are_counted_there() -> None:
    pricer = pricer_for(h200())
    price = pricer.quick(candidate(*LAYERS, OptimizerOffload(dtype="bfloat16")))
    parameters = pricer.learning_parameters(price.candidate)
    assert price.host_bytes == pytest.approx(18 * parameters, rel=0.1)
    assert price.counts.host_parameters == pytest.approx(parameters, rel=0.02)


def test_shared_layers_are_priced_without_being_told_apart() -> None:
    from transformers import AlbertConfig

    config = AlbertConfig(
        vocab_size=500,
        embedding_size=32,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=2,
        intermediate_size=512,
    )
    workload = task(config)
    pricer = TracedPricer(workload, h200())
    for again in ((), (Checkpointing(),)):
        one = candidate(Packing(), *KEPT8, *again)
        quick, full = pricer.quick(one).peak, pricer.full(one).phases["training"]
        assert quick.allocated_bytes == pytest.approx(full.allocated_bytes, rel=0.05)


def test_a_model_of_another_depth_is_priced_from_the_traces_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = candidate(*LAYERS, *KEPT8, Checkpointing(2))
    shorter = task(bert(4, 512, 3000))
    own = TracedPricer(shorter, h200()).quick(one)
    pricer = TracedPricer(task(bert(DEPTH, 512, 3000)), h200())
    longer = pricer.quick(one)
    monkeypatch.setattr(shallow_traces, "trace_step", None)  # nobody may trace from here on
    shared = pricer.of(shorter).quick(one)
    assert shared.peak == own.peak
    assert shared.step_seconds == pytest.approx(own.step_seconds, rel=1e-9)
    assert shared.device_bytes < longer.device_bytes
    with pytest.raises(TypeError):  # a narrower one shares nothing
        pricer.of(task(bert(4, 256, 3000))).quick(one)
