"""The update in Triton, and its launches: nothing allocated, nothing read back by the host.

One pass over memory; every number that changes from step to step is read from the
device, so that a captured graph replays with fresh ones.

`update` is one launch for one parameter, as the step inside backward wants it;
`update_many` one launch for a list, through a table of pointers, since a launch costs the
host more than the kernel costs the card.
"""

# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from memfit.strategies.lowbit import number_formats
from memfit.strategies.lowbit.lowbit_kernels import (
    Addition,
    CodedGradient,
    LowBitState,
    StepScalars,
    Work,
)

_A = tl.constexpr(number_formats.HASH_FACTOR_A)

_B = tl.constexpr(number_formats.HASH_FACTOR_B)

_NAN = tl.constexpr(number_formats.NAN_BITS)

_FP16_INFINITY = tl.constexpr(number_formats.FP16_INFINITY)


@triton.jit
def _hash(x):
    x ^= x >> 16
    x *= _A
    x ^= x >> 13
    x *= _B
    return x ^ (x >> 16)


@triton.jit
def _stream_key(key_ptr, stream):
    return _hash(tl.load(key_ptr).to(tl.uint32, bitcast=True) + stream.to(tl.uint32))


@triton.jit
def _share_drawn(share, random16):
    """1 with probability `share`."""
    return tl.where(random16.to(tl.float32) < share * 65536.0, 1.0, 0.0)


@triton.jit
def _inverse(scale):
    return tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)


