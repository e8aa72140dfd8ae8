"""LowBitAdamW's state: saved, resumed and exported bit for bit, counted in bytes, misused."""

from __future__ import annotations

import io
from typing import Any

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

from memfit.strategies.lowbit import lowbit_optimizer
from memfit.strategies.lowbit.lowbit_kernels import BLOCK, SMALL_NUMEL, blocks_of
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.number_formats import join_master, to_lowbit

# -------------------------------------------------------------------- saving and loading


def saved(optimizer: LowBitOptimizer) -> dict[str, Any]:
    """Through a file, as a checkpoint goes."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return dict(torch.load(buffer, weights_only=True))


@pytest.mark.parametrize("bits", [24, 16])
@pytest.mark.parametrize("sink", ["kept", "kept8", "host"])
def test_a_resumed_run_is_bit_equal_noise_included(bits: int, sink: str) -> None:
    data = batches(12)

    def start(seed: int) -> tuple[nn.Sequential, LowBitOptimizer, Any]:
        model = make_model(seed)
        optimizer = lowbit(model, master_bits=bits, seed=seed)
        make_sink(sink, optimizer, max_grad_norm=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 20)
        return model, optimizer, schedule

    def run(model: nn.Module, optimizer: LowBitOptimizer, schedule: Any, part: Any) -> None:
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


def state_bytes_for(numel: int, bits: int, small_numel: int = SMALL_NUMEL) -> int:
    """Of one parameter, its weight not counted: fp32 for a small one, two scales a block else."""
    if numel <= small_numel:
        return 5 * 4 * numel
    return (3 if bits == 24 else 2) * numel + 2 * 4 * blocks_of(numel, BLOCK)


@pytest.mark.parametrize(("bits", "low", "high"), [(24, 5.03, 5.06), (16, 4.03, 4.06)])
def test_bert_large_takes_5_or_4_bytes_a_parameter(bits: int, low: float, high: float) -> None:
    """Weights and state of all 325.5 M parameters, scales and fp32 biases included."""
    numels = [int(torch.Size(shape).numel()) for shape in BERT_LARGE]
    assert sum(numels) == pytest.approx(325.5e6, rel=0.001)
    total = sum(2 * n + state_bytes_for(n, bits) for n in numels)
    assert low < total / sum(numels) < high
    small = sum(n for n in numels if n <= SMALL_NUMEL)
    assert small / sum(numels) < 0.0011


@pytest.mark.parametrize("bits", [24, 16])
def test_the_state_that_exists_is_the_state_that_was_predicted(bits: int) -> None:
    model = make_model()
    optimizer = lowbit(model, master_bits=bits)
    optimizer.init_state()
    expected = sum(state_bytes_for(p.numel(), bits, SMALL) for p in model.parameters())
    assert optimizer.state_bytes() == expected
    big = nn.Parameter(torch.zeros(1000, 1024, dtype=torch.bfloat16))
    only = LowBitOptimizer([big], master_bits=bits)
    only.init_state()
    per_parameter = (only.state_bytes() + big.numel() * 2) / big.numel()
    assert per_parameter == {24: 5, 16: 4}[bits] + 8 / 256


# ------------------------------------------------------------------------------ misuse


def test_wrong_settings_are_named() -> None:
    p = [nn.Parameter(torch.zeros(8).bfloat16())]
    for settings, words in (
        ({"master_bits": 32}, "master_bits must be 24 or 16"),
        ({"block": 100}, "power of two"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ):
        with pytest.raises(ValueError, match=words):
            LowBitOptimizer(p, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dtype torch\.float64"):
        LowBitOptimizer([nn.Parameter(torch.zeros(8).double())])
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        to_lowbit(make_model(), torch.float32)
    with pytest.raises(ValueError, match="different small_numel"):
        LowBitOptimizer(p, remainders=to_lowbit(make_model(), small_numel=1))


def test_parameters_that_are_not_contiguous_are_named() -> None:
    p = nn.Parameter(torch.zeros(300, 200).bfloat16().t())
    optimizer = LowBitOptimizer([p], small_numel=0)
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

    assert optimizer.step(closure) == pytest.approx(1.1, abs=0.3)
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


def test_masters_join_piece_by_piece_and_without_room_where_they_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model()
    optimizer = lowbit(model)
    train(model, optimizer, batches(2))
    weight = model[0].weight
    state = optimizer.state[weight]
    expected = join_master(weight.detach().view(-1), state["correction"]).view(weight.shape)
    pieces: list[int] = []

    def join(low: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        pieces.append(low.numel())
        if len(pieces) == 2:
            raise torch.OutOfMemoryError("no room for the second piece")
        return join_master(low, rest)

    monkeypatch.setattr(lowbit_optimizer, "PIECE", weight.numel() // 2 + 1)
    monkeypatch.setattr(lowbit_optimizer, "join_master", join)
    assert torch.equal(optimizer.fp32_state_dict(model, "cpu")["0.weight"], expected)
    assert pieces[:2] == pieces[2:4]
    assert sum(pieces[:2]) == weight.numel()
