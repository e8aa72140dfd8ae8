"""Query, key and value of an attention as one matrix product, forward and backward.

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

from memfit.fused.backends import pick_kernels
from memfit.fused.norm import rows_of
from memfit.memory.counting import count_product

_Function: Any = torch.autograd.Function


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
    """Each parameter in memory of its own again."""
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
    """Not memory that somebody else manages, and not while a graph notes addresses."""
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
