"""Gradient sinks: what each keeps, and that clipping and micro-batches are not lost."""

from __future__ import annotations

import contextlib

import pytest
import torch
from optim_fixtures import (
    SMALL,
    batches,
    flat_masters,
    loss_of,
    make_model,
    moved_apart,
    run_step,
    with_sink,
)
from torch import nn

from memfit.strategies.lowbit.gradient_release import SINKS, make_sink
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.number_formats import decode_root, decode_signed, to_lowbit
from memfit.strategies.lowbit.step_scalars import LossScale, NormPrediction

KEEPING = ("kept", "kept8", "host")


# ------------------------------------------------------------------- the same algorithm


@pytest.mark.parametrize("sink", [name for name in SINKS if name != "kept8"])
def test_without_clipping_every_exact_sink_gives_the_same_bits(sink: str) -> None:
    results = []
    for name in ("kept", sink):
        model, optimizer, attached = with_sink(name)
        for x, y in batches(5):
            run_step(model, attached, x, y)
        results.append(flat_masters(optimizer, model))
    assert torch.equal(*results)


@pytest.mark.parametrize("sink", ["two_pass", "host"])
def test_with_clipping_that_binds_the_exact_sinks_give_the_same_bits(sink: str) -> None:
    results = []
    for name in ("kept", sink):
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


def test_two_pass_clips_like_clip_grad_norm() -> None:
    """fp32 weights, so that nothing but the clipping differs: 1e-6 of torch's own clipping."""
    reference = make_model()
    stock = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    model = make_model()
    optimizer = LowBitOptimizer(model.parameters(), lr=1e-3, weight_decay=0.01)  # all small: fp32
    sink = make_sink("two_pass", optimizer, max_grad_norm=0.1)
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


@pytest.mark.parametrize("sink", KEEPING)
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


def test_host_gradients_add_up_in_fp32_if_asked() -> None:
    """32 micro-batches whose bf16 sum would lose the small ones."""
    p = nn.Parameter(torch.zeros(512).bfloat16())
    optimizer = LowBitOptimizer([p], small_numel=0)
    sink = make_sink("host", optimizer, dtype=torch.float32)
    for index in range(300):
        (p.float() * (1.0 if index == 0 else 2.0**-9)).sum().backward()
    optimizer.step()
    expected = 512**0.5 * (1 + 299 * 2.0**-9)
    assert float(sink.norm) == pytest.approx(expected, rel=1e-4)


