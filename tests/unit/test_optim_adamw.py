"""LowBitAdamW as an optimizer: against torch's AdamW, groups, schedules, saving, bytes."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfit.optim import SMALL_NUMEL, LowBitAdamW, make_sink, state_bytes_for, to_lowbit
from memfit.optim.formats import join_master

SMALL = 64  # in tiny models, so that their matrices count as large


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 2))


def batches(count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, 32, generator=generator)
    return [(rows, (rows[:, :4].sum(1) > 0).long()) for rows in x]


def lowbit(model: nn.Module, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> LowBitAdamW:
    bits = settings.get("master_bits", 24)
    kept = to_lowbit(model, dtype, master_bits=bits, small_numel=SMALL)
    defaults = {"lr": 1e-3, "small_numel": SMALL, "remainders": kept}
    return LowBitAdamW(model.parameters(), **{**defaults, **settings})


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]
) -> list[float]:
    losses = []
    dtype = next(model.parameters()).dtype
    for x, y in data:
        loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def flat_masters(optimizer: LowBitAdamW, model: nn.Module) -> Tensor:
    return torch.cat([t.reshape(-1) for t in optimizer.fp32_state_dict(model).values()])


def flat_weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


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
    ours = LowBitAdamW(
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
        optimizer = LowBitAdamW([p], lr=1e-5, weight_decay=0.0, small_numel=0, master_bits=bits)
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
    ours = LowBitAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, remainders=kept)
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
    assert small.numel() == 48 * 3 + 2
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
    optimizer = LowBitAdamW(groups, lr=0.1, small_numel=0)
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
    optimizer = LowBitAdamW(params, lr=0.1, weight_decay=0.5, small_numel=SMALL, remainders=kept)
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
    ours = LowBitAdamW(model.parameters(), lr=1e-2, small_numel=SMALL, remainders=kept)
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
    optimizer = LowBitAdamW(model.parameters(), lr=1e-2, small_numel=SMALL, remainders=kept)
    make_sink("release", optimizer)
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
    model, head = make_model(), nn.Linear(2, 2).bfloat16()
    optimizer = lowbit(model)
    train(model, optimizer, batches(5))
    optimizer.add_param_group({"params": list(head.parameters()), "lr": 1e-2})
    start = head.weight.detach().float().clone()
    train(nn.Sequential(model, head), optimizer, batches(1))
    moved = (head.weight.detach().float() - start).abs()
    assert 0.5e-2 < float(moved.max()) < 1.3e-2  # a first step: the learning rate


# -------------------------------------------------------------------- saving and loading


def saved(optimizer: LowBitAdamW) -> dict[str, Any]:
    """Through a file, as a checkpoint goes."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return dict(torch.load(buffer, weights_only=True))


@pytest.mark.parametrize("bits", [24, 16])
@pytest.mark.parametrize("sink", ["kept", "kept8", "release"])
def test_a_resumed_run_is_bit_equal_noise_included(bits: int, sink: str) -> None:
    data = batches(12)

    def start(seed: int) -> tuple[nn.Sequential, LowBitAdamW, Any]:
        model = make_model(seed)
        optimizer = lowbit(model, master_bits=bits, seed=seed)
        make_sink(sink, optimizer, max_grad_norm=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 20)
        return model, optimizer, schedule

    def run(model: nn.Module, optimizer: LowBitAdamW, schedule: Any, part: Any) -> None:
        for batch in part:
            train(model, optimizer, [batch])
            schedule.step()

    whole, optimizer, schedule = start(0)
    run(whole, optimizer, schedule, data)
    first, half_way, schedule = start(0)
    run(first, half_way, schedule, data[:6])
    checkpoint, weights, plan = saved(half_way), first.state_dict(), schedule.state_dict()

    resumed, other, schedule = start(7)
    resumed.load_state_dict(weights)
    schedule.load_state_dict(plan)
    other.load_state_dict(checkpoint)
    run(resumed, other, schedule, data[6:])
    assert torch.equal(flat_weights(whole), flat_weights(resumed))
    assert torch.equal(flat_masters(optimizer, whole), flat_masters(other, resumed))
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        for name, value in optimizer.state[p].items():
            assert value.dtype == other.state[q][name].dtype
            assert torch.equal(value, other.state[q][name]), name


def test_loading_keeps_addresses_and_dtypes() -> None:
    model = make_model()
    optimizer = lowbit(model)
    train(model, optimizer, batches(2))
    weight = model[0].weight
    addresses = {k: t.data_ptr() for k, t in optimizer.state[weight].items()}
    checkpoint = saved(optimizer)
    train(model, optimizer, batches(2))
    optimizer.load_state_dict(checkpoint)
    assert {k: t.data_ptr() for k, t in optimizer.state[weight].items()} == addresses
    dtypes = {k: t.dtype for k, t in optimizer.state[weight].items()}
    assert dtypes == {
        "correction": torch.int8,
        "moment1": torch.int8,
        "scale1": torch.float32,
        "moment2": torch.uint8,
        "scale2": torch.float32,
    }


def test_another_optimizers_state_and_other_settings_are_refused() -> None:
    model = make_model()
    stock = torch.optim.AdamW(model.parameters())
    optimizer = lowbit(model)
    with pytest.raises(ValueError, match="not saved by LowBitAdamW"):
        optimizer.load_state_dict(stock.state_dict())
    other = make_model()
    with pytest.raises(ValueError, match="'master_bits': 16"):
        optimizer.load_state_dict(lowbit(other, master_bits=16).state_dict())


