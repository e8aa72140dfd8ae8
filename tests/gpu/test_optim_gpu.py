"""The low-bit optimizer's kernels on a CUDA card: the same codes everywhere, very large tensors.

Needs pytest and torch alone.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from memfit.memory.device import has_triton
from memfit.strategies.lowbit import lowbit_kernels_torch, number_formats
from memfit.strategies.lowbit.lowbit_kernels import (
    Addition,
    LowBitState,
    StepScalars,
    blocks_of,
    new_coded,
    pick_kernels,
)
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.number_formats import to_lowbit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")

TENSORS = ("weight", "correction", "moment1", "scale1", "moment2", "scale2")
KINDS = [
    (torch.bfloat16, True),
    (torch.bfloat16, False),
    (torch.float16, True),
    (torch.float16, False),
    (torch.float32, False),
]


# ------------------------------------------------------------------------------ kernels


def make_state(numel: int, dtype: torch.dtype, correct: bool) -> LowBitState:
    torch.manual_seed(numel)
    master = torch.randn(numel, device="cuda") * 0.05
    weight, correction = number_formats.split_master(master, dtype, correct=correct)
    blocks = blocks_of(numel, 256)
    return LowBitState(
        weight=weight.clone(),
        correction=correction,
        moment1=torch.randint(-127, 128, (numel,), dtype=torch.int8, device="cuda"),
        scale1=torch.rand(blocks, device="cuda") * 1e-3,
        moment2=torch.randint(1, 256, (numel,), dtype=torch.uint8, device="cuda"),
        scale2=torch.rand(blocks, device="cuda") * 1e-3,
        stream=3,
        row=1,
        block=256,
    )


def copy_of(state: LowBitState) -> LowBitState:
    values = {name: getattr(state, name) for name in TENSORS}
    return dataclasses.replace(
        state, **{k: None if v is None else v.clone() for k, v in values.items()}
    )


def make_scalars() -> StepScalars:
    hyper = torch.zeros(2, 8, device="cuda")
    hyper[1] = torch.tensor([0.9, 0.1, 0.999, 0.001, 1e-4, 16.0, 1e-8, 1 - 2e-7])
    key = torch.tensor(12345, dtype=torch.int32, device="cuda")
    return StepScalars(
        hyper, key, torch.tensor(0.7, device="cuda"), torch.tensor(True, device="cuda")
    )


def assert_same_codes(one: LowBitState, other: LowBitState, share: float = 1e-3) -> None:
    """No code apart by more than one, and few by one; scales and masters alike.

    An update of a thousandth is computed in fp32, so a weight near zero carries its rounding.
    """
    for name in ("moment1", "moment2"):
        apart = (getattr(one, name).int() - getattr(other, name).int()).abs()
        assert int(apart.max()) <= 1
        assert float((apart > 0).float().mean()) < share
    for name in ("scale1", "scale2"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=2e-6, atol=0)
    a, b = (number_formats.join_master(s.weight, s.correction) for s in (one, other))
    bits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 20}[one.weight.dtype]
    bits += 8 if one.correction is not None else 0
    exponent = torch.frexp(torch.maximum(a.abs(), b.abs())).exponent.clamp_min(-13) - 1
    allowed = 1.01 * torch.exp2(exponent.double() - bits) + 4e-9
    assert float(((a - b).abs() / allowed).max()) <= 1


@needs_triton
@pytest.mark.parametrize(("dtype", "correct"), KINDS)
@pytest.mark.parametrize("numel", [5003, 1024 * 1024 + 16])
def test_triton_equals_torch_to_a_code(dtype: torch.dtype, correct: bool, numel: int) -> None:
    from memfit.strategies.lowbit import lowbit_kernels_triton

    reference, scalars = make_state(numel, dtype, correct), make_scalars()
    size = torch.exp(torch.randn(numel, device="cuda"))
    grad = (torch.randn(numel, device="cuda") * size * 1e-3).to(dtype)
    one, many, parts = (copy_of(reference) for _ in range(3))
    lowbit_kernels_torch.update(reference, grad, scalars)
    lowbit_kernels_triton.update(one, grad, scalars)
    lowbit_kernels_triton.update_many([(many, grad)], scalars)
    lowbit_kernels_triton.update(parts, grad[:2048], scalars)
    lowbit_kernels_triton.update(parts, grad[2048:].clone(), scalars, start=2048)
    assert_same_codes(reference, one)
    for other in (many, parts):
        for name in TENSORS:
            if getattr(one, name) is not None:
                assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("way", ["torch", pytest.param("triton", marks=needs_triton)])
def test_a_gate_shut_on_the_card_leaves_everything(way: str) -> None:
    state = make_state(5008, torch.float16, True)
    before, grad = copy_of(state), torch.full((5008,), torch.inf, device="cuda").half()
    shut = dataclasses.replace(make_scalars(), gate=torch.tensor(False, device="cuda"))
    kernels = pick_kernels(way, state.weight)
    kernels.update(state, grad, shut)
    kernels.update_many([(state, grad)], shut)
    for name in TENSORS:
        assert torch.equal(getattr(state, name), getattr(before, name)), name


@needs_triton
def test_triton_adds_up_8_bit_gradients_as_torch_does() -> None:
    from memfit.strategies.lowbit import lowbit_kernels_triton

    grad, scalars = torch.randn(100_003, device="cuda").bfloat16(), make_scalars()
    kept = [new_coded(grad.numel(), 256, grad.device) for _ in range(2)]
    norms = [torch.zeros((), device="cuda") for _ in range(2)]
    for keep in (0.0, 1.0, 1.0):
        for way, buffer, norm in zip(
            (lowbit_kernels_torch, lowbit_kernels_triton), kept, norms, strict=True
        ):
            flag = torch.tensor(keep, device="cuda")
            how = Addition(flag, scalars.key, stream=5, block=256, norm=norm)
            way.accumulate(buffer, grad, how)
    apart = (kept[0].codes.int() - kept[1].codes.int()).abs()
    assert int(apart.max()) <= 1
    assert float((apart > 0).float().mean()) < 1e-3
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    states = [make_state(grad.numel(), torch.bfloat16, True) for _ in range(2)]
    lowbit_kernels_torch.update(states[0], kept[1], scalars)
    lowbit_kernels_triton.update_many([(states[1], kept[1])], scalars)
    assert_same_codes(*states)


@needs_triton
def test_a_tensor_of_more_than_2_to_the_31_elements_is_reached_to_its_end() -> None:
    numel = 2**31 + 4096
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free memory")
    p = nn.Parameter(torch.full((numel,), 0.5, dtype=torch.bfloat16, device="cuda"))
    optimizer = LowBitOptimizer([p], lr=1e-2, weight_decay=0.0)
    p.grad = torch.full_like(p, 1e-3)
    p.grad[-1] = -1e-3
    optimizer.step()
    moved = p.detach()
    for part in (moved[:4096], moved[-4096:-1]):
        assert float((part.float() - 0.49).abs().max()) < 2e-3
    assert float(moved[-1]) == pytest.approx(0.51, abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_is_split_on_the_card_into_the_same_bits(dtype: torch.dtype) -> None:
    split = []
    for device in (None, torch.device("cuda", 0)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1500, 1000), nn.Linear(1000, 3))
        kept = to_lowbit(model, dtype, device=device)
        assert all(p.device.type == "cpu" for p in model.parameters())
        split.append([p.data for p in model.parameters()] + list(kept.corrections.values()))
    assert len(split[0]) > 4
    assert all(torch.equal(one, other) for one, other in zip(*split, strict=True))
