"""fp16 loss scaling through every sink, and how sinks are swapped, joined late and misused."""

from __future__ import annotations

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
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.strategies.lowbit.gradient_sinks import KeptGradients
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.number_formats import to_lowbit
from memfit.strategies.lowbit.step_scalars import LossScale

# ------------------------------------------------------------------------ fp16 loss scale


@pytest.mark.parametrize("sink", list(SINKS))
def test_scaled_fp16_training_follows_unscaled_training(sink: str) -> None:
    results = []
    for scale in (None, LossScale("cpu", initial=2.0**10)):
        model, optimizer, attached = with_sink(
            sink, torch.float16, max_grad_norm=0.5, loss_scale=scale
        )
        norms = [run_step(model, attached, x, y).clone() for x, y in batches(8)]
        results.append((flat_masters(optimizer, model), torch.stack(norms)))
    (plain, plain_norms), (scaled, scaled_norms) = results
    assert moved_apart(plain, scaled) < 0.12
    assert torch.allclose(plain_norms, scaled_norms, rtol=0.01)


@pytest.mark.parametrize("sink", list(SINKS))
def test_an_overflow_skips_the_whole_step_and_halves_the_scale(sink: str) -> None:
    scale = LossScale("cpu", initial=2.0**14, growth_interval=2)
    model, optimizer, attached = with_sink(sink, torch.float16, loss_scale=scale)
    data = batches(4)
    run_step(model, attached, *data[0])
    before, steps = flat_masters(optimizer, model), int(optimizer.clock.counters[0])
    x, y = data[1]
    run_step(model, attached, x * 6e4, y)  # gradients beyond fp16
    assert not torch.isfinite(attached.norm)
    assert torch.equal(flat_masters(optimizer, model), before)
    assert int(optimizer.clock.counters[0]) == steps
    assert float(scale.value) == 2.0**13
    assert int(scale.skipped_steps) == 1
    for batch in data[2:]:
        run_step(model, attached, *batch)
    assert not torch.equal(flat_masters(optimizer, model), before)
    assert torch.isfinite(flat_masters(optimizer, model)).all()
    assert float(scale.value) == 2.0**14  # grown again after two good steps


def test_the_loss_scale_stays_in_its_range_and_resumes() -> None:
    scale = LossScale("cpu", initial=2.0**15, growth_interval=1)
    scale.update(torch.tensor(True))
    assert float(scale.value) == 2.0**15
    for _ in range(20):
        scale.update(torch.tensor(False))
    assert float(scale.value) == 1.0
    other = LossScale("cpu")
    other.load_state_dict(scale.state_dict())
    assert float(other.value) == 1.0
    assert int(other.skipped_steps) == 20


# ------------------------------------------------------------------------------- handling


def test_sinks_replace_each_other_and_can_be_removed() -> None:
    model, optimizer, _ = with_sink("host")
    second = make_sink("kept8", optimizer)
    assert optimizer.sink is second
    x, y = batches(1)[0]
    loss_of(model, x, y).backward()
    optimizer.step()
    assert torch.isfinite(second.norm)
    second.remove()
    assert optimizer.sink is None
    loss_of(model, x, y).backward()
    assert model[0].weight.grad is not None
    optimizer.step()
    assert isinstance(optimizer.sink, KeptGradients)


@pytest.mark.parametrize("sink", ["kept8", "host"])
def test_a_parameter_unfrozen_later_is_taken_from_its_first_gradient_on(sink: str) -> None:
    model = make_model()
    kept = to_lowbit(model, small_numel=SMALL)
    model[0].requires_grad_(False)
    optimizer = LowBitOptimizer(model.parameters(), lr=1e-2, small_numel=SMALL, remainders=kept)
    attached = make_sink(sink, optimizer)
    data = batches(4)
    run_step(model, attached, *data[0])
    model[0].requires_grad_(True)
    weight, bias = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    for batch in data[1:]:
        run_step(model, attached, *batch)
        assert model[0].weight.grad is None
    assert not torch.equal(model[0].weight, weight)
    assert not torch.equal(model[0].bias, bias)
    assert optimizer.born_of(model[0].weight) == 1


def test_sparse_gradients_are_refused_by_name() -> None:
    embedding = nn.Embedding(50, 16, sparse=True, dtype=torch.bfloat16)
    optimizer = LowBitOptimizer(embedding.parameters(), small_numel=0)
    make_sink("kept8", optimizer)
    with pytest.raises(ValueError, match="sparse gradients are not supported"):
        embedding(torch.arange(4)).float().sum().backward()


@pytest.mark.parametrize("sink", list(SINKS))
def test_a_step_can_be_traced_on_fake_tensors(sink: str) -> None:
    """A memory prediction runs the real step: state and sinks as they are, kernels in place."""
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 2))
        kept = to_lowbit(model)
        optimizer = LowBitOptimizer(model.parameters(), remainders=kept)
        attached = make_sink(sink, optimizer, max_grad_norm=1.0)
        for _ in range(2):
            run_step(model, attached, torch.randn(4, 512), torch.ones(4, dtype=torch.long))
        large, small = 512 * 512, 512 * 3 + 2 * 512 + 2
        assert optimizer.state_bytes() == 3 * large + 2 * 4 * large // 256 + 5 * 4 * small
