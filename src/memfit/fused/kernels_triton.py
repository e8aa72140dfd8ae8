"""Launching the Triton kernels; nothing is read back by the host, so a graph can capture it."""

from __future__ import annotations

import torch
from torch import Tensor

from memfit.fused.backends import (
    NORM_ROWS,
    Gelu,
    Normed,
    NormGradients,
    norm_programs,
    rows_per_program,
)
from memfit.fused.masks import Drop
from memfit.fused.triton_device import (
    add_norm_backward_kernel,
    add_norm_kernel,
    column_sum_kernel,
    gelu_backward_kernel,
    gelu_kernel,
    join_kernel,
)

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