@triton.jit
def _fp16_ulp(bits):
    exponent = tl.maximum((bits >> 10) & 31, 1)
    return ((exponent + 102) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _fp16_value(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _load_master(w_ptr, c_ptr, at, mask, CORRECT: tl.constexpr):
    weight = tl.load(w_ptr + at, mask, other=0.0)
    master = weight.to(tl.float32)
    if CORRECT:
        correction = tl.load(c_ptr + at, mask, other=0).to(tl.int32)
        bits = weight.to(tl.int16, bitcast=True).to(tl.int32)
        if w_ptr.dtype.element_ty == tl.bfloat16:
            master = ((bits << 16) + (correction << 8)).to(tl.float32, bitcast=True)
        else:
            units = _fp16_ulp(bits) * correction.to(tl.float32) * (1.0 / 256.0)
            master += tl.where(bits < 0, -units, units)
    return master


@triton.jit
def _store_bf16(w_ptr, c_ptr, at, mask, master, random16, CORRECT: tl.constexpr):
    bits = tl.where(master != master, _NAN, master.to(tl.int32, bitcast=True))
    if CORRECT:
        bits = (bits + (random16 & 0xFF)) & -256
        upper = (bits + 0x8000) >> 16
        tl.store(c_ptr + at, ((bits - (upper << 16)) >> 8).to(tl.int8), mask)
    else:
        upper = (bits + random16) >> 16
    tl.store(w_ptr + at, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask)


@triton.jit
def _store_fp16(w_ptr, c_ptr, at, mask, master, random16, CORRECT: tl.constexpr):
    size = tl.abs(master)
    bits = size.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    if CORRECT:
        rest = (size - _fp16_value(bits)) / _fp16_ulp(bits)
        rest = tl.where(bits >= _FP16_INFINITY, 0.0, rest)
        lift = (random16 & 0xFF).to(tl.float32) * (1.0 / 256.0)
        units = tl.floor(rest * 256.0 + lift)
        carry = (units > 127) & ((bits & 0x3FF) != 0x3FF)
        bits = tl.where(carry, bits + 1, bits)
        units = tl.minimum(tl.where(carry, units - 256, units), 127.0)
        tl.store(c_ptr + at, units.to(tl.int8), mask)
    else:
        bits = tl.where(_fp16_value(bits) > size, bits - 1, bits)
        rest = (size - _fp16_value(bits)) / _fp16_ulp(bits)
        bits = tl.where(random16.to(tl.float32) < rest * 65536.0, bits + 1, bits)
    bits = tl.where(master < 0, bits | -0x8000, bits)
    tl.store(w_ptr + at, bits.to(tl.int16).to(tl.float16, bitcast=True), mask)


@triton.jit
def _store_master(w_ptr, c_ptr, at, mask, master, random16, CORRECT: tl.constexpr):
    if w_ptr.dtype.element_ty == tl.bfloat16:
        _store_bf16(w_ptr, c_ptr, at, mask, master, random16, CORRECT)
    elif w_ptr.dtype.element_ty == tl.float16:
        _store_fp16(w_ptr, c_ptr, at, mask, master, random16, CORRECT)
    else:
        tl.store(w_ptr + at, master, mask)


@triton.jit
def _fourth(x):
    x *= x
    return x * x


@triton.jit
def _level(size, scale, levels):
    """The code before it is rounded."""
    share = size * _inverse(scale)[:, None]
    return tl.minimum(tl.sqrt(tl.sqrt(share)) * levels, levels)


@triton.jit
def _decode_signed(codes, scale):
    x = codes.to(tl.float32)
    x *= tl.abs(x)
    return x * tl.abs(x) * (scale * (1.0 / 260144641.0))[:, None]


@triton.jit
def _tile(
    w_ptr, c_ptr, g_ptr, gs_ptr, m_ptr, ms_ptr, v_ptr, vs_ptr,
    first_block, end, tile, hyper_ptr, grad_scale, key,
    CORRECT: tl.constexpr, CODED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """AdamW on one tile of [blocks, BLOCK]; the gradient's memory begins at `first_block`."""
    ROWS: tl.constexpr = TILE // BLOCK
    inside = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    grad_at = tile * TILE + inside
    at = first_block * BLOCK + grad_at
    mask = at < end
    grad_block = tile * ROWS + tl.arange(0, ROWS)
    block = first_block + grad_block
    live = block * BLOCK < end

    grad = tl.load(g_ptr + grad_at, mask, other=0)
    if CODED:
        grad = _decode_signed(grad, tl.load(gs_ptr + grad_block, live, other=0.0))
    grad = grad.to(tl.float32) * grad_scale
    m = _decode_signed(tl.load(m_ptr + at, mask, other=0), tl.load(ms_ptr + block, live, other=0.0))
    m = m * tl.load(hyper_ptr) + grad * tl.load(hyper_ptr + 1)
    root = tl.load(v_ptr + at, mask, other=0).to(tl.float32)
    root *= root
    root *= root * (tl.load(vs_ptr + block, live, other=0.0) * (1.0 / 4228250625.0))[:, None]
    root = tl.sqrt(root * root * tl.load(hyper_ptr + 2) + grad * grad * tl.load(hyper_ptr + 3))

    bits = _hash(at.to(tl.uint32) ^ key)
    change = m * tl.load(hyper_ptr + 4) / (root * tl.load(hyper_ptr + 5) + tl.load(hyper_ptr + 6))
    master = _load_master(w_ptr, c_ptr, at, mask, CORRECT)
    master = master * tl.load(hyper_ptr + 7) - change
    _store_master(w_ptr, c_ptr, at, mask, master, (bits & 0xFFFF).to(tl.int32), CORRECT)

    size = tl.abs(m)
    scale = tl.max(size, axis=1)
    level = tl.floor(_level(size, scale, 127.0) + 0.5)
    tl.store(m_ptr + at, tl.where(m < 0, -level, level).to(tl.int8), mask)
    tl.store(ms_ptr + block, scale, live)

    scale = tl.max(root, axis=1)
    level = tl.maximum(_level(root, scale, 255.0), 1.0)
    low = tl.floor(level)
    low8 = _fourth(low * low)
    share = (_fourth(level * level) - low8) / (_fourth((low + 1) * (low + 1)) - low8)
    code = tl.minimum(low + _share_drawn(share, bits >> 16), 255.0)
    tl.store(v_ptr + at, code.to(tl.uint8), mask)
    tl.store(vs_ptr + block, scale, live)


# `end` is left to be specialized: known to divide by 16, the masked loads are vectors.
@triton.jit(do_not_specialize=["first_block", "stream"])
def update_one_kernel(
    w_ptr, c_ptr, g_ptr, gs_ptr, m_ptr, ms_ptr, v_ptr, vs_ptr,
    hyper_ptr, scale_ptr, gate_ptr, key_ptr, first_block, end, stream,
    CORRECT: tl.constexpr, CODED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if tl.load(gate_ptr) != 0:
        _tile(
            w_ptr, c_ptr, g_ptr, gs_ptr, m_ptr, ms_ptr, v_ptr, vs_ptr,
            first_block.to(tl.int64), end, tl.program_id(0).to(tl.int64),
            hyper_ptr, tl.load(scale_ptr), _stream_key(key_ptr, stream.to(tl.int64)),
            CORRECT, CODED, BLOCK, TILE,
        )  # fmt: skip


@triton.jit
def _pointer(entry, TYPE: tl.constexpr):
    """An address of the table; the host has seen that it divides by 16."""
    return tl.multiple_of(tl.load(entry).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def update_table_kernel(
    table_ptr, which_ptr, hyper_ptr, scale_ptr, gate_ptr, key_ptr,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, CORRECT: tl.constexpr, CODED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if tl.load(gate_ptr) != 0:
        program = tl.program_id(0)
        entry = table_ptr + tl.load(which_ptr + program) * COLUMNS
        w_ptr = _pointer(entry, WEIGHT)
        c_ptr = _pointer(entry + 1, tl.int8)
        g_ptr = _pointer(entry + 2, GRAD)
        gs_ptr = _pointer(entry + 3, tl.float32)
        m_ptr = _pointer(entry + 4, tl.int8)
        ms_ptr = _pointer(entry + 5, tl.float32)
        v_ptr = _pointer(entry + 6, tl.uint8)
        vs_ptr = _pointer(entry + 7, tl.float32)
        end = tl.multiple_of(tl.load(entry + 8), 16)
        row = hyper_ptr + tl.load(entry + 9) * 8
        key = _stream_key(key_ptr, tl.load(entry + 10))
        first = (program - tl.load(entry + 11)) * TILES
        grad_scale = tl.load(scale_ptr)
        zero = end - end
        for tile in range(first, tl.minimum(first + TILES, tl.cdiv(end, TILE))):
            _tile(
                w_ptr, c_ptr, g_ptr, gs_ptr, m_ptr, ms_ptr, v_ptr, vs_ptr,
                zero, end, tile, row, grad_scale, key, CORRECT, CODED, BLOCK, TILE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["stream"])
def accumulate_kernel(
    q_ptr, s_ptr, g_ptr, keep_ptr, key_ptr, norm_ptr, end, stream,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TILE // BLOCK
    base = tl.program_id(0).to(tl.int64) * TILE
    at = base + tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = at < end
    block = base // BLOCK + tl.arange(0, ROWS)
    live = block * BLOCK < end
    keep = tl.load(keep_ptr)
    # A scale that overflowed must not outlive its step: 0 * inf is not 0.
    old = tl.where(keep != 0, tl.load(s_ptr + block, live, other=0.0), 0.0)
    total = _decode_signed(tl.load(q_ptr + at, mask, other=0), old) * keep
    total += tl.load(g_ptr + at, mask, other=0.0).to(tl.float32)
    tl.store(norm_ptr + tl.program_id(0), tl.sqrt(tl.sum(tl.sum(total * total, axis=1), axis=0)))

    size = tl.abs(total)
    scale = tl.max(size, axis=1)
    level = _level(size, scale, 127.0)
    low = tl.floor(level)
    bits = _hash(at.to(tl.uint32) ^ _stream_key(key_ptr, stream.to(tl.int64)))
    low4 = _fourth(low)
    share = (_fourth(level) - low4) / (_fourth(low + 1) - low4)
    code = tl.minimum(low + _share_drawn(share, bits & 0xFFFF), 127.0)
    tl.store(q_ptr + at, tl.where(total < 0, -code, code).to(tl.int8), mask)
    tl.store(s_ptr + block, scale, live)


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
    offset = stream * number_formats.STREAM_STRIDE % 2**32
    return offset - 2**32 if offset >= 2**31 else offset


def _kind(item: tuple[LowBitState, Tensor | CodedGradient]) -> _Kind:
    state, grad = item
    coded = isinstance(grad, CodedGradient)
    memory, _ = _gradient_memory(grad)
    return state.weight.dtype, memory.dtype, state.correction is not None, coded


def _kind_order(item: tuple[LowBitState, Tensor | CodedGradient]) -> str:
    return str(_kind(item))
