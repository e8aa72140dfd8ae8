"""LowBitAdamW as an optimizer: against torch's AdamW, schedules, groups, frozen and tied."""

from __future__ import annotations

import pytest
import torch
from optim_fixtures import (
    SMALL,
    batches,
    flat_masters,
    flat_weights,
    lowbit,
    make_model,
    make_sink,
    train,
)
from torch import nn

from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.number_formats import to_lowbit

# ----------------------------------------------------------------- against torch's AdamW


@pytest.mark.parametrize(
    ("dtype", "bits", "bound"),
    [
        (torch.bfloat16, 24, 0.06),
        (torch.float16, 24, 0.06),
        (torch.float32, 24, 0.05),
        (torch.bfloat16, 16, 0.25),
    ],
)
def test_fifty_steps_move_the_weights_as_fp32_adamw_does(
    dtype: torch.dtype, bits: int, bound: float
) -> None:
    """On the same gradients: the distance to AdamW's weights, as a share of the way gone."""
    reference = nn.Parameter(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)))
    reference.data.mul_(0.05)
    start = reference.detach().clone()
    low = nn.Parameter(start.to(dtype, copy=True))
    model = nn.ParameterList([low])
    stock = torch.optim.AdamW([reference], lr=1e-3, weight_decay=0.01)
    kept = None
    if dtype != torch.float32:
        low.data = start.clone()
        kept = to_lowbit(model, dtype, master_bits=bits, small_numel=SMALL)
    ours = LowBitOptimizer(
        [low], lr=1e-3, master_bits=bits, small_numel=SMALL, remainders=kept, weight_decay=0.01
    )
    generator = torch.Generator().manual_seed(2)
    size = torch.exp(torch.randn(64, 128, generator=generator)) * 1e-3
    for _ in range(50):
        grad = size * (torch.randn(64, 128, generator=generator) + 0.3)
        reference.grad, low.grad = grad.clone(), grad.to(dtype)
        stock.step()
        ours.step()
        ours.zero_grad()
    way = (reference - start).norm()
    error = (ours.fp32_state_dict(model)["0"] - reference).norm() / way
    assert error < bound


def test_updates_far_below_a_bf16_step_add_up_only_with_a_correction() -> None:
    """1e-5 a step on weights of 1.0, whose bf16 neighbours are 0.0039 and 0.0078 away."""
    weight = torch.ones(4096)
    grad = torch.full((4096,), 1e-3)

    def after(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> None:
        for _ in range(100):
            p.grad = grad.to(p.dtype)
            optimizer.step()

    pure = nn.Parameter(weight.bfloat16())
    after(torch.optim.AdamW([pure], lr=1e-5, weight_decay=0.0), pure)
    assert torch.equal(pure.float(), weight)  # stalls: not one weight has moved

    for bits, spread in ((24, 4e-4), (16, 2e-2)):
        p = nn.Parameter(weight.bfloat16())
        optimizer = LowBitOptimizer([p], lr=1e-5, weight_decay=0.0, small_numel=0, master_bits=bits)
        after(optimizer, p)
        moved = 1 - optimizer.fp32_state_dict(nn.ParameterList([p]))["0"]
        # 16 bits round stochastically: right on average, each weight off by a place.
        assert abs(float(moved.mean()) - 1e-3) < 1e-4
        assert (moved - 1e-3).abs().max() < spread


def test_small_parameters_are_exactly_fp32_adamw() -> None:
    """Biases and norms keep fp32 state and an exact fp32 master beside their bf16 weights."""
    start = torch.randn(2, 30, generator=torch.Generator().manual_seed(0))
    reference = [nn.Parameter(row.clone()) for row in start]
    model = nn.ParameterList([nn.Parameter(row.clone()) for row in start])
    kept = to_lowbit(model)
    stock = torch.optim.AdamW(reference, lr=1e-3, weight_decay=0.1)
    ours = LowBitOptimizer(model.parameters(), lr=1e-3, weight_decay=0.1, remainders=kept)
    generator = torch.Generator().manual_seed(3)
    for _ in range(30):
        for p, q in zip(reference, model, strict=True):
            q.grad = torch.randn(30, generator=generator).bfloat16()
            p.grad = q.grad.float()
        stock.step()
        ours.step()
    for p, master in zip(reference, ours.fp32_state_dict(model).values(), strict=True):
        assert (master - p).abs().max() < 2e-6
    assert all(q.dtype == torch.bfloat16 for q in model)


def test_converting_an_fp32_model_loses_nothing_the_master_can_hold() -> None:
    model = make_model()
    before = flat_weights(model)
    optimizer = lowbit(model)
    optimizer.init_state()
    after = flat_masters(optimizer, model)
    assert (flat_weights(model) - before).abs().max() > 1e-4  # bf16 alone loses much more
    assert ((after - before).abs() <= before.abs() * 2.0**-16 + 1e-12).all()
    small = torch.cat([model[0].bias, model[2].weight, model[2].bias, model[3].bias])
    assert small.numel() == 64 * 3 + 3
    exact = optimizer.fp32_state_dict(model)
    fresh = make_model().state_dict()
    for name in ("0.bias", "2.weight", "2.bias", "3.bias"):
        assert torch.equal(exact[name], fresh[name])


def test_a_loss_curve_follows_fp32_adamw() -> None:
    reference, model = make_model(), make_model()
    data = batches(60)
    stock = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), data)
    for bits, apart in ((24, 0.01), (16, 0.02)):
        model = make_model()
        ours = train(model, lowbit(model, master_bits=bits), data)
        assert max(abs(a - b) for a, b in zip(stock, ours, strict=True)) < apart
    assert stock[-1] < 0.8 * stock[0]


