"""A dense layer, its dropout, the residual and the norm after it, as one operator.

    y = LayerNorm(dropout(x W' + b) + residual)

Kept for backward: x, the sum and two numbers a row; no mask, and not what the dense layer gave.
One pass makes the gradients of the residual, of the dense layer's output, and of all vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from memfit.fused.backends import Normed, pick_kernels
from memfit.fused.masks import Drop

_Function: Any = torch.autograd.Function


def dense_dropout_add_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    drop: Drop | None,
) -> Tensor:
    """LayerNorm(dropout(x @ weight' + bias) + residual)."""
    output: Tensor = _DenseDropoutAddNorm.apply(
        x, weight, bias, residual, norm_weight, norm_bias, eps, drop
    )
    return output


def rows_of(x: Tensor) -> Tensor:
    """A matrix of the last dimension's vectors, contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


class _DenseDropoutAddNorm(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        drop: Drop | None,
    ) -> Tensor:
        rows = rows_of(x)
        hidden = torch.addmm(bias, rows, weight.t())
        kernels = pick_kernels(x)
        normed = kernels.add_norm(hidden, rows_of(residual), norm_weight, norm_bias, eps, drop)
        ctx.save_for_backward(rows, weight, norm_weight, normed.total, normed.mean, normed.rstd)
        ctx.drop, ctx.shape = drop, x.shape
        return normed.output.view(residual.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, norm_weight, total, mean, rstd = ctx.saved_tensors
        normed = Normed(total, total, mean, rstd)
        kernels = pick_kernels(total)
        found = kernels.add_norm_backward(rows_of(d_output), normed, norm_weight, ctx.drop)
        needs = ctx.needs_input_grad
        gradients = (
            (found.x @ weight).view(ctx.shape) if needs[0] else None,
            found.x.t() @ rows if needs[1] else None,
            found.column_sum,
            found.residual.view(d_output.shape),
            found.weight,
            found.bias,
        )
        return *wanted(ctx, gradients), None, None


def wanted(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Nothing for inputs that learn nothing."""
    pairs = zip(gradients, ctx.needs_input_grad, strict=False)
    return tuple(gradient if needs else None for gradient, needs in pairs)
