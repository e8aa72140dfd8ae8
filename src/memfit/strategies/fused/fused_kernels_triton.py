"""The fused operators in Triton, and their launches: one pass over memory each, sums in fp32.

Column sums are made in two steps, a partial sum a program and then `column_sum_kernel`: atomics
would add in another order each time. Pointers get a program's first row in 64 bits; offsets
within it are 32 bits.
"""

# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memfit.strategies.fused import fused_kernels
from memfit.strategies.fused.fused_kernels import (
    NORM_ROWS,
    Drop,
    Gelu,
    Normed,
    NormGradients,
    norm_programs,
    rows_per_program,
)

_A = tl.constexpr(fused_kernels.FACTOR_A)

_B = tl.constexpr(fused_kernels.FACTOR_B)

_STRIDE = tl.constexpr(fused_kernels.SITE_STRIDE)

_SHIFT = tl.constexpr(32 - fused_kernels.DRAW_BITS)

_ROOT_HALF = tl.constexpr(0.7071067811865476)

_DENSITY = tl.constexpr(0.3989422804014327)

# erfc(|x| / sqrt 2) / 2 = bell * polynomial(1 / (1 + scale |x|))
_ERFC_SCALE = tl.constexpr(0.3275911 * 0.7071067811865476)

_ERFC1 = tl.constexpr(0.254829592 / 2)

_ERFC2 = tl.constexpr(-0.284496736 / 2)

_ERFC3 = tl.constexpr(1.421413741 / 2)

_ERFC4 = tl.constexpr(-1.453152027 / 2)

_ERFC5 = tl.constexpr(1.061405429 / 2)

_TWO_ROOT_2_PI = tl.constexpr(2 * 0.7978845608028654)

_CUBE = tl.constexpr(0.044715)

_THREE_CUBES = tl.constexpr(3 * 0.044715)


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= _A
    x ^= x >> 15
    x *= _B
    return x ^ (x >> 15)


@triton.jit
def _keys(seed_ptr, site):
    seed = tl.load(seed_ptr)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    key1 = _mix(low + site.to(tl.uint32) * _STRIDE)
    return key1, _mix(high ^ key1)


@triton.jit
def _is_kept(index, key1, key2, THRESHOLD: tl.constexpr):
    x = index + key1
    x ^= x >> 16
    x *= _A
    x = (x ^ (x >> 15)) + key2
    x *= _B
    x ^= x >> 15
    return (x >> _SHIFT).to(tl.int32) >= THRESHOLD