def test_accelerate_prepares_it_like_any_optimizer() -> None:
    from accelerate import Accelerator

    model = make_model()
    optimizer = lowbit(model)
    prepared = Accelerator(cpu=True).prepare(optimizer)
    losses = train(model, prepared, batches(20))
    assert losses[-1] < losses[0]
    exact = make_model().state_dict()["0.bias"]
    assert not torch.equal(optimizer.fp32_state_dict(model)["0.bias"], exact)


def test_a_weight_changed_from_outside_is_respected() -> None:
    """An averaged or reloaded model is not overwritten by masters of its former self."""
    model = make_model()
    optimizer = lowbit(model)
    train(model, optimizer, batches(2))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(3.0)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, batches(1))
    assert (flat_masters(optimizer, model) - 3).abs().max() < 0.01


# ------------------------------------------------------------------------------- bytes


BERT_LARGE = (
    [(21128, 1024), (512, 1024), (2, 1024), (1024,), (1024,), (1024, 1024), (1024,)]
    + [(2, 1024), (2,)]
    + 24 * ([(1024, 1024), (1024,)] * 4 + [(4096, 1024), (4096,), (1024, 4096)] + [(1024,)] * 5)
)


@pytest.mark.parametrize(("bits", "low", "high"), [(24, 5.03, 5.06), (16, 4.03, 4.06)])
def test_bert_large_takes_5_or_4_bytes_a_parameter(bits: int, low: float, high: float) -> None:
    """Weights and state of all 325.5 M parameters, scales and fp32 biases included."""
    numels = [int(torch.Size(shape).numel()) for shape in BERT_LARGE]
    assert sum(numels) == pytest.approx(325.5e6, rel=0.001)
    total = sum(2 * n + state_bytes_for(n, master_bits=bits) for n in numels)
    assert low < total / sum(numels) < high
    small = sum(n for n in numels if n <= SMALL_NUMEL)
    assert small / sum(numels) < 0.0011


@pytest.mark.parametrize("bits", [24, 16])
def test_the_state_that_exists_is_the_state_that_was_predicted(bits: int) -> None:
    model = make_model()
    optimizer = lowbit(model, master_bits=bits)
    optimizer.init_state()
    expected = sum(
        state_bytes_for(p.numel(), master_bits=bits, small_numel=SMALL) for p in model.parameters()
    )
    assert optimizer.state_bytes() == expected
    big = nn.Parameter(torch.zeros(1000, 1024, dtype=torch.bfloat16))
    only = LowBitAdamW([big], master_bits=bits)
    only.init_state()
    per_parameter = (only.state_bytes() + big.numel() * 2) / big.numel()
    assert per_parameter == {24: 5, 16: 4}[bits] + 8 / 256


# ------------------------------------------------------------------------------ misuse


def test_wrong_settings_are_named() -> None:
    p = [nn.Parameter(torch.zeros(8).bfloat16())]
    for settings, words in (
        ({"master_bits": 32}, "master_bits must be 24 or 16"),
        ({"moment_bits": 4}, "moment_bits must be 8"),
        ({"block": 100}, "power of two"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ):
        with pytest.raises(ValueError, match=words):
            LowBitAdamW(p, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dtype torch\.float64"):
        LowBitAdamW([nn.Parameter(torch.zeros(8).double())])
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        to_lowbit(make_model(), torch.float32)
    with pytest.raises(ValueError, match="different small_numel"):
        LowBitAdamW(p, remainders=to_lowbit(make_model(), small_numel=1))


def test_parameters_that_are_not_contiguous_are_named() -> None:
    p = nn.Parameter(torch.zeros(300, 200).bfloat16().t())
    optimizer = LowBitAdamW([p], small_numel=0)
    p.grad = torch.zeros_like(p)
    with pytest.raises(ValueError, match="not contiguous"):
        optimizer.step()


def test_a_step_without_gradients_does_nothing() -> None:
    model = make_model()
    optimizer = lowbit(model)
    optimizer.step()
    assert int(optimizer.clock.counters[0]) == 0


def test_a_closure_is_called_with_gradients_enabled() -> None:
    model = make_model()
    optimizer = lowbit(model)
    x, y = batches(1)[0]

    def closure() -> float:
        loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), y)
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == pytest.approx(0.7, abs=0.3)
    assert int(optimizer.clock.counters[0]) == 1


def test_seeds_change_the_rounding_and_nothing_else() -> None:
    results = []
    for seed in (0, 0, 1):
        model = make_model()
        optimizer = lowbit(model, master_bits=16, seed=seed)
        train(model, optimizer, batches(3))
        results.append(flat_weights(model))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert (results[0] - results[2]).norm() / results[0].norm() < 0.01


def test_masters_join_on_the_device_asked_for() -> None:
    model = make_model()
    optimizer = lowbit(model)
    train(model, optimizer, batches(2))
    weight = model[0].weight
    state = optimizer.state[weight]
    expected = join_master(weight.detach().view(-1), state["correction"]).view(weight.shape)
    assert torch.equal(optimizer.fp32_state_dict(model, "cpu")["0.weight"], expected)
