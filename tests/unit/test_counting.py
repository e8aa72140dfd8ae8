"""Counts of a step against closed forms: arithmetic, traffic, launches, copies, the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import BertConfig, BertForSequenceClassification

from memfit.memory.cards import find_card
from memfit.memory.stock_step import Stepper, StepSpec
from memfit.memory.tracing.counting import Counting, StepCounts, _kind, current
from memfit.memory.tracing.fake_tensors import fake_trace
from memfit.memory.tracing.meta_models import build_on_meta, empty_like, materialize, model_config
from memfit.memory.tracing.operators import CudaKernels

ROWS, LENGTH = 4, 32
SHAPE = {
    "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 256, "max_position_embeddings": 64,
}  # fmt: skip
CARD = find_card("A10")


def counted(function: Callable[..., Any], *args: Any, **settings: Any) -> StepCounts:
    """What a function does, on real tensors."""
    with Counting(**settings) as counter, counter.mode():
        function(*args)
    return counter.counts()


def traced(**settings: Any) -> StepCounts:
    """One step of the stock Trainer with a tiny BERT on fake tensors, as a card would run it."""
    spec = StepSpec(config={"model_type": "bert", **SHAPE}, rows=ROWS, length=LENGTH, **settings)
    config = model_config(spec)
    model = build_on_meta(spec, config)
    kernels = CudaKernels(CARD.capability, CARD.multiprocessors, autocast=spec.autocast)
    with fake_trace(kernels) as tracker:
        materialize(model, empty_like)
        stepper = Stepper(spec, config, model, tracker, cuda=True)
        stepper.micro_batch()
        stepper.update()  # the first one makes the optimizer's state
        stepper.drop_gradients()
        with Counting() as counter:
            stepper.micro_batch()
            stepper.update()
    return counter.counts()


def multiplied_parameters() -> int:
    """Weights every token is multiplied with: those of the layers' linear maps."""
    width, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    return SHAPE["num_hidden_layers"] * (4 * width * width + 2 * width * inner)


def test_a_steps_products_are_six_flops_a_parameter_and_token() -> None:
    counts = traced()
    expected = 6 * multiplied_parameters() * ROWS * LENGTH
    assert counts.full_flops == pytest.approx(expected, rel=0.02)
    assert counts.half_flops == counts.tf32_flops == 0


def test_recomputing_every_layer_adds_one_forward_and_is_known_as_such() -> None:
    plain, again = traced(), traced(gradient_checkpointing=True)
    forward = 2 * multiplied_parameters() * ROWS * LENGTH
    assert again.full_flops - plain.full_flops == pytest.approx(forward, rel=0.02)
    assert again.recomputations == SHAPE["num_hidden_layers"]
    assert plain.recomputations == 0
    assert again.launches - plain.launches > 10 * SHAPE["num_hidden_layers"]


def test_under_autocast_a_product_has_the_precision_of_its_inputs() -> None:
    full, half = traced(), traced(precision="bf16")
    assert half.half_flops == full.full_flops
    assert half.full_flops == 0
    assert half.half_attention_flops == full.full_attention_flops > 0
    # Two bytes instead of four; and every weight is cast by a kernel of its own.
    assert half.product_bytes == pytest.approx(full.product_bytes / 2, rel=0.02)
    assert half.launches > full.launches + 6 * SHAPE["num_hidden_layers"]


def test_attention_is_two_products_forward_and_five_backward() -> None:
    heads, width = SHAPE["num_attention_heads"], SHAPE["hidden_size"] // 4
    pairs = ROWS * heads * LENGTH * LENGTH
    expected = SHAPE["num_hidden_layers"] * 7 * 2 * pairs * width
    assert traced().full_attention_flops == expected


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
@pytest.mark.parametrize("shared_heads", [8, 2, 1])
def test_heads_that_share_keys_do_the_work_of_heads_that_have_their_own(
    kernel: str, shared_heads: int
) -> None:
    """Grouped-query attention: 3 texts, 8 heads of the query, keys of 16 and values of 24."""
    query, key, value, out = (
        torch.zeros(3, heads, tokens, width, device="meta", dtype=torch.bfloat16)
        for heads, tokens, width in (
            (8, 32, 16), (shared_heads, 40, 16), (shared_heads, 40, 24), (8, 32, 24),
        )
    )  # fmt: skip
    pairs = 3 * 8 * 32 * 40
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    counter = Counting()
    counter.see(forward, (query, key, value), {}, out)
    assert counter.counts().half_attention_flops == 2 * pairs * (16 + 24)
    counter.see(backward, (out, query, key, value), {}, (query, key, value))
    expected = 2 * pairs * (16 + 24) + 2 * pairs * (3 * 16 + 2 * 24)
    assert counter.counts().half_attention_flops == expected
    assert not counter.guessed


