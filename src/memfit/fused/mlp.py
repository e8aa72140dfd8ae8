"""The MLP half of a layer as one operator.

    y = LayerNorm(dropout(GELU(x W1' + b1) W2' + b2) + x)

Kept for backward: x, what GELU was given, the sum and two numbers a row. What GELU gave, as wide
as its input, is computed again by the kernel that makes its gradient; and the gradient of x is
added to the residual's by the matrix product that makes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from memfit.fused.backends import Gelu, Normed, pick_kernels
from memfit.fused.masks import Drop
from memfit.fused.norm import rows_of, wanted

_Function: Any = torch.autograd.Function


def mlp_half(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    kind: Gelu,
    drop: Drop | None,
) -> Tensor:
    """LayerNorm(dropout(GELU(x @ weight1' + bias1) @ weight2' + bias2) + x)."""
    output: Tensor = _MlpHalf.apply(
        x, weight1, bias1, weight2, bias2, norm_weight, norm_bias, eps, kind, drop
    )
    return output


class _MlpHalf(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor,
        weight2: Tensor,
        bias2: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        kind: Gelu,
        drop: Drop | None,
    ) -> Tensor:
        rows, kernels = rows_of(x), pick_kernels(x)
        inner = torch.addmm(bias1, rows, weight1.t())
        hidden = torch.addmm(bias2, kernels.gelu(inner, kind), weight2.t())
        normed = kernels.add_norm(hidden, rows, norm_weight, norm_bias, eps, drop)
        ctx.save_for_backward(
            rows, inner, weight1, weight2, norm_weight, normed.total, normed.mean, normed.rstd
        )
        ctx.kind, ctx.drop = kind, drop
        return normed.output.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, inner, weight1, weight2, norm_weight, total, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad
        normed = Normed(total, total, mean, rstd)
        kernels = pick_kernels(total)
        top = kernels.add_norm_backward(rows_of(d_output), normed, norm_weight, ctx.drop)
        active, d_inner, d_bias1 = kernels.gelu_backward(inner, top.x @ weight2, ctx.kind)
        d_weight2 = top.x.t() @ active if needs[3] else None
        del active
        d_weight1 = d_inner.t() @ rows if needs[1] else None
        # Last, since where nothing is dropped top.x is the same memory.
        d_x = top.residual.addmm_(d_inner, weight1).view(d_output.shape) if needs[0] else None
        gradients = (d_x, d_weight1, d_bias1, d_weight2, top.column_sum, top.weight, top.bias)
        return *wanted(ctx, gradients), None, None, None
