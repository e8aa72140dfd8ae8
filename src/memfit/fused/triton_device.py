"""The fused operators in Triton: one pass over memory each, all sums in fp32.

Column sums are made in two steps, a partial sum a program and then `column_sum_kernel`: atomics
would add in another order each time. Pointers get a program's first row in 64 bits; offsets
within it are 32 bits.
"""

# ruff: noqa: N803
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from memfit.fused import masks

_A = tl.constexpr(masks.FACTOR_A)
_B = tl.constexpr(masks.FACTOR_B)
_STRIDE = tl.constexpr(masks.SITE_STRIDE)
_SHIFT = tl.constexpr(32 - masks.DRAW_BITS)
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