def test_attention_of_texts_side_by_side_counts_tokens_before_heads() -> None:
    """The kernels below sdpa hold [rows, tokens, heads, width]."""
    query = torch.zeros(3, 32, 8, 16, device="meta")
    key = torch.zeros(3, 40, 2, 16, device="meta")
    counter = Counting()
    forward = torch.ops.aten._flash_attention_forward.default
    counter.see(forward, (query, key, key, None, None, 32, 40), {}, query)
    assert counter.counts().full_attention_flops == 3 * 8 * 32 * 40 * 4 * 16


def test_a_formula_that_fails_is_replaced_by_a_guess_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: Any, **__: Any) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(flop_registry, torch.ops.aten.baddbmm, refuses)
    _kind.cache_clear()
    try:
        with Counting() as counter, counter.mode():
            torch.baddbmm(torch.zeros(3, 8, 16), torch.zeros(3, 8, 16), torch.zeros(3, 16, 16))
    finally:
        _kind.cache_clear()
    assert counter.counts().full_flops == 2 * 3 * 8 * 16 * 16
    assert counter.guessed == {"baddbmm"}


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm"])
def test_products_are_counted_as_torch_counts_them(name: str) -> None:
    rows = (3,) if name == "bmm" else ()
    factors = torch.zeros(*rows, 8, 16), torch.zeros(*rows, 16, 4)
    given = (torch.zeros(4), *factors) if name == "addmm" else factors
    with FlopCounterMode(display=False) as theirs:
        getattr(torch, name)(*given)
    assert counted(getattr(torch, name), *given).full_flops == theirs.get_total_flops()


def test_fp32_products_that_may_be_rounded_are_counted_apart() -> None:
    a, b = torch.zeros(8, 16), torch.zeros(16, 4)
    assert counted(torch.mm, a, b).full_flops == 2 * 8 * 16 * 4
    rounded = counted(torch.mm, a, b, tf32=True)
    assert (rounded.tf32_flops, rounded.full_flops) == (2 * 8 * 16 * 4, 0)


def test_a_product_reads_its_inputs_and_writes_its_output() -> None:
    counts = counted(torch.mm, torch.zeros(8, 16), torch.zeros(16, 4))
    assert counts.product_bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert (counts.bytes_moved, counts.launches) == (0, 1)


def test_views_and_empty_tensors_cost_nothing() -> None:
    x = torch.zeros(8, 16)

    def views() -> None:
        x.view(16, 8).t()[2:].unsqueeze(0).expand(3, -1, -1).detach()
        torch.empty_like(x)
        x.reshape(4, 32)

    assert counted(views) == StepCounts()


def test_a_kernel_moves_what_it_reads_and_writes() -> None:
    x, y = torch.zeros(1000), torch.zeros(1000)
    assert counted(torch.add, x, y).bytes_moved == 3 * 4000
    assert counted(x.add_, y).bytes_moved == 3 * 4000
    assert counted(x.copy_, y).bytes_moved == 2 * 4000
    assert counted(x.zero_).bytes_moved == 4000
    assert counted(torch.zeros_like, x).bytes_moved == 4000
    # One row that was expanded is read from the cache.
    assert counted(torch.add, x, torch.zeros(1).expand(1000)).bytes_moved == 2 * 4000 + 4


def test_an_embedding_reads_only_the_rows_asked_for() -> None:
    table, ids = torch.zeros(10_000, 8), torch.zeros(5, dtype=torch.long)
    assert counted(torch.nn.functional.embedding, ids, table).bytes_moved == 2 * 5 * 8 * 4 + 5 * 8


def test_one_launch_takes_a_list_of_tensors() -> None:
    few = [torch.zeros(100) for _ in range(30)]
    assert counted(torch._foreach_mul_, few, 0.5).launches == 1
    many = [torch.zeros(320 * 65_536 + 1)]
    assert counted(torch._foreach_mul_, many, 0.5).launches == 2


