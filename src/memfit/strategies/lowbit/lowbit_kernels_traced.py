"""A memory trace's view of the update in plain torch: chunk by chunk, and all chunks alike."""

from __future__ import annotations

from torch import Tensor

from memfit.memory.tracing import traced_device
from memfit.strategies.lowbit import lowbit_kernels_torch
from memfit.strategies.lowbit.lowbit_kernels import (
    Addition,
    CodedGradient,
    LowBitState,
    StepScalars,
    one_by_one,
)


def update(
    state: LowBitState, grad: Tensor | CodedGradient, scalars: StepScalars, start: int = 0
) -> None:
    """The temporaries of one chunk come and go."""
    first, chunks = _first_of(grad, state.block)
    codes = first.codes if isinstance(first, CodedGradient) else first
    key = ("update", codes.numel(), codes.dtype, state.weight.dtype, state.correction is not None)
    traced_device.alike(
        key, lambda: lowbit_kernels_torch.update(state, first, scalars, start), chunks
    )


update_many = one_by_one(update)


def accumulate(kept: CodedGradient, grad: Tensor, how: Addition) -> None:
    """The same of a gradient that is added up in 8 bits."""
    first, chunks = _first_of(grad, how.block)
    assert isinstance(first, Tensor)

    def run() -> None:
        lowbit_kernels_torch.accumulate(kept, first, how)

    traced_device.alike(("accumulate", first.numel(), first.dtype), run, chunks)


def _first_of(grad: Tensor | CodedGradient, block: int) -> tuple[Tensor | CodedGradient, int]:
    """The first chunk, and how many there are."""
    codes = grad.codes if isinstance(grad, CodedGradient) else grad
    count = lowbit_kernels_torch.chunk_elements(codes.device)
    chunks = -(-codes.numel() // count)
    if isinstance(grad, CodedGradient):
        return CodedGradient(grad.codes[:count], grad.scales[: -(-count // block)]), chunks
    return grad[:count], chunks
