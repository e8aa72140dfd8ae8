"""Launching the Triton kernels: nothing is allocated, nothing is read back by the host.

`update` is one launch for one parameter, as the step inside backward wants it;
`update_many` one launch for a list, through a table of pointers, since a launch costs the
host more than the kernel costs the card.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import torch
import triton.language as tl
from torch import Tensor

from memfit.optim import formats
from memfit.optim.layout import Addition, CodedGradient, LowBitState, StepScalars, Work
from memfit.optim.triton_device import accumulate_kernel, update_one_kernel, update_table_kernel

TILE = 1024
"""Elements one program handles at a time."""
TILES_PER_PROGRAM = 32
"""Tiles of one program in `update_many`: keeps the table of programs small."""

_TABLE_COLUMNS = 12
_Kind = tuple[torch.dtype, torch.dtype, bool, bool]
_loaded: set[tuple[object, ...]] = set()
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def update(
    state: LowBitState, grad: Tensor | CodedGradient, scalars: StepScalars, start: int = 0
) -> None:
    """AdamW in place on elements `start` to `start + grad.numel()`; `start` on a block."""
    codes, scales = _gradient_memory(grad)
    count = codes.numel()
    update_one_kernel[(-(-count // TILE),)](
        state.weight, _correction(state), codes, scales,
        state.moment1, state.scale1, state.moment2, state.scale2,
        scalars.hyper[state.row], scalars.grad_scale, scalars.gate.view(torch.uint8), scalars.key,
        start // state.block, start + count, _stream_offset(state.stream),
        CORRECT=state.correction is not None, CODED=isinstance(grad, CodedGradient),
        BLOCK=state.block, TILE=TILE, enable_fp_fusion=False,
    )  # fmt: skip


def update_many(work: Work, scalars: StepScalars) -> None:
    """One launch for all parameters of one kind; one a parameter while a graph is captured.

    The table of pointers is copied from the host, which a captured graph cannot repeat.
    """
    capturing = scalars.key.is_cuda and torch.cuda.is_current_stream_capturing()
    tabled = []
    for item in work:
        if capturing or not _fits_table(*item):
            update(*item, scalars)
        else:
            tabled.append(item)
    for kind, group in groupby(sorted(tabled, key=_kind_order), key=_kind):
        members = list(group)
        _load_single(members[0], scalars, kind)
        _launch_table(members, scalars, *kind)


def _load_single(
    item: tuple[LowBitState, Tensor | CodedGradient], scalars: StepScalars, kind: _Kind
) -> None:
    """Have `update`'s kernel ready: a graph may be captured next, and must not load code."""
    key = (*kind, item[0].block, scalars.key.device)
    if key not in _loaded:
        _loaded.add(key)
        shut = replace(scalars, gate=torch.zeros_like(scalars.gate))
        update(*item, shut)


def _fits_table(state: LowBitState, grad: Tensor | CodedGradient) -> bool:
    """Whether the table's kernel may read 16 bytes at a time."""
    codes, scales = _gradient_memory(grad)
    memory = (state.weight, _correction(state), state.moment1, state.moment2, codes, scales)
    return state.numel % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in memory)


def _launch_table(
    work: Work,
    scalars: StepScalars,
    weight: torch.dtype,
    grad: torch.dtype,
    correct: bool,
    coded: bool,
) -> None:
    rows, programs, which = [], 0, []
    for index, (state, gradient) in enumerate(work):
        codes, scales = _gradient_memory(gradient)
        tensors = [state.weight, _correction(state), codes, scales]
        tensors += [state.moment1, state.scale1, state.moment2, state.scale2]
        stream = _stream_offset(state.stream)
        rows += [t.data_ptr() for t in tensors] + [state.numel, state.row, stream, programs]
        count = -(-state.numel // (TILE * TILES_PER_PROGRAM))
        which += [index] * count
        programs += count
    device = scalars.key.device
    # Pageable memory: the copy is staged at once, so neither side waits for the other.
    table = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
    index_of = torch.tensor(which, dtype=torch.int32).to(device, non_blocking=True)
    update_table_kernel[(programs,)](
        table, index_of, scalars.hyper, scalars.grad_scale,
        scalars.gate.view(torch.uint8), scalars.key,
        WEIGHT=_TYPES[weight], GRAD=tl.int8 if coded else _TYPES[grad], CORRECT=correct,
        CODED=coded, BLOCK=work[0][0].block, TILE=TILE, TILES=TILES_PER_PROGRAM,
        COLUMNS=_TABLE_COLUMNS, enable_fp_fusion=False,
    )  # fmt: skip


def accumulate(kept: CodedGradient, grad: Tensor, how: Addition) -> None:
    """kept = keep * kept + grad, rounded stochastically; `norm` becomes the sum's 2-norm."""
    programs = -(-grad.numel() // TILE)
    # One partial a program and a second sum: atomics would add in another order each time.
    partial = torch.empty(programs, device=grad.device)
    accumulate_kernel[(programs,)](
        kept.codes, kept.scales, grad, how.keep, how.key, partial,
        grad.numel(), _stream_offset(how.stream),
        BLOCK=how.block, TILE=TILE, enable_fp_fusion=False,
    )  # fmt: skip
    torch.linalg.vector_norm(partial, out=how.norm)


def _correction(state: LowBitState) -> Tensor:
    """The corrections, or any pointer where there are none: the kernel then reads none."""
    return state.moment1 if state.correction is None else state.correction


def _gradient_memory(grad: Tensor | CodedGradient) -> tuple[Tensor, Tensor]:
    return (grad.codes, grad.scales) if isinstance(grad, CodedGradient) else (grad, grad)


def _stream_offset(stream: int) -> int:
    """As a signed number: one type, so one compilation, for all parameters."""
    offset = stream * formats.STREAM_STRIDE % 2**32
    return offset - 2**32 if offset >= 2**31 else offset


def _kind(item: tuple[LowBitState, Tensor | CodedGradient]) -> _Kind:
    state, grad = item
    coded = isinstance(grad, CodedGradient)
    memory, _ = _gradient_memory(grad)
    return state.weight.dtype, memory.dtype, state.correction is not None, coded


def _kind_order(item: tuple[LowBitState, Tensor | CodedGradient]) -> str:
    return str(_kind(item))