def packed_attention(lengths: list[int], *, fake_offsets: bool, **settings: Any) -> StepCounts:
    tokens, heads, width = sum(lengths), 2, 16
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    with fake_trace() as tracker, Counting(**settings) as counter:
        if fake_offsets:
            ends = torch.empty_like(torch.empty(len(ends)), dtype=torch.int32)
        q, k, v = (torch.empty(tokens, heads, width).bfloat16() for _ in range(3))
        before = counter.counts()
        torch.ops.aten._flash_attention_forward(
            q, k, v, ends, ends, max(lengths), max(lengths), 0.0, False, False
        )
        assert tracker.live_bytes > 0
    return counter.counts() - before


def test_packed_texts_attend_only_within_themselves() -> None:
    counts = packed_attention([3, 10, 4], fake_offsets=False)
    assert counts.half_attention_flops == 2 * 2 * (9 + 100 + 16) * 2 * 16


def test_where_lengths_have_no_values_their_mean_is_used() -> None:
    known = packed_attention([3, 10, 4], fake_offsets=True, attended_tokens=125 / 17)
    assert known.half_attention_flops == pytest.approx(2 * 2 * 125 * 2 * 16)
    unknown = packed_attention([3, 10, 4], fake_offsets=True)
    assert unknown.half_attention_flops == 2 * 2 * 17 * 10 * 2 * 16


def test_kernels_of_our_own_are_counted_while_somebody_counts() -> None:
    assert current() is None
    with Counting() as counter:
        assert current() is counter
        counter.kernel(bytes_moved=100.0, flops=7.0, launches=2)
        with Counting() as inner:
            assert current() is inner
        assert current() is counter
    assert current() is None
    assert counter.counts() == StepCounts(bytes_moved=100.0, half_flops=7.0, launches=2, scripted=2)
    assert inner.counts() == StepCounts()


def test_copies_to_and_from_host_memory_cross_the_bus_and_launch_no_kernel() -> None:
    device, host = torch.zeros(100, dtype=torch.bfloat16), torch.zeros(100, dtype=torch.bfloat16)
    with Counting() as counter, counter.mode():
        counter.on_host(host)
        host.copy_(device)
        device.copy_(host)
        device.copy_(host)
    assert counter.counts() == StepCounts(to_host_bytes=200, to_device_bytes=400)


def test_what_is_computed_from_host_memory_alone_is_the_hosts_business() -> None:
    weight = torch.zeros(50, requires_grad=True)
    weight.grad = torch.ones(50)
    optimizer = torch.optim.AdamW([weight], fused=True)
    with Counting() as counter, counter.mode():
        counter.on_host(weight)
        counter.on_host(weight.grad)
        beside = torch.empty_like(weight)
        beside.copy_(weight)
        optimizer.zero_grad(set_to_none=False)
        moments = [torch.zeros_like(weight) for _ in range(2)]
        steps = [torch.zeros_like(weight[:1])]
        torch._fused_adamw_(
            [weight.detach()], [weight.grad], moments[:1], moments[1:], [], steps,
            lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip
    counts = counter.counts()
    assert counts.host_parameters == pytest.approx(50, abs=1)
    assert counts == StepCounts(host_parameters=counts.host_parameters)


def test_a_tensor_that_is_gone_leaves_no_mark_on_its_successor() -> None:
    counter = Counting()
    for _ in range(3):
        counter.on_host(torch.zeros(10))
    assert len(counter._on_host) == 0


def test_a_real_step_and_a_fake_one_have_the_same_products() -> None:
    torch.manual_seed(0)
    model: Any = BertForSequenceClassification(BertConfig(**SHAPE))
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)

    def step() -> None:
        model(input_ids=ids, labels=torch.zeros(ROWS, dtype=torch.long)).loss.backward()

    # With dropout a CPU's attention is plain products, two forward and four backward: its scores
    # are kept, where a card's kernel computes them again.
    fake = traced()
    attention = fake.full_attention_flops * 6 / 7
    assert counted(step).full_flops == fake.full_flops + attention


def test_a_layer_computed_again_on_real_tensors_is_counted_as_such() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    x = torch.zeros(4, 8, requires_grad=True)
    counts = counted(lambda: checkpoint(layer, x, use_reentrant=False).sum().backward())
    assert counts.recomputations == 1
    # Two products' forward, four of backward, and one again: the last one's result is not needed.
    assert counts.full_flops == (2 + 4 + 1) * 2 * 4 * 8 * 8


def test_counts_add_up_and_scale() -> None:
    one = StepCounts(half_flops=2.0, launches=3, scripted=2, recomputations=1)
    assert one + one == one * 2
    assert one * 3 - one == one * 2
    assert (one * 2).as_graphs() == StepCounts(half_flops=4.0, replayed=6)
