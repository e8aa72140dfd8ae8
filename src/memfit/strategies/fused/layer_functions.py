"""The fused operators with gradients: dense and norm, the MLP half, and query, key and value.

y = LayerNorm(dropout(x W' + b) + residual)

Kept for backward: x, the sum and two numbers a row; no mask, and not what the dense layer gave.
One pass makes the gradients of the residual, of the dense layer's output, and of all vectors.

y = LayerNorm(dropout(GELU(x W1' + b1) W2' + b2) + x)

Kept for backward: x, what GELU was given, the sum and two numbers a row. What GELU gave, as wide
as its input, is computed again by the kernel that makes its gradient; and the gradient of x is
added to the residual's by the matrix product that makes it.

In pieces, some rows at a time, what is four times as wide as x is never there for all rows, and
what GELU was given is not kept but computed again: a twelfth of a layer's arithmetic more.

The three weights become neighbours in one [3H, H] tensor, of which the parameters are views:
their names, identity and state are untouched, and whether they (still) are neighbours is read
from their addresses. A model that was moved, copied or converted is joined again when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from memfit.memory.tracing.counting import count_product
from memfit.strategies.fused.fused_kernels import Drop, Gelu, Normed, pick_kernels

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
    """Replaces the gradients of inputs that do not learn by None."""
    pairs = zip(gradients, ctx.needs_input_grad, strict=False)
    return tuple(gradient if needs else None for gradient, needs in pairs)


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


def project(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Query, key, value, and x once more; None where the parameters cannot be made neighbours.

    Whoever takes x from here has the gradient he gives for it added up by the matrix product of
    the three. That gradient's memory is written to, so it must be his own.
    """
    weight, bias = join_parameters(weights), join_parameters(biases)
    if weight is None or bias is None:
        return None
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _Project.apply(
        x, weight, bias, *weights, *biases
    )
    return found


def join_parameters(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor of which the parameters are views, made now if need be."""
    if isinstance(parts[0], FakeTensor):
        return parts[0]  # its values are not read, and no memory is to appear
    joined = joined_view(parts)
    if joined is not None or not _may_move(parts):
        return joined
    with torch.no_grad():
        joined = torch.cat([part.detach() for part in parts])
        pieces = torch.split(joined, [len(part) for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            part.data = piece
    return joined


def move_joined(parts: Sequence[Tensor], device: torch.device) -> None:
    """Put the parameters on the device as neighbours.

    Joined only after they came there one by one, they would leave holes of their size behind.
    """
    if joined_view(parts) is None and not _may_move(parts):
        return
    joined = torch.cat([part.detach() for part in parts]).to(device)
    pieces = torch.split(joined, [len(part) for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        part.data = piece


def separate_parameters(parts: Sequence[Tensor]) -> None:
    """Gives each parameter its own memory again."""
    if joined_view(parts) is not None:
        for part in parts:
            part.data = part.data.clone()


def joined_view(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor that the parameters lie in one after another, if they do."""
    first = parts[0]
    storage = first.untyped_storage()._cdata
    offset = first.storage_offset()
    for part in parts:
        if (
            not part.is_contiguous()
            or part.untyped_storage()._cdata != storage
            or part.storage_offset() != offset
            or part.dtype != first.dtype
            or part.shape[1:] != first.shape[1:]
        ):
            return None
        offset += part.numel()
    rows = sum(len(part) for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _may_move(parts: Sequence[Tensor]) -> bool:
    """Whether parameters may move: not in memory managed elsewhere, nor during a capture."""
    if parts[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return all(part.untyped_storage().nbytes() == part.nbytes for part in parts)


class _Project(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        del parameters  # the same memory; they are named for their gradients
        ctx.set_materialize_grads(False)
        rows = rows_of(x)
        width = x.shape[-1]
        if isinstance(x, FakeTensor):
            count_product(len(rows), width, 3 * width, rows.dtype)
            joined = rows.new_empty(len(rows), 3 * width)
        else:
            joined = torch.addmm(bias, rows, weight.t())
        ctx.save_for_backward(rows, weight)
        query, key, value = torch.split(joined.view(*x.shape[:-1], 3 * width), width, dim=-1)
        return query, key, value, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        *d_parts, d_passed = d_outputs
        shape = next(d.shape for d in d_outputs if d is not None)
        needs_x, needs_weight = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3:6])
        if all(d is None for d in d_parts):
            return (d_passed, *[None] * 8)
        flat = tuple(
            torch.zeros_like(rows) if d is None else d.reshape(rows.shape) for d in d_parts
        )
        joined, d_bias = pick_kernels(rows).join((flat[0], flat[1], flat[2]))
        d_weight = joined.t() @ rows if needs_weight else None
        d_x = _gradient_of_x(joined, weight, d_passed).view(shape) if needs_x else None
        width = rows.shape[1]
        weights = [None] * 3 if d_weight is None else torch.split(d_weight, width)
        found = (d_x, None, None, *weights, *torch.split(d_bias, width))
        return tuple(d if n else None for d, n in zip(found, ctx.needs_input_grad, strict=True))


def _gradient_of_x(joined: Tensor, weight: Tensor, d_passed: Tensor | None) -> Tensor:
    if isinstance(joined, FakeTensor):
        count_product(len(joined), joined.shape[1], weight.shape[1], joined.dtype)
        return joined.new_empty(len(joined), weight.shape[1]) if d_passed is None else d_passed
    if d_passed is None:
        return joined @ weight
    return d_passed.view(-1, weight.shape[1]).addmm_(joined, weight)