def test_release_adds_micro_batches_to_the_moments() -> None:
    """m is that of the whole batch; v sums squares, so it lies below the square of the sum."""
    grads = [torch.randn(512, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    moments = []
    for sink_name in ("kept", "release"):
        p = nn.Parameter(torch.full((512,), 0.5))
        optimizer = LowBitOptimizer([p], lr=1e-2, small_numel=0, weight_decay=0.0)
        sink = make_sink(sink_name, optimizer)
        sink.begin(3)
        for index, grad in enumerate(grads):
            sink.arm(index)
            (p * grad).sum().backward()
            sink.end_backward()
            if index < 2 and sink_name == "release":
                assert torch.equal(p.detach(), torch.full((512,), 0.5))  # not moved yet
        sink.finish()
        state = optimizer.state[p]
        m = decode_signed(state["moment1"].view(2, 256), state["scale1"].unsqueeze(1))
        root = decode_root(state["moment2"].view(2, 256), state["scale2"].unsqueeze(1))
        moments.append((m.view(-1), root.view(-1).square()))
        assert int(optimizer.clock.counters[0]) == 1
        assert (p - 0.5).abs().max() > 5e-3
    (m, _), (m_added, v_added) = moments
    total, squares = sum(grads), sum(g * g for g in grads)
    assert (m - m_added).norm() / m.norm() < 0.03
    assert (m_added - 0.1 * total).norm() / (0.1 * total).norm() < 0.03
    assert (v_added - 0.001 * squares).norm() / (0.001 * squares).norm() < 0.1


@pytest.mark.parametrize("sink", ["release", "two_pass"])
def test_a_second_backward_is_refused_where_it_would_be_lost(sink: str) -> None:
    model, optimizer, attached = with_sink(sink)
    x, y = batches(1)[0]
    loss_of(model, x, y).backward()
    with pytest.raises(RuntimeError, match="a second backward in one step"):
        loss_of(model, x, y).backward()
    assert attached.optimizer is optimizer


def test_two_pass_takes_one_micro_batch_and_both_passes() -> None:
    model, optimizer, sink = with_sink("two_pass", max_grad_norm=1.0)
    with pytest.raises(ValueError, match="takes one micro-batch a step, not 2"):
        sink.begin(2)
    x, y = batches(1)[0]
    sink.begin()
    sink.arm(0, "measure")
    loss_of(model, x, y).backward()
    with pytest.raises(RuntimeError, match="after the measuring pass"):
        optimizer.step()


# ------------------------------------------------------------------ release and its norm


def test_release_frees_every_large_gradient_inside_backward() -> None:
    model, optimizer, _ = with_sink("release", flush_bytes=0)
    before = model[0].weight.detach().clone()
    x, y = batches(1)[0]
    loss_of(model, x, y).backward()
    assert model[0].weight.grad is None
    assert model[3].weight.grad is None
    assert not torch.equal(model[0].weight, before)
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    assert int(optimizer.clock.counters[0]) == 1


def test_predicted_clipping_comes_closer_to_true_clipping_than_none() -> None:
    """Batches whose gradients differ in size by up to ten: what clipping is for."""
    generator = torch.Generator().manual_seed(4)
    data = [
        (x * float(torch.exp(1.2 * torch.randn((), generator=generator))), y)
        for x, y in batches(60)
    ]
    results = {}
    for label, name, settings in (
        ("true", "kept", {"max_grad_norm": 0.1}),
        ("predicted", "release", {"max_grad_norm": 0.1}),
        ("none", "release", {"max_grad_norm": 0.1, "clip": "none"}),
    ):
        model, optimizer, sink = with_sink(name, **settings)
        for x, y in data:
            run_step(model, sink, x, y)
        results[label] = flat_masters(optimizer, model)
    predicted = moved_apart(results["true"], results["predicted"])
    none = moved_apart(results["true"], results["none"])
    assert predicted < 0.6 * none


def test_the_first_step_of_release_is_clipped_exactly() -> None:
    """Afterwards, by scaling moments that began at zero."""
    x, y = batches(1)[0]
    states = []
    for name in ("kept", "release"):
        model, optimizer, sink = with_sink(name, max_grad_norm=0.01)
        run_step(model, sink, x, y)
        states.append(optimizer.state[model[0].weight])
    for scale in ("scale1", "scale2"):
        assert torch.allclose(states[0][scale], states[1][scale], rtol=1e-4)
    assert (states[0]["moment2"].int() - states[1]["moment2"].int()).abs().max() <= 1


def test_a_norm_is_guessed_from_what_was_seen_so_far() -> None:
    prediction = NormPrediction(torch.device("cpu"))
    usual = torch.tensor([3.0, 4.0, 12.0])
    assert float(prediction.guess(usual)) == 0  # nothing is usual yet
    prediction.learn(usual, usual.norm(), torch.tensor(True))
    assert float(prediction.guess(usual)) == pytest.approx(13.0)
    seen = torch.tensor([6.0, 0.0, 0.0])  # twice the usual, the rest still to come
    assert float(prediction.guess(seen)) == pytest.approx(26.0)
    prediction.learn(usual * torch.inf, torch.tensor(torch.inf), torch.tensor(False))
    assert float(prediction.guess(usual)) == pytest.approx(13.0)
    prediction.learn(2 * usual, 2 * usual.norm(), torch.tensor(True))
    assert float(prediction.usual_total) == pytest.approx(0.9 * 169 + 0.1 * 676)


def test_fidelity_names_what_a_sink_does_to_the_result() -> None:
    def of(name: str, norm: float, parts: int) -> str:
        return SINKS[name].fidelity(max_grad_norm=norm, micro_batches=parts)

    assert of("release", 0.0, 1) == "rounding"
    assert of("release", 1.0, 1) == "optimizer"
    assert of("release", 0.0, 2) == "optimizer"
    assert {of(name, 1.0, 1) for name in ("kept", "kept8", "host", "two_pass")} == {"rounding"}
    assert [name for name, sink in SINKS.items() if not sink.micro_batches] == ["two_pass"]


# --------------------------------------------------------------------- steps without effect


class _CutError(Exception):
    """Ends a step in the middle."""


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut off"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SINKS)
def test_a_step_without_effect_changes_no_bit_of_the_training(
    name: str, dtype: torch.dtype, cut: bool
) -> None:
    """Weights, state, counters, scale and what norms are usual: the steps after it are the same."""
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
                        sink.arm(0, sink.phases[0])
                        loss_of(model, x * 3, y).backward()
                        raise _CutError
                    run_step(model, sink, x * 3, y)
                assert not sink.touched
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
