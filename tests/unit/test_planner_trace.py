"""The planner's traces: any card, any depth, any batch, and what lies on the host."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    Qwen3Config,
    TrainingArguments,
)

from memfit.engine.micro_batches import MicroBatching, largest_batch
from memfit.memory.cards import CardPlace, find_card
from memfit.memory.components import Component
from memfit.memory.phases import EVALUATION, RESUMING, SAVING, TRAINING
from memfit.memory.tracing import traced_device
from memfit.memory.tracing.depth import Segments, with_layers
from memfit.memory.tracing.tracker import Tracker
from memfit.planner.memory_price import Priced, context_bytes
from memfit.planner.task import Task
from memfit.planner.traced_setup import LengthRows, graph_count, make_batch, rows_for
from memfit.strategies import (
    ActivationOffload,
    Checkpointing,
    CudaGraphs,
    Freezing,
    FrozenFeatures,
    FusedAttention,
    FusedLayers,
    GradientRelease,
    HalfPrecision,
    Lora,
    LowBitAdamW,
    OptimizerOffload,
    Packing,
    SmallWorkspace,
    Strategy,
    Truncation,
)
from traced_plans import Candidate, price_memory, trace_step, unavailable_reason

H200, T4 = find_card("H200"), find_card("T4")
SMALL: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512,
    "max_position_embeddings": 128,
}  # fmt: skip
LOW = LowBitAdamW()
WHOLE = MicroBatching()


@functools.cache
def workload(layers: int = 2, clip: float = 1.0, **changes: Any) -> Task:
    args = TrainingArguments(
        "unused", per_device_train_batch_size=8, max_grad_norm=clip, report_to="none", use_cpu=True
    )
    draw = random.Random(1)
    lengths = tuple(draw.randint(8, 64) for _ in range(200))
    config = BertConfig(num_hidden_layers=layers, **SMALL, **changes)
    return Task(config=config, lengths=lengths, args=args)


def candidate(*strategies: Strategy, limits: MicroBatching = WHOLE) -> Candidate:
    return Candidate(strategies, limits)


# ------------------------------------------------------------------------------- the rows


def test_the_worst_batch_is_the_longest_rows_packed_and_padded() -> None:
    task = workload()
    packed = rows_for(task, (Packing(),), WHOLE)
    assert (packed.tokens, packed.parts) == (task.worst_tokens, 1)
    padded = rows_for(task, (), WHOLE)
    assert padded.lengths == (task.longest_tokens,) * 8


def test_a_limit_cuts_the_batch_into_parts_of_at_most_so_many_tokens() -> None:
    task = workload()
    limits = MicroBatching(max_tokens=150)
    for strategies in ((Packing(),), ()):
        rows = rows_for(task, strategies, limits)
        assert 64 <= rows.tokens <= 150
        assert rows.parts == -(-(task.worst_tokens if strategies else 8 * 64) // 150)
    one = rows_for(task, (Packing(),), MicroBatching(max_tokens=1))
    assert one.lengths == (64,)
    assert rows_for(task, (Packing(),), MicroBatching(max_rows=2)).parts == 4


def test_so_many_tokens_as_asked_for_are_traced() -> None:
    rows = rows_for(workload(), (Packing(),), WHOLE, tokens=301)
    assert rows.tokens == 301
    assert len(rows.lengths) == 8
    assert max(rows.lengths) > min(rows.lengths) > 0


def test_where_attention_pads_again_short_texts_beside_a_long_one_are_the_worst() -> None:
    task = replace(workload(), lengths=(*[64, 60] * 4, 33, *[5] * 190))
    limits = MicroBatching(max_tokens=130)
    assert rows_for(task, (Packing(),), limits).lengths == (64, 64)
    cut = rows_for(task, (Packing(),), limits, repads=True)
    assert (cut.lengths, cut.parts) == ((64, 60), 4)
    whole = rows_for(task, (Packing(),), limits, repads=True, tokens=130, whole=True)
    assert whole.parts == 1
    assert len(whole.lengths) * max(whole.lengths) > 2 * 130
    # Both are priced, also where no part can be larger than a whole batch by its tokens.
    _, _, trace = price_memory(task, candidate(Packing(), limits=limits), H200)
    assert (trace.rows.parts, len(trace.rows.lengths)) == (1, 8)


def test_a_batch_that_is_not_cut_is_priced_beside_parts_and_evaluates_as_the_run_does() -> None:
    task = replace(workload(layers=6), lengths=(64,) * 9 + (8,) * 200)
    limits = MicroBatching(max_tokens=400)
    low = replace(task, args=evaluating(task.args, 8))
    many = replace(task, args=evaluating(task.args, 64))
    for one in (candidate(Packing(), LOW, limits=limits), candidate(Packing(), limits=limits)):
        # An evaluation is cut by the same limit, however many rows it is given at once.
        few, _, _ = price_memory(low, one, H200)
        more, _, _ = price_memory(many, one, H200)
        assert more.device_bytes == few.device_bytes


def evaluating(args: TrainingArguments, rows: int) -> TrainingArguments:
    changed = copy.copy(args)
    changed.per_device_eval_batch_size = rows
    return changed


def test_rows_of_known_length_stand_for_a_dataset() -> None:
    rows = LengthRows([5, 9, 3])
    assert largest_batch(rows, torch.nn.Identity(), 2) == 14
    assert [len(rows[at]["input_ids"]) for at in range(3)] == [5, 9, 3]
    batch = make_batch(workload(), BertConfig(), (4, 2))
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_graphs_are_counted_by_the_buckets_that_come_again() -> None:
    task = replace(workload(), lengths=(30,) * 200)
    assert graph_count(task, (), WHOLE, 64) == 1
    assert graph_count(workload(), (), WHOLE, 64) > 2


# ------------------------------------------------------------------------- the host's memory


def test_gradients_and_state_on_the_host_are_not_on_the_card() -> None:
    task = workload(4)
    kept, _, _ = price_memory(task, candidate(LOW), H200)
    sent, _, on_host = price_memory(task, candidate(LOW, GradientRelease("host")), H200)
    large = 500 * 128 + 4 * 2 * 512 * 128  # the others are small, and stay
    assert on_host.host_bytes == pytest.approx(2 * large, rel=0.02)
    assert sent.components[Component.WEIGHTS] == kept.components[Component.WEIGHTS]
    peak, _, trace = price_memory(task, candidate(OptimizerOffload()), H200)
    assert peak.components[Component.OPTIMIZER] == 0
    # fp32 weights, gradient and two moments, and the pinned slots they travel through.
    everything = 16 * trace.trainable_parameters + 4 * 2**24
    assert trace.host_bytes == pytest.approx(everything, rel=1e-3)


def test_weights_that_live_on_the_host_leave_two_layers_on_the_card() -> None:
    task = workload(6)
    all_here, _, _ = price_memory(task, candidate(OptimizerOffload()), H200)
    away, _, _ = price_memory(task, candidate(OptimizerOffload(weights=True)), H200)
    layer = 4 * (4 * 128 * 128 + 2 * 512 * 128)
    gone = all_here.components[Component.WEIGHTS] - away.components[Component.WEIGHTS]
    assert 3 * layer < gone < 5 * layer


def test_activations_on_the_host_are_counted_there() -> None:
    task = workload(4)
    here, _, _ = price_memory(task, candidate(Packing(), LOW), H200)
    there, _, trace = price_memory(
        task, candidate(Packing(), LOW, ActivationOffload(min_bytes=1)), H200
    )
    assert there.components[Component.ACTIVATIONS] < here.components[Component.ACTIVATIONS]
    assert trace.host_bytes > 0


def test_a_tracker_follows_what_moves_between_host_and_device() -> None:
    with Tracker() as tracker:
        with tracker.on_host():
            weight = torch.zeros(100)
        assert (tracker.live_bytes, tracker.host_bytes) == (0, 400)
        tracker.moved(weight)
        assert (tracker.live_bytes, tracker.host_bytes) == (400, 0)
        weight.untyped_storage().resize_(0)
        tracker.resized(weight)
        assert tracker.live_bytes == 0
        tracker.hosted(held := torch.zeros(10))
        assert (tracker.live_bytes, tracker.host_bytes) == (0, 40)
        del held
    assert (tracker.host_bytes, tracker.host_peak_bytes) == (0, 400)


# ------------------------------------------------------------------------------ the phases


def test_every_phase_is_priced_and_the_highest_is_the_plans() -> None:
    peak, phases, _ = price_memory(workload(), candidate(Packing(), LOW), H200)
    assert phases.keys() == {TRAINING, EVALUATION, SAVING, RESUMING}
    assert peak.device_bytes == max(one.device_bytes for one in phases.values())
    assert phases[SAVING].allocated_bytes <= phases[TRAINING].allocated_bytes


def test_graphs_lie_in_a_pool_of_their_own_and_take_memory_outside_the_allocator() -> None:
    task = workload()
    launched, _, _ = price_memory(task, candidate(Packing(), LOW), H200)
    _, phases, trace = price_memory(task, candidate(Packing(), LOW, CudaGraphs(64)), H200)
    assert trace.counts.replayed > trace.counts.launches
    training = phases[TRAINING]
    assert training.reserved_bytes > launched.reserved_bytes
    beside = training.components[Component.CONTEXT] - launched.components[Component.CONTEXT]
    assert beside > 70 * 2**20


def test_workspaces_are_small_where_asked_and_handles_always() -> None:
    task = workload()
    large, _, _ = price_memory(task, candidate(), H200)
    small, _, _ = price_memory(task, candidate(SmallWorkspace()), H200)
    saved = 32 * 2**20 - (2 * 4096 + 8 * 16) * 1024
    assert large.components[Component.WORKSPACE] - small.components[Component.WORKSPACE] == (
        2 * saved
    )
    # A large handle holds twice its workspace outside the allocator, a small one once: so it was
    # measured. A run makes its handles small whatever its workspaces are.
    outside = 2 * (32 * 2**20 + saved)
    assert large.components[Component.CONTEXT] == H200.context_bytes - outside
    assert small.components[Component.CONTEXT] == H200.context_bytes - outside


def test_libraries_that_are_loaded_keep_the_memory_they_took() -> None:
    run = Priced(segments=Segments({}), biases=True, recompute=False, small_workspace=True)
    assert context_bytes(run, H200) < H200.context_bytes
    assert context_bytes(run, replace(H200, here=True)) == H200.context_bytes


def test_streams_are_counted_once_whoever_uses_them() -> None:
    run = Priced(segments=Segments({}), biases=True, recompute=False, small_workspace=False)
    with_streams = context_bytes(replace(run, streams=True), H200)
    assert with_streams - context_bytes(run, H200) == 70 * 2**20
    assert context_bytes(replace(run, streams=True, graphs=1), H200) == with_streams


def test_features_are_computed_before_and_then_only_the_head_is_trained() -> None:
    task = workload()
    frozen = candidate(Freezing(), FrozenFeatures(max_tokens=128))
    _, phases, trace = price_memory(task, frozen, H200)
    assert "features" in trace.segments.parts
    whole, _, _ = price_memory(task, candidate(Freezing()), H200)
    assert phases[TRAINING].allocated_bytes < whole.allocated_bytes


def test_shorter_texts_and_adapters_need_less() -> None:
    task = workload()
    plain, _, _ = price_memory(task, candidate(), H200)
    cut, _, _ = price_memory(task, candidate(Truncation(24)), H200)
    lora, _, trace = price_memory(task, candidate(Lora(4)), H200)
    assert cut.components[Component.ACTIVATIONS] < plain.components[Component.ACTIVATIONS] / 2
    assert trace.trainable_parameters < 0.1 * trace.parameters
    assert lora.components[Component.OPTIMIZER] < 0.1 * plain.components[Component.OPTIMIZER]


def test_eager_attention_is_priced_and_so_is_its_fused_kernel() -> None:
    eager = workload(attn_implementation="eager")
    before, _, _ = price_memory(eager, candidate(), H200)
    after, _, _ = price_memory(eager, candidate(FusedAttention()), H200)
    assert after.components[Component.ACTIVATIONS] < before.components[Component.ACTIVATIONS]


# ---------------------------------------------------------------------- what cannot be used


@pytest.mark.parametrize(
    ("strategies", "card", "reason"),
    [
        ([LOW], T4, "no bfloat16"),
        ([LowBitAdamW(dtype="float16")], T4, ""),
        ([HalfPrecision()], T4, "take float16"),
        ([HalfPrecision()], H200, ""),
        ([SmallWorkspace()], T4, "small already"),
        ([ActivationOffload()], None, "host memory already"),
        ([CudaGraphs()], H200, "packed batches"),
        ([Packing(), LOW, CudaGraphs()], H200, ""),
        ([LOW, HalfPrecision()], H200, "cannot be used together"),
        ([Lora(), Packing()], H200, ""),
        ([Checkpointing(5)], H200, "has 2 layers"),
    ],
    ids=str,
)
def test_strategies_are_judged_for_a_card_that_is_not_here(
    strategies: list[Strategy], card: Any, reason: str
) -> None:
    found = unavailable_reason(strategies, workload(), card)
    assert reason in found if reason else found == ""


def test_windows_has_no_triton_so_low_bit_updates_take_temporaries() -> None:
    def priced(card: Any) -> int:
        chosen = candidate(LOW, GradientRelease("kept8"))
        trace = trace_step(workload.__wrapped__(), chosen, card)
        return trace.segments.born_bytes("update_first", Component.OPTIMIZER)

    there = find_card("H200", CardPlace(windows=True))
    assert priced(there) > priced(H200) + 2**20
    assert "Windows does not have" in unavailable_reason(FusedLayers(), workload(), there)
    installed = replace(there, triton=True)
    assert unavailable_reason(FusedLayers(), workload(), installed) == ""


def test_outside_of_a_trace_nobody_is_told() -> None:
    tensor = torch.zeros(3)
    assert traced_device.device() is None
    assert traced_device.hosted(tensor) is tensor
    with traced_device.on_host():
        traced_device.resized(tensor)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_model_of_two_layers_is_traced_at_any_depth_where_layers_have_types(layers: int) -> None:
    config = Qwen3Config(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=8, vocab_size=9, pad_token_id=0,
    )  # fmt: skip
    assert config.layer_types == ["full_attention"] * 2
    shaped = with_layers(config, layers)
    assert shaped.layer_types == ["full_attention"] * layers
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(shaped)
    assert len(model.model.layers) == layers
