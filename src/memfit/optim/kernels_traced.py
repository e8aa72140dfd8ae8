"""A memory trace's view of the update in plain torch: its first chunk, since all are alike."""

from __future__ import annotations

from torch import Tensor

from memfit.optim import kernels_torch
from memfit.optim.layout import CodedGradient, LowBitState, StepScalars


def update(
    state: LowBitState, grad: Tensor | CodedGradient, scalars: StepScalars, start: int = 0
) -> None:
    """The temporaries of one chunk come and go."""
    kernels_torch.update(state, _first_of(grad, state.block), scalars, start)


def update_many(
    work: list[tuple[LowBitState, Tensor | CodedGradient]], scalars: StepScalars
) -> None:
    """One parameter after another."""
    for state, grad in work:
        update(state, grad, scalars)


def accumulate(
    kept: CodedGradient,
    grad: Tensor,
    *,
    keep: Tensor,
    key: Tensor,
    stream: int,
    block: int,
    norm: Tensor,
) -> None:
    """The same of a gradient that is added up in 8 bits."""
    first = grad[: kernels_torch.chunk_elements(grad.device)]
    kernels_torch.accumulate(kept, first, keep=keep, key=key, stream=stream, block=block, norm=norm)


def _first_of(grad: Tensor | CodedGradient, block: int) -> Tensor | CodedGradient:
    if isinstance(grad, Tensor):
        return grad[: kernels_torch.chunk_elements(grad.device)]
    count = kernels_torch.chunk_elements(grad.codes.device)
    return CodedGradient(grad.codes[:count], grad.scales[: -(-count // block)])