# ----------------------------------------------- groups, schedules, frozen, tied, late


def test_schedules_and_decay_groups_reach_the_update() -> None:
    p, q = (nn.Parameter(torch.full((256,), 0.5).bfloat16()) for _ in range(2))
    groups = [{"params": [p], "weight_decay": 0.5}, {"params": [q], "weight_decay": 0.0}]
    optimizer = LowBitOptimizer(groups, lr=0.1, small_numel=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 2 else 0.0)
    for _ in range(4):
        p.grad, q.grad = torch.zeros_like(p), torch.zeros_like(q)
        optimizer.step()
        schedule.step()
    masters = optimizer.fp32_state_dict(nn.ParameterList([p, q]))
    # Two steps decay by 1 - 0.1 * 0.5; after them the learning rate is zero.
    assert torch.allclose(masters["0"], torch.tensor(0.5 * 0.95**2), rtol=1e-4)
    assert torch.equal(masters["1"], torch.full((256,), 0.5))


def test_parameters_without_a_gradient_are_left_alone() -> None:
    """Frozen, or not reached by this loss: no decay, no moments, as in torch."""
    model = make_model()
    model[0].weight.requires_grad_(False)
    unused = nn.Parameter(torch.ones(300).bfloat16())
    small_unused = nn.Parameter(torch.ones(5).bfloat16())
    kept = to_lowbit(model, small_numel=SMALL)
    params = [*model.parameters(), unused, small_unused]
    optimizer = LowBitOptimizer(
        params, lr=0.1, weight_decay=0.5, small_numel=SMALL, remainders=kept
    )
    frozen = model[0].weight.detach().clone()
    bias = model[0].bias.detach().clone()
    train(model, optimizer, batches(3))
    assert torch.equal(model[0].weight, frozen)
    assert model[0].weight not in optimizer.state
    assert torch.equal(unused, torch.ones(300).bfloat16())
    assert torch.equal(small_unused, torch.ones(5).bfloat16())
    assert not torch.equal(model[0].bias, bias)


def test_a_parameter_unfrozen_later_starts_as_young_as_in_torch() -> None:
    """Bias correction counts its own steps: 3, not 10."""
    reference, model = make_model(), make_model()
    kept = to_lowbit(model, small_numel=SMALL)
    stock = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    ours = LowBitOptimizer(model.parameters(), lr=1e-2, small_numel=SMALL, remainders=kept)
    for m in (reference, model):
        m[0].requires_grad_(False)
    data = batches(10)
    train(reference, stock, data[:7])
    train(model, ours, data[:7])
    start = reference[0].weight.detach().clone()
    for m in (reference, model):
        m[0].requires_grad_(True)
    train(reference, stock, data[7:])
    train(model, ours, data[7:])
    moved = ours.fp32_state_dict(model)
    way = (reference[0].weight - start).norm()
    assert (moved["0.weight"] - reference[0].weight).norm() < 0.1 * way
    assert (moved["0.bias"] - reference[0].bias).abs().max() < 2e-3


def test_tied_weights_are_updated_once() -> None:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(40, 32), nn.Linear(32, 40, bias=False)
    embedding.weight.data = embedding.weight.data.bfloat16().float()
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    kept = to_lowbit(model, small_numel=SMALL)
    optimizer = LowBitOptimizer(model.parameters(), lr=1e-2, small_numel=SMALL, remainders=kept)
    make_sink("host", optimizer)
    before = embedding.weight.detach().float().clone()
    loss = nn.functional.cross_entropy(model(torch.arange(40)).float(), torch.arange(40))
    loss.backward()
    optimizer.step()
    assert embedding.weight is head.weight
    assert embedding.weight.grad is None
    # Adam's first step is the learning rate; made twice it would be twice that.
    masters = optimizer.fp32_state_dict(model)
    moved = (masters["0.weight"] - before).abs()
    assert 0.9e-2 < float(moved.median()) < 1.1e-2
    assert torch.equal(masters["0.weight"], masters["1.weight"])


def test_a_new_group_joins_in_the_middle_of_training() -> None:
    model, head = make_model(), nn.Linear(3, 3).bfloat16()
    optimizer = lowbit(model)
    train(model, optimizer, batches(5))
    optimizer.add_param_group({"params": list(head.parameters()), "lr": 1e-2})
    start = head.weight.detach().float().clone()
    train(nn.Sequential(model, head), optimizer, batches(1))
    moved = (head.weight.detach().float() - start).abs()
    assert 0.5e-2 < float(moved.max()) < 1.3e-2  # a first step: the learning rate
