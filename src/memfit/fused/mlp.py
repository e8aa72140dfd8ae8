"""The MLP half of a layer as one operator.

    y = LayerNorm(dropout(GELU(x W1' + b1) W2' + b2) + x)

Kept for backward: x, what GELU was given, the sum and two numbers a row. What GELU gave, as wide
as its input, is computed again by the kernel that makes its gradient; and the gradient of x is
added to the residual's by the matrix product that makes it.

In pieces, some rows at a time, what is four times as wide as x is never there for all rows, and
what GELU was given is not kept but computed again: a twelfth of a layer's arithmetic more.
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
    pieces: int = 1,
) -> Tensor:
    """LayerNorm(dropout(GELU(x @ weight1' + bias1) @ weight2' + bias2) + x)."""
    output: Tensor = _MlpHalf.apply(
        x, weight1, bias1, weight2, bias2, norm_weight, norm_bias, eps, kind, drop, pieces
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
        pieces: int,
    ) -> Tensor:
        rows, kernels = rows_of(x), pick_kernels(x)
        kept: tuple[Tensor | None, Tensor | None]
        if pieces == 1:
            inner = torch.addmm(bias1, rows, weight1.t())
            hidden = torch.addmm(bias2, kernels.gelu(inner, kind), weight2.t())
            kept = (inner, None)
        else:
            hidden = torch.empty_like(rows)
            for some, out in zip(rows.chunk(pieces), hidden.chunk(pieces), strict=True):
                inner = torch.addmm(bias1, some, weight1.t())
                torch.addmm(bias2, kernels.gelu(inner, kind), weight2.t(), out=out)
                del inner  # before the next piece's is made
            kept = (None, bias1)
        normed = kernels.add_norm(hidden, rows, norm_weight, norm_bias, eps, drop)
        sums = (normed.total, normed.mean, normed.rstd)
        ctx.save_for_backward(rows, *kept, weight1, weight2, norm_weight, *sums)
        ctx.kind, ctx.drop, ctx.pieces = kind, drop, pieces
        return normed.output.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, kept_inner, bias1, weight1, weight2, norm_weight, *sums = ctx.saved_tensors
        needs = ctx.needs_input_grad
        normed = Normed(sums[0], *sums)
        kernels = pick_kernels(rows)
        top = kernels.add_norm_backward(rows_of(d_output), normed, norm_weight, ctx.drop)
        d_x, d_weight1, d_bias1, d_weight2 = top.residual, None, None, None
        if ctx.pieces > 1:
            # Where nothing is dropped top.x is the residual's memory, which x's gradient goes into.
            d_x = d_x if top.x is not d_x else d_x.clone()
            d_weight1, d_weight2 = torch.zeros_like(weight1), torch.zeros_like(weight2)
            d_bias1 = torch.zeros_like(bias1)
        parts = (one.chunk(ctx.pieces) for one in (rows, top.x, d_x))
        for some, d_some, out in zip(*parts, strict=True):
            inner = torch.addmm(bias1, some, weight1.t()) if kept_inner is None else kept_inner
            active, d_inner, d_bias = kernels.gelu_backward(inner, d_some @ weight2, ctx.kind)
            del inner
            d_bias1 = d_bias if d_bias1 is None else d_bias1.add_(d_bias)
            if needs[3]:
                d_weight2 = _add_product(d_weight2, d_some.t(), active)
            del active
            if needs[1]:
                d_weight1 = _add_product(d_weight1, d_inner.t(), some)
            if needs[0]:
                # Last, since d_some may be the same memory.
                out.addmm_(d_inner, weight1)
            del d_inner
        d_x = d_x.view(d_output.shape)
        gradients = (d_x, d_weight1, d_bias1, d_weight2, top.column_sum, top.weight, top.bias)
        return *wanted(ctx, gradients), None, None, None, None


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right in the total's memory; the product itself where there is none yet."""
    return left @ right if total is None else total.addmm_(left, right)
