"""The fused operators against the stock modules they replace: outputs, all gradients, masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memfit.strategies.fused.fused_kernels import Drop, Seeds, keep_mask
from memfit.strategies.fused.layer_functions import (
    dense_dropout_add_norm,
    join_parameters,
    joined_view,
    mlp_half,
    project,
    separate_parameters,
)

WIDTH, INNER = 24, 40
SHAPES = [(3, WIDTH), (2, 5, WIDTH), (1, 7, WIDTH)]


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def seed_of(number: int) -> Tensor:
    return torch.tensor([number * 0x9E3779B97F4A7C15 % 2**62])


def agree(ours: Callable[..., Tensor], stock: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Outputs and the gradients of all inputs, within 1e-6 of the largest."""
    outputs = [function(*inputs) for function in (ours, stock)]
    values = [output.detach() for output in outputs]
    direction = torch.randn(outputs[1].shape, generator=torch.Generator().manual_seed(1))
    found = [torch.autograd.grad(output, inputs, direction) for output in outputs]
    for mine, other in zip((values[0], *found[0]), (values[1], *found[1]), strict=True):
        assert mine.shape == other.shape
        assert float((mine - other).abs().max()) <= 1e-6 * max(float(other.abs().max()), 1.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_dense_addition_and_norm_equal_the_stock_modules(shape: tuple[int, ...]) -> None:
    inner = (*shape[:-1], INNER)
    inputs = leaves(inner, (WIDTH, INNER), (WIDTH,), shape, (WIDTH,), (WIDTH,))

    def stock(x: Tensor, w: Tensor, b: Tensor, r: Tensor, g: Tensor, c: Tensor) -> Tensor:
        return F.layer_norm(F.linear(x, w, b) + r, (WIDTH,), g, c, 1e-12)

    agree(lambda *given: dense_dropout_add_norm(*given, 1e-12, None), stock, inputs)


@pytest.mark.parametrize(("kind", "approximate"), [("erf", "none"), ("tanh", "tanh")])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_the_mlp_half_equals_the_stock_modules(
    shape: tuple[int, ...], kind: Any, approximate: str, pieces: int
) -> None:
    def stock(
        x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, g: Tensor, b: Tensor
    ) -> Tensor:
        hidden = F.linear(F.gelu(F.linear(x, w1, b1), approximate=approximate), w2, b2)
        return F.layer_norm(hidden + x, (WIDTH,), g, b, 1e-12)

    sizes = ((INNER, WIDTH), (INNER,), (WIDTH, INNER), (WIDTH,), (WIDTH,), (WIDTH,))
    inputs = leaves(shape, *sizes)
    agree(lambda *given: mlp_half(*given, 1e-12, kind, None, pieces), stock, inputs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("passes", [True, False])
def test_one_product_for_three_projections_equals_three(
    shape: tuple[int, ...], passes: bool
) -> None:
    x, *parameters = leaves(shape, *[(WIDTH, WIDTH)] * 3, *[(WIDTH,)] * 3)

    def use(q: Tensor, k: Tensor, v: Tensor, passed: Tensor) -> Tensor:
        mixed = (q * k).tanh() + v
        # Whoever takes the passed x gives a gradient in memory of its own.
        return mixed + passed.sigmoid() if passes else mixed

    def ours(x: Tensor, *given: Tensor) -> Tensor:
        found = project(x, given[:3], given[3:])
        assert found is not None
        return use(*found)

    def stock(x: Tensor, *given: Tensor) -> Tensor:
        pairs = zip(given[:3], given[3:], strict=True)
        q, k, v = (F.linear(x, weight, bias) for weight, bias in pairs)
        return use(q, k, v, x)

    agree(ours, stock, [x, *parameters])


def test_joined_parameters_keep_their_values_and_give_contiguous_gradients() -> None:
    linears = [nn.Linear(8, 8) for _ in range(3)]
    weights = [one.weight for one in linears]
    before = [one.detach().clone() for one in weights]
    joined = join_parameters(weights)
    assert joined is not None
    assert torch.equal(joined, torch.cat(before))
    again = join_parameters(weights)
    assert again is not None
    assert again.data_ptr() == joined.data_ptr()
    with torch.no_grad():
        linears[1].weight.zero_()
    assert not joined[8:16].any()
    found = project(torch.randn(4, 8), weights, [one.bias for one in linears])
    assert found is not None
    sum(part.square().sum() for part in found[:3]).backward()
    assert all(w.grad is not None and w.grad.is_contiguous() for w in weights)
    separate_parameters(weights)
    assert joined_view(weights) is None
    assert torch.equal(weights[2], before[2])


def test_memory_that_others_manage_is_not_moved() -> None:
    flat = torch.zeros(3 * 64 + 8)
    weights = [nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    for index, weight in enumerate(weights):
        start = index * 64 + (index > 0) * 8  # a gap, as between a weight and the next
        weight.data = flat[start : start + 64].view(8, 8)
    assert join_parameters(weights) is None
    assert all(weight.untyped_storage().data_ptr() == flat.data_ptr() for weight in weights)


def test_what_is_kept_for_backward() -> None:
    """x, what GELU is given and the sum, and two numbers a row: no mask, and not GELU's output."""
    rows = 6
    x, *parameters = leaves(
        (rows, WIDTH), (INNER, WIDTH), (INNER,), (WIDTH, INNER), (WIDTH,), (WIDTH,), (WIDTH,)
    )
    own = {p.untyped_storage().data_ptr() for p in parameters}
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mlp_half(x, *parameters, 1e-12, "erf", Drop(0.1, seed_of(3), 1))  # type: ignore[call-arg]
    assert sum(kept) == 4 * rows * (WIDTH + INNER + WIDTH + 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_drop_what_the_whole_drops(shape: tuple[int, ...]) -> None:
    sizes = ((INNER, WIDTH), (INNER,), (WIDTH, INNER), (WIDTH,), (WIDTH,), (WIDTH,))
    drop = Drop(0.3, seed_of(3), 1)

    def run(*given: Tensor, pieces: int) -> Tensor:
        return mlp_half(*given, 1e-12, "erf", drop, pieces)  # type: ignore[arg-type, misc]

    agree(partial(run, pieces=3), partial(run, pieces=1), leaves(shape, *sizes))


# ------------------------------------------------------------------------------ dropout


def test_gradients_see_the_mask_of_the_forward_pass() -> None:
    """Finite differences: a backward with another mask would be far off."""
    double = torch.float64
    sizes = ((4, 6), (9, 6), (9,), (6, 9), (6,), (6,), (6,))
    drop = Drop(0.4, seed_of(5), 2)
    mlp = leaves(*sizes, dtype=double)
    assert torch.autograd.gradcheck(lambda *given: mlp_half(*given, 1e-12, "erf", drop), mlp)
    dense = leaves((4, 9), (6, 9), (6,), (4, 6), (6,), (6,), dtype=double)
    assert torch.autograd.gradcheck(lambda *g: dense_dropout_add_norm(*g, 1e-12, drop), dense)


def test_what_is_kept_is_scaled_and_the_rest_is_the_residual() -> None:
    x, residual = leaves((50, WIDTH), (50, WIDTH))
    drop = Drop(0.25, seed_of(7), 4)
    mask = keep_mask(x.shape, drop)
    ones, zeros = torch.ones(WIDTH), torch.zeros(WIDTH)
    output = dense_dropout_add_norm(x, torch.eye(WIDTH), zeros, residual, ones, zeros, 1e-12, drop)
    expected = F.layer_norm(x * mask / 0.75 + residual, (WIDTH,), eps=1e-12)
    assert float((output - expected).detach().abs().max()) <= 1e-5


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_drop_their_share_in_every_row_and_column(p: float) -> None:
    shape = torch.Size((1000, 1024))
    dropped = ~keep_mask(shape, Drop(p, seed_of(11), 0))
    spread = (p * (1 - p)) ** 0.5
    assert abs(float(dropped.double().mean()) - p) <= 4.5 * spread / shape.numel() ** 0.5
    for axis in (0, 1):
        shares = dropped.double().mean(axis)
        count = shape[axis]
        assert float((shares - p).abs().max()) <= 5 * spread / count**0.5
        # Independent draws vary between columns as a binomial does, no less and no more.
        assert 0.8 <= float(shares.std()) / (spread / count**0.5) <= 1.2


def test_masks_of_other_sites_and_other_seeds_are_independent() -> None:
    shape, p = torch.Size((400, 512)), 0.3
    one = ~keep_mask(shape, Drop(p, seed_of(1), 0))
    tolerance = 4.5 * (p**2 * (1 - p**2) / shape.numel()) ** 0.5
    for seed, site in ((1, 1), (1, 47), (2, 0), (3, 5)):
        other = ~keep_mask(shape, Drop(p, seed_of(seed), site))
        for shifted in (other, other.roll(1, 1), other.roll(1, 0)):
            assert abs(float((one & shifted).double().mean()) - p**2) <= tolerance


def test_torchs_seed_decides_and_every_pass_draws_another() -> None:
    device = torch.device("cpu")
    for per_call in (False, True):
        drawn = []
        for _ in range(2):
            torch.manual_seed(5)
            seeds = Seeds(per_call=per_call)
            numbers = []
            for _ in range(3):
                seeds.advance(device)
                numbers += [int(seeds.take(device)), int(seeds.take(device))]
            drawn.append(numbers)
        assert drawn[0] == drawn[1]
        assert len(set(drawn[0])) == (6 if per_call else 3)
