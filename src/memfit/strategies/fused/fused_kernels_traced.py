"""A memory trace's view of the kernels: what they allocate, and nothing else."""

# ruff: noqa: ARG001

from __future__ import annotations

import torch
from torch import Tensor

from memfit.memory.tracing.counting import count_kernel
from memfit.strategies.fused.fused_kernels import (
    Drop,
    Gelu,
    Normed,
    NormGradients,
    norm_programs,
    rows_per_program,
)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, drop: Drop | None
) -> Normed:
    """The output, the sum, and two numbers a row."""
    mean, rstd = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    count_kernel(x, residual, x, x)
    return Normed(torch.empty_like(x), torch.empty_like(x), mean, rstd)


def add_norm_backward(
    d_output: Tensor, normed: Normed, weight: Tensor, drop: Drop | None
) -> NormGradients:
    """One or two gradients, and partial sums that go at once."""
    rows, columns = d_output.shape
    d_residual = torch.empty_like(normed.total)
    d_x = d_residual if drop is None else torch.empty_like(normed.total)
    count_kernel(d_output, normed.total, d_residual, None if drop is None else d_x)
    sums = _column_sums(weight, norm_programs(rows), 3 * columns).view(3, columns)
    return NormGradients(d_x, d_residual, sums[0], sums[1], sums[2])


def gelu(x: Tensor, kind: Gelu) -> Tensor:
    """One matrix."""
    count_kernel(x, x)
    return torch.empty_like(x)


def gelu_backward(x: Tensor, d_output: Tensor, kind: Gelu) -> tuple[Tensor, Tensor, Tensor]:
    """One matrix; the other takes the gradient's memory."""
    rows, columns = x.shape
    programs = -(-rows // rows_per_program(rows))
    count_kernel(x, x, d_output, d_output)
    return torch.empty_like(x), d_output, _column_sums(x, programs, columns)


def join(parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One matrix as large as the three."""
    rows, columns = parts[0].shape
    programs = -(-rows // rows_per_program(rows))
    joined = parts[0].new_empty(rows, 3 * columns)
    count_kernel(joined, joined)
    return joined, _column_sums(joined, programs, 3 * columns)


def _column_sums(like: Tensor, programs: int, columns: int) -> Tensor:
    partial = like.new_empty(programs, columns, dtype=torch.float32)
    count_kernel(partial, partial)  # written by the kernel before, then summed by one of its own
    del partial
    return like.new_empty(columns)