@triton.jit(do_not_specialize=["site"])
def add_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, output_ptr, total_ptr, mean_ptr, rstd_ptr,
    seed_ptr, site, eps, scale,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * COLUMNS
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    total = tl.load(x_ptr + start + column, inside, other=0.0).to(tl.float32)
    if THRESHOLD > 0:
        key1, key2 = _keys(seed_ptr, site)
        index = row.to(tl.uint32) * COLUMNS + column.to(tl.uint32)
        total = tl.where(_is_kept(index, key1, key2, THRESHOLD), total * scale, 0.0)
    total += tl.load(residual_ptr + start + column, inside, other=0.0).to(tl.float32)
    # The statistics are those of the sum as it is kept, which is what backward will see.
    kept = total.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + start + column, kept, inside)
    total = kept.to(tl.float32)
    mean = tl.sum(total, axis=0) / COLUMNS
    centred = tl.where(inside, total - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / COLUMNS + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + column, inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, inside, other=0.0).to(tl.float32)
    output = centred * rstd * weight + bias
    tl.store(output_ptr + start + column, output.to(output_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["site", "rows", "tiles"])
def add_norm_backward_kernel(
    d_output_ptr, total_ptr, mean_ptr, rstd_ptr, weight_ptr,
    d_x_ptr, d_residual_ptr, partial_ptr, seed_ptr, site, rows, tiles, scale,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    """`tiles` times ROWS rows a program; its sums for weight, bias and x's own bias."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    weight = tl.load(weight_ptr + column, inside, other=0.0).to(tl.float32)[None, :]
    d_weight = tl.zeros([BLOCK], tl.float32)
    d_bias = tl.zeros([BLOCK], tl.float32)
    column_sum = tl.zeros([BLOCK], tl.float32)
    if THRESHOLD > 0:
        key1, key2 = _keys(seed_ptr, site)
    for tile in range(tiles):
        first = (program * tiles + tile) * ROWS
        row = first + tl.arange(0, ROWS)
        start = first.to(tl.int64) * COLUMNS
        at = tl.arange(0, ROWS)[:, None] * COLUMNS + column[None, :]
        live = row < rows
        mask = live[:, None] & inside[None, :]
        mean = tl.load(mean_ptr + row, live, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, live, other=0.0)[:, None]
        d_output = tl.load(d_output_ptr + start + at, mask, other=0.0).to(tl.float32)
        unit = (tl.load(total_ptr + start + at, mask, other=0.0).to(tl.float32) - mean) * rstd
        unit = tl.where(mask, unit, 0.0)
        d_unit = d_output * weight
        along = (tl.sum(d_unit * unit, axis=1) / COLUMNS)[:, None]
        shift = (tl.sum(d_unit, axis=1) / COLUMNS)[:, None]
        d_total = (d_unit - shift - unit * along) * rstd
        d_total = tl.where(mask, d_total, 0.0)
        tl.store(d_residual_ptr + start + at, d_total.to(d_residual_ptr.dtype.element_ty), mask)
        if THRESHOLD > 0:
            index = row.to(tl.uint32)[:, None] * COLUMNS + column.to(tl.uint32)[None, :]
            is_kept = _is_kept(index, key1, key2, THRESHOLD)
            d_total = tl.where(is_kept, d_total * scale, 0.0)
            tl.store(d_x_ptr + start + at, d_total.to(d_x_ptr.dtype.element_ty), mask)
        d_weight += tl.sum(d_output * unit, axis=0)
        d_bias += tl.sum(d_output, axis=0)
        column_sum += tl.sum(d_total, axis=0)
    partial_ptr += program.to(tl.int64) * 3 * COLUMNS
    tl.store(partial_ptr + column, d_weight, inside)
    tl.store(partial_ptr + COLUMNS + column, d_bias, inside)
    tl.store(partial_ptr + 2 * COLUMNS + column, column_sum, inside)


@triton.jit
def _gelu(x, TANH: tl.constexpr, HALF: tl.constexpr):
    """GELU(x) / x, and the slope of that.

    Values of 16 bits get erfc from the exponential that the slope needs anyway, to 1.5e-7
    (Abramowitz and Stegun 7.1.26); with the library's erf the card would compute, not read.
    """
    if TANH:
        # (1 + tanh(u)) / 2 is the logistic function of 2u.
        square = x * x
        share = 1.0 / (1.0 + tl.exp(-(x * _TWO_ROOT_2_PI) * (square * _CUBE + 1.0)))
        slope = share * (1.0 - share) * _TWO_ROOT_2_PI * (square * _THREE_CUBES + 1.0)
    else:
        bell = tl.exp(-0.5 * x * x)
        slope = bell * _DENSITY
        if HALF:
            t = 1.0 / (tl.abs(x) * _ERFC_SCALE + 1.0)
            tail = (((t * _ERFC5 + _ERFC4) * t + _ERFC3) * t + _ERFC2) * t + _ERFC1
            tail *= t * bell
            share = tl.where(x < 0, tail, 1.0 - tail)
        else:
            share = 0.5 * (1.0 + tl.erf(x * _ROOT_HALF))
    return share, slope


@triton.jit
def gelu_kernel(x_ptr, output_ptr, count, TANH: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    mask = at < count
    x = tl.load(x_ptr + at, mask, other=0.0).to(tl.float32)
    share, _ = _gelu(x, TANH, x_ptr.dtype.element_ty != tl.float32)
    tl.store(output_ptr + at, (x * share).to(output_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def gelu_backward_kernel(
    x_ptr, gradient_ptr, output_ptr, partial_ptr, rows,
    COLUMNS: tl.constexpr, SHARE: tl.constexpr,
    TANH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SHARE rows of BLOCK columns a program; the gradient is replaced by that of x."""
    first = tl.program_id(1) * SHARE
    start = first.to(tl.int64) * COLUMNS
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(0, SHARE, ROWS):
        row = step + tl.arange(0, ROWS)
        mask = (first + row < rows)[:, None] & inside[None, :]
        at = row[:, None] * COLUMNS + column[None, :]
        x = tl.load(x_ptr + start + at, mask, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_ptr + start + at, mask, other=0.0).to(tl.float32)
        share, slope = _gelu(x, TANH, x_ptr.dtype.element_ty != tl.float32)
        tl.store(output_ptr + start + at, (x * share).to(output_ptr.dtype.element_ty), mask)
        gradient *= share + x * slope
        tl.store(gradient_ptr + start + at, gradient.to(gradient_ptr.dtype.element_ty), mask)
        sums += gradient
    partial_ptr += tl.program_id(1).to(tl.int64) * COLUMNS
    tl.store(partial_ptr + column, tl.sum(sums, axis=0), inside)


@triton.jit(do_not_specialize=["rows"])
def join_kernel(
    first_ptr, second_ptr, third_ptr, stride1, stride2, stride3, joined_ptr, partial_ptr, rows,
    COLUMNS: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SHARE rows of BLOCK columns of one of the three a program."""
    which = tl.program_id(2)
    source_ptr, stride = first_ptr, stride1
    if which == 1:
        source_ptr, stride = second_ptr, stride2
    if which == 2:
        source_ptr, stride = third_ptr, stride3
    first = (tl.program_id(1) * SHARE).to(tl.int64)
    source_ptr += first * stride
    joined_ptr += first * (3 * COLUMNS) + which * COLUMNS
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(0, SHARE, ROWS):
        row = step + tl.arange(0, ROWS)
        mask = (first + row < rows)[:, None] & inside[None, :]
        value = tl.load(source_ptr + row[:, None] * stride + column[None, :], mask, other=0.0)
        tl.store(joined_ptr + row[:, None] * (3 * COLUMNS) + column[None, :], value, mask)
        sums += value.to(tl.float32)
    partial_ptr += tl.program_id(1).to(tl.int64) * (3 * COLUMNS) + which * COLUMNS
    tl.store(partial_ptr + column, tl.sum(sums, axis=0), inside)


@triton.jit(do_not_specialize=["rows"])
def column_sum_kernel(
    partial_ptr, output_ptr, rows,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of BLOCK columns of the partial ones a program."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(0, rows, ROWS):
        row = step + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        sums += tl.load(partial_ptr + row[:, None] * COLUMNS + column[None, :], mask, other=0.0)
    total = tl.sum(sums, axis=0)
    tl.store(output_ptr + column, total.to(output_ptr.dtype.element_ty), inside)


_TILE_ROWS, _TILE_COLUMNS = 8, 256

_FLAT_BLOCK = 1024

# Said, since the default is about to change; masks are whole numbers and cannot differ by it.
_OPTIONS = {"enable_fp_fusion": True}


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, drop: Drop | None
) -> Normed:
    """LayerNorm(dropout(x) + residual)."""
    rows, columns = x.shape
    output, total = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = torch.empty(2, rows, dtype=torch.float32, device=x.device)
    block = _power_of_two(columns)
    add_norm_kernel[(rows,)](
        x, residual, weight, bias, output, total, mean, rstd, *_drawn(drop, x), eps, _scale(drop),
        COLUMNS=columns, BLOCK=block, THRESHOLD=_threshold(drop),
        num_warps=min(max(block // 512, 1), 16), **_OPTIONS,
    )  # fmt: skip
    return Normed(output, total, mean, rstd)


def add_norm_backward(
    d_output: Tensor, normed: Normed, weight: Tensor, drop: Drop | None
) -> NormGradients:
    """All its gradients in one pass, and one small sum of partial sums."""
    rows, columns = d_output.shape
    total = normed.total
    d_residual = torch.empty_like(total)
    d_x = d_residual if drop is None else torch.empty_like(total)
    programs, block = norm_programs(rows), _power_of_two(columns)
    tiles = -(-rows // (NORM_ROWS * programs))
    partial = torch.empty(programs, 3 * columns, dtype=torch.float32, device=total.device)
    add_norm_backward_kernel[(programs,)](
        d_output, total, normed.mean, normed.rstd, weight, d_x, d_residual, partial,
        *_drawn(drop, total), rows, tiles, _scale(drop),
        COLUMNS=columns, BLOCK=block, ROWS=NORM_ROWS, THRESHOLD=_threshold(drop),
        num_warps=min(max(block // 256, 1), 16), **_OPTIONS,
    )  # fmt: skip
    sums = _column_sums(partial, weight.dtype).view(3, columns)
    return NormGradients(d_x, d_residual, sums[0], sums[1], sums[2])


def gelu(x: Tensor, kind: Gelu) -> Tensor:
    """GELU(x)."""
    output = torch.empty_like(x)
    gelu_kernel[(-(-x.numel() // _FLAT_BLOCK),)](
        x, output, x.numel(), TANH=kind == "tanh", BLOCK=_FLAT_BLOCK, num_warps=4, **_OPTIONS
    )
    return output


def gelu_backward(x: Tensor, d_output: Tensor, kind: Gelu) -> tuple[Tensor, Tensor, Tensor]:
    """GELU(x) once more, the gradient of x (in d_output's memory), and its column sums."""
    rows, columns = x.shape
    output = torch.empty_like(x)
    block, share = min(_TILE_COLUMNS, _power_of_two(columns)), rows_per_program(rows)
    programs = -(-rows // share)
    partial = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
    gelu_backward_kernel[(-(-columns // block), programs)](
        x, d_output, output, partial, rows, COLUMNS=columns, SHARE=share,
        TANH=kind == "tanh", ROWS=_TILE_ROWS, BLOCK=block, num_warps=8, **_OPTIONS,
    )  # fmt: skip
    return output, d_output, _column_sums(partial, x.dtype)


def join(parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Three matrices side by side in one, and its column sums."""
    rows, columns = parts[0].shape
    matrices = [part if part.stride(1) == 1 else part.contiguous() for part in parts]
    joined = torch.empty(rows, 3 * columns, dtype=parts[0].dtype, device=parts[0].device)
    block, share = min(_TILE_COLUMNS, _power_of_two(columns)), rows_per_program(rows)
    programs = -(-rows // share)
    partial = torch.empty(programs, 3 * columns, dtype=torch.float32, device=joined.device)
    join_kernel[(-(-columns // block), programs, 3)](
        *matrices, *(matrix.stride(0) for matrix in matrices), joined, partial, rows,
        COLUMNS=columns, SHARE=share, ROWS=_TILE_ROWS, BLOCK=block, num_warps=8, **_OPTIONS,
    )  # fmt: skip
    return joined, _column_sums(partial, joined.dtype)


def _column_sums(partial: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = partial.shape
    output = torch.empty(columns, dtype=dtype, device=partial.device)
    # Nearly all of a column in flight at once: a loop would wait for memory at each turn.
    column_sum_kernel[(-(-columns // 32),)](
        partial, output, rows, COLUMNS=columns, ROWS=min(_power_of_two(rows), 256), BLOCK=32,
        num_warps=8, **_OPTIONS,
    )  # fmt: skip
    return output


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def _drawn(drop: Drop | None, like: Tensor) -> tuple[Tensor, int]:
    """Seed and site; any pointer where nothing is dropped: the kernel then reads none."""
    return (like, 0) if drop is None else (drop.seed, drop.site)


def _threshold(drop: Drop | None) -> int:
    return 0 if drop is None else drop.threshold


def _scale(drop: Drop | None) -> float:
    return 1.0 if drop is None else drop.scale
