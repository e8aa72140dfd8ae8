"""The update in plain torch: CPU, and cards without Triton (Windows).

Works in chunks, so that its fp32 temporaries stay under 16 MiB whatever the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.memory.tracing import traced_device
from memfit.strategies.lowbit import number_formats
from memfit.strategies.lowbit.lowbit_kernels import (
    Addition,
    CodedGradient,
    Hyper,
    LowBitState,
    StepScalars,
    Work,
)

# About eleven fp32 temporaries live at once: 3 MiB on a CPU, where they should stay in
# its cache, 12 MiB on a card, where launches cost more.
CPU_CHUNK, CUDA_CHUNK = 2**16, 2**18


def update(
    state: LowBitState, grad: Tensor | CodedGradient, scalars: StepScalars, start: int = 0
) -> None:
    """AdamW in place on elements `start` to `start + grad.numel()`; `start` on a block."""
    if state.weight.device.type == "cpu" and not traced_device.device() and not scalars.gate:
        return  # only a card's gate is worth not looking at
    count = grad.codes.numel() if isinstance(grad, CodedGradient) else grad.numel()
    key = number_formats.stream_key(scalars.key, state.stream)
    hyper = scalars.hyper[state.row].unbind()
    for low, high in _chunks(count, state.block, state.weight.device):
        here = slice(start + low, start + high)
        scales = slice(here.start // state.block, -(-here.stop // state.block))
        part = replace(
            state,
            weight=state.weight[here],
            correction=None if state.correction is None else state.correction[here],
            moment1=state.moment1[here],
            scale1=state.scale1[scales],
            moment2=state.moment2[here],
            scale2=state.scale2[scales],
        )
        _update_chunk(
            part, _gradient(grad, low, high, state.block), hyper, key, start + low, scalars
        )


def update_many(work: Work, scalars: StepScalars) -> None:
    """The same on whole parameters, one after the other."""
    for state, grad in work:
        update(state, grad, scalars)


def accumulate(kept: CodedGradient, grad: Tensor, how: Addition) -> None:
    """kept = keep * kept + grad, rounded stochastically; `norm` becomes the sum's 2-norm."""
    key, block = number_formats.stream_key(how.key, how.stream), how.block
    squares = []
    for low, high in _chunks(grad.numel(), block, grad.device):
        codes, scales = kept.codes[low:high], kept.scales[low // block : -(-high // block)]
        # A scale that overflowed must not outlive its step: 0 * inf is not 0.
        old = torch.where(how.keep != 0, scales, 0.0).unsqueeze(1)
        total = number_formats.decode_signed(_blocked(codes, block), old).mul_(how.keep)
        total += _blocked(grad[low:high], block)
        squares.append(torch.linalg.vector_norm(total))
        random16, _ = number_formats.noise(key, low, total.numel())
        new, scale = number_formats.encode_signed(total, random16.view_as(total))
        codes.copy_(new.view(-1)[: high - low])
        scales.copy_(scale.view(-1))
    torch.linalg.vector_norm(torch.stack(squares), out=how.norm)


def _update_chunk(
    part: LowBitState,
    grad: Tensor,
    hyper: tuple[Tensor, ...],
    key: Tensor,
    start: int,
    scalars: StepScalars,
) -> None:
    """The formulas of number_formats.py on [blocks, block] views; zeros fill the last block."""
    block, count = part.block, part.numel
    grad = grad.float() * scalars.grad_scale
    m = number_formats.decode_signed(_blocked(part.moment1, block), part.scale1.unsqueeze(1))
    m.mul_(hyper[Hyper.KEEP1]).add_(grad * hyper[Hyper.GAIN1])
    v = number_formats.decode_root(
        _blocked(part.moment2, block), part.scale2.unsqueeze(1)
    ).square_()
    v.mul_(hyper[Hyper.KEEP2]).addcmul_(grad.square_(), hyper[Hyper.GAIN2])
    del grad
    root = v.sqrt_()
    change = m * hyper[Hyper.STEP_SIZE]
    change.div_((root * hyper[Hyper.ROOT_FACTOR]).add_(hyper[Hyper.EPS]))
    for_weight, for_root = number_formats.noise(key, start, root.numel())

    master = number_formats.join_master(part.weight, part.correction)
    master.mul_(hyper[Hyper.SHRINK]).sub_(change.view(-1)[:count])
    del change
    weight, correction = number_formats.split_master(
        master,
        part.weight.dtype,
        correct=part.correction is not None,
        random16=for_weight[:count],
    )
    codes1, scale1 = number_formats.encode_signed(m)
    codes2, scale2 = number_formats.encode_root(root, for_root.view_as(root))
    _store(part.weight, weight, scalars.gate)
    if part.correction is not None and correction is not None:
        _store(part.correction, correction, scalars.gate)
    _store(part.moment1, codes1.view(-1)[:count], scalars.gate)
    _store(part.scale1, scale1.view(-1), scalars.gate)
    _store(part.moment2, codes2.view(-1)[:count], scalars.gate)
    _store(part.scale2, scale2.view(-1), scalars.gate)


def _store(target: Tensor, new: Tensor, gate: Tensor) -> None:
    """Write, or leave as it is where the gate is shut; a device decides without a sync."""
    if gate.device.type == "cpu":
        target.copy_(new)
    else:
        torch.where(gate, new, target, out=target)


def _chunks(count: int, block: int, device: torch.device) -> Iterator[tuple[int, int]]:
    size = chunk_elements(device)
    size -= size % block
    for low in range(0, count, size):
        yield low, min(low + size, count)


def chunk_elements(device: torch.device) -> int:
    """Elements that are computed at a time."""
    on = traced_device.device()
    on_cuda = device.type == "cuda" if on is None else on.cuda
    return CUDA_CHUNK if on_cuda else CPU_CHUNK


def _gradient(grad: Tensor | CodedGradient, low: int, high: int, block: int) -> Tensor:
    if isinstance(grad, Tensor):
        return _blocked(grad[low:high], block)
    scales = grad.scales[low // block : -(-high // block)].unsqueeze(1)
    return number_formats.decode_signed(_blocked(grad.codes[low:high], block), scales)


def _blocked(x: Tensor, block: int) -> Tensor:
    """[blocks, block], the last one filled with zeros."""
    missing = -x.numel() % block
    return (F.pad(x, (0, missing)) if missing else x).view(-1, block)


class _Traced:
    """A memory trace's view of this module: the first chunk is run, and all chunks are alike."""

    def update(
        self, state: LowBitState, grad: Tensor | CodedGradient, scalars: StepScalars, start: int = 0
    ) -> None:
        """The temporaries of one chunk come and go."""
        first, chunks = _first_chunk(grad, state.block)
        codes = first.codes if isinstance(first, CodedGradient) else first
        corrected = state.correction is not None
        key = ("update", codes.numel(), codes.dtype, state.weight.dtype, corrected)
        traced_device.alike(key, lambda: update(state, first, scalars, start), chunks)

    def update_many(self, work: Work, scalars: StepScalars) -> None:
        """One after the other."""
        for state, grad in work:
            self.update(state, grad, scalars)

    def accumulate(self, kept: CodedGradient, grad: Tensor, how: Addition) -> None:
        """The temporaries of one chunk of a gradient that is added up in 8 bits."""
        first, chunks = _first_chunk(grad, how.block)
        assert isinstance(first, Tensor)
        key = ("accumulate", first.numel(), first.dtype)
        traced_device.alike(key, lambda: accumulate(kept, first, how), chunks)


def _first_chunk(grad: Tensor | CodedGradient, block: int) -> tuple[Tensor | CodedGradient, int]:
    """The first chunk, and how many there are."""
    codes = grad.codes if isinstance(grad, CodedGradient) else grad
    count = chunk_elements(codes.device)
    chunks = -(-codes.numel() // count)
    if isinstance(grad, CodedGradient):
        return CodedGradient(grad.codes[:count], grad.scales[: -(-count // block)]), chunks
    return grad[:count], chunks


TRACED = _Traced()
