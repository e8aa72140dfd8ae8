"""Gradient sinks: what each keeps, and that clipping and micro-batches are not lost."""

from __future__ import annotations

import contextlib

import pytest
import torch
from optim_fixtures import (
    SINKS,
    SMALL,
    batches,
    flat_masters,
    loss_of,
    make_model,
    make_sink,
    moved_apart,
    run_step,
    with_sink,
)
from torch import nn

from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.number_formats import to_lowbit
from memfit.strategies.lowbit.step_scalars import LossScale

# ------------------------------------------------------------------- the same algorithm


def test_without_clipping_every_exact_sink_gives_the_same_bits() -> None:
    results = []
    for name in ("kept", "host"):
        model, optimizer, attached = with_sink(name)
        for x, y in batches(5):
            run_step(model, attached, x, y)
        results.append(flat_masters(optimizer, model))
    assert torch.equal(*results)


def test_with_clipping_that_binds_the_exact_sinks_give_the_same_bits() -> None:
    results = []
    for name in ("kept", "host"):
        model, optimizer, attached = with_sink(name, max_grad_norm=0.05)
        norms = [run_step(model, attached, x, y) for x, y in batches(5)]
        assert all(float(norm) > 0.3 for norm in norms)
        results.append(flat_masters(optimizer, model))
    assert torch.equal(*results)


@pytest.mark.parametrize("sink", list(SINKS))
def test_the_norm_is_that_of_torch_and_needs_no_host(sink: str) -> None:
    model, _, attached = with_sink(sink, torch.float16, max_grad_norm=1.0)
    plain = make_model()
    to_lowbit(plain, torch.float16, small_numel=SMALL)
    (x, y) = batches(1)[0]
    loss_of(plain, x, y).backward()
    grads = [p.grad.double() for p in plain.parameters() if p.grad is not None]
    expected = torch.sqrt(sum((g * g).sum() for g in grads))
    norm = run_step(model, attached, x, y)
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)
    assert norm is attached.norm


@pytest.mark.parametrize("name", SINKS)
def test_sinks_clip_like_clip_grad_norm(name: str) -> None:
    """fp32 weights, so that nothing but the clipping differs: 1e-6 of torch's own clipping."""
    reference = make_model()
    stock = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    model = make_model()
    optimizer = LowBitOptimizer(model.parameters(), lr=1e-3, weight_decay=0.01)  # all small: fp32
    sink = make_sink(name, optimizer, max_grad_norm=0.1)
    for x, y in batches(4):
        stock.zero_grad()
        loss_of(reference, x, y).backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        stock.step()
        norm = run_step(model, sink, x, y)
        assert float(norm) == pytest.approx(float(expected), rel=1e-6)
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-6


def test_gradients_kept_in_8_bits_train_like_kept_ones() -> None:
    results = []
    for name in ("kept", "kept8"):
        model, optimizer, sink = with_sink(name, max_grad_norm=0.1)
        losses = []
        for x, y in batches(40):
            losses.append(float(loss_of(model, x, y).detach()))
            run_step(model, sink, x, y)
        results.append((flat_masters(optimizer, model), losses))
    (kept, kept_losses), (coded, coded_losses) = results
    assert moved_apart(kept, coded) < 0.08
    assert max(abs(a - b) for a, b in zip(kept_losses, coded_losses, strict=True)) < 0.02


# -------------------------------------------------------------------------- micro-batches


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("explicit", [True, False])
def test_micro_batches_add_up_to_the_whole_batch(sink: str, explicit: bool) -> None:
    """Through the loop, and through plain backward calls that say nothing."""
    whole, optimizer, attached = with_sink(sink, max_grad_norm=0.1)
    norms = [run_step(whole, attached, x, y).clone() for x, y in batches(6)]
    reference = flat_masters(optimizer, whole)

    model, optimizer, attached = with_sink(sink, max_grad_norm=0.1)
    for (x, y), norm in zip(batches(6), norms, strict=True):
        if explicit:
            run_step(model, attached, x, y, micro_batches=4)
        else:
            for rows, labels in zip(x.chunk(4), y.chunk(4), strict=True):
                loss_of(model, rows, labels, 0.25).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert float(attached.norm) == pytest.approx(float(norm), rel=0.02)
    assert moved_apart(reference, flat_masters(optimizer, model)) < 0.12
    assert int(optimizer.clock.counters[0]) == 6


# --------------------------------------------------------------------- steps without effect


class _CutError(Exception):
    """Ends a step in the middle."""


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut off"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SINKS)
def test_a_step_without_effect_changes_no_bit_of_the_training(
    name: str, dtype: torch.dtype, cut: bool
) -> None:
    """Weights, state, counters and scale: the steps after it are the same."""
    ended = []
    for rehearsed in (False, True):
        scale = LossScale("cpu", growth_interval=2) if dtype == torch.float16 else None
        model, optimizer, sink = with_sink(name, dtype, max_grad_norm=0.05, loss_scale=scale)
        norms = []
        for index, (x, y) in enumerate(batches(5)):
            if rehearsed and index in (0, 3):
                with contextlib.suppress(_CutError), sink.without_effect():
                    if cut:
                        sink.begin(1)
                        sink.arm(0)
                        loss_of(model, x * 3, y).backward()
                        raise _CutError
                    run_step(model, sink, x * 3, y)
                assert not any(p.grad is not None for p in model.parameters())
            norms.append(run_step(model, sink, x, y).clone())
        ended.append((flat_masters(optimizer, model), torch.stack(norms)))
        if scale is not None:
            ended[-1] += (scale.value, scale.good_steps, scale.skipped_steps)
    assert all(torch.equal(one, other) for one, other in zip(*ended, strict=True))


@pytest.mark.parametrize("sink", ["kept", "kept8", "host"])
@pytest.mark.parametrize("replayed", [False, True])
def test_a_weight_first_used_in_a_later_micro_batch_gets_that_gradient_alone(
    sink: str, replayed: bool
) -> None:
    """As with layers that are dropped at random, or branches."""
    if replayed and sink != "kept8":
        pytest.skip("whose micro-batches are not replayed")
    model, _, attached = with_sink(sink)
    reference, _, kept = with_sink("kept")
    for index, (x, y) in enumerate(batches(3)):
        norms = []
        for one, into in ((model, attached), (reference, kept)):
            one.load_state_dict(make_model().to(torch.bfloat16).state_dict())
            into.begin(2, **({"replayed": True} if replayed and into is attached else {}))
            for part, (rows, labels) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
                into.arm(part)
                hidden = rows.bfloat16()
                # The first layer is left out of the first micro-batch.
                first = one[0](hidden) if part else hidden.repeat(1, 2)
                logits = one[1:](first).float()
                (nn.functional.cross_entropy(logits, labels) / 2).backward()
                into.end_backward()
            norms.append(float(into.finish()))
        assert norms[0] == pytest.approx(norms[1], rel=0.01), index
