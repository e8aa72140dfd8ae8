"""How the low-bit optimizer stores its numbers, and how an fp32 model is converted to them.

    weight    bf16 or fp16 in the model + int8 correction   24-bit master, exact round trip
    moment m  int8 c, one fp32 scale s a block              m = s * c|c|^3 / 127^4
    moment v  uint8 c, one fp32 scale s a block             sqrt(v) = s * c^4 / 255^4
    noise     32 bits an element from a counter-based hash

Why fourth powers: the update divides by sqrt(v), so it is the relative error of small
values that counts, and within one block they lie far below the largest. On 200 steps
of a pre-trained encoder's gradients the sum of all updates is off by 4 to 5 %; with
codes linear in sqrt(v) by up to 84 %, with single updates 400 times too large; rounding
those up halves every update. Squares do as well there, but not where a block
spreads over more decades (tests/unit/test_optim_formats.py). Two square roots encode.

v is rounded stochastically, unbiased in v: its average moves by a thousandth a step,
far below one code, and would stand still under rounding to nearest. m forgets in ten
steps and is rounded to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memfit.strategies.lowbit.lowbit_kernels import SMALL_NUMEL, flat

SIGNED_LEVELS, UNSIGNED_LEVELS = 127, 255

NOISE_BITS = 16

FP16_INFINITY = 0x7C00

NAN_BITS = 0x7FC00000
"""The NaN that no rounding carries into a zero; cards write it as 0x7FFFFFFF."""

# murmur3's finalizer: every input bit reaches every output bit.
HASH_FACTOR_A, HASH_FACTOR_B = 0x85EBCA6B, 0xC2B2AE35

STREAM_STRIDE = 0x9E3779B9


def _as_int32(value: int) -> int:
    """The 32-bit pattern as torch's signed int32 spells it."""
    value &= 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


def hash_int32(x: Tensor) -> Tensor:
    """murmur3's 32-bit finalizer on int32 tensors; products wrap."""
    shifted = (x >> 16).bitwise_and_(0xFFFF)
    x = (x ^ shifted).mul_(_as_int32(HASH_FACTOR_A))
    torch.bitwise_right_shift(x, 13, out=shifted).bitwise_and_(0x7FFFF)
    x.bitwise_xor_(shifted).mul_(_as_int32(HASH_FACTOR_B))
    torch.bitwise_right_shift(x, 16, out=shifted).bitwise_and_(0xFFFF)
    return x.bitwise_xor_(shifted)


def stream_key(step_key: Tensor, stream: int) -> Tensor:
    """The key of one parameter's noise in this step."""
    return hash_int32(step_key + _as_int32(stream * STREAM_STRIDE))


def noise(key: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Two independent 16-bit integers (as int32) for elements `start` onwards.

    The element's number enters as its low 32 bits, so a tensor may have more than 2^31.
    """
    index = torch.arange(count, dtype=torch.int32, device=key.device)
    index += _as_int32(start)
    bits = hash_int32(index.bitwise_xor_(key))
    return bits & 0xFFFF, (bits >> 16).bitwise_and_(0xFFFF)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for an all-zero block."""
    return torch.where(scale > 0, 1.0 / scale, 0.0)


def decode_signed(codes: Tensor, scale: Tensor) -> Tensor:
    """s * c|c|^3 / 127^4 for codes [blocks, block] and scale [blocks, 1]."""
    x = codes.float()
    x.mul_(x.abs())
    return x.mul_(x.abs()).mul_(scale / SIGNED_LEVELS**4)


def encode_signed(x: Tensor, random16: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int8 codes and fp32 scales; to nearest, or stochastically and unbiased in x."""
    magnitude = x.abs()
    scale = magnitude.amax(dim=1, keepdim=True)
    level = magnitude.mul_(inverse(scale)).sqrt_().sqrt_().mul_(SIGNED_LEVELS)
    level.clamp_(max=SIGNED_LEVELS)
    if random16 is None:
        code = level.add_(0.5).floor_()
    else:
        low = level.floor()
        low4, high4 = low.square().square_(), (low + 1).square_().square_()
        share = level.square_().square_().sub_(low4).div_(high4.sub_(low4))
        code = low.add_(_drawn(share, random16)).clamp_(max=SIGNED_LEVELS)
    return code.copysign_(x).to(torch.int8), scale


def decode_root(codes: Tensor, scale: Tensor) -> Tensor:
    """sqrt(v) = s * c^4 / 255^4."""
    return codes.float().square_().square_().mul_(scale / UNSIGNED_LEVELS**4)


def encode_root(root: Tensor, random16: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes and scales of sqrt(v), rounded stochastically and unbiased in v.

    Code 0 is not used: a v of 0 beside an m that is not would let the next update explode.
    Below 255^-4 of the block's largest, sqrt(v) is taken too large, which is safe.
    """
    scale = root.amax(dim=1, keepdim=True)
    level = (root * inverse(scale)).sqrt_().sqrt_().mul_(UNSIGNED_LEVELS)
    level.clamp_(1, UNSIGNED_LEVELS)
    low = level.floor()
    low8 = low.square().square_().square_()
    high8 = (low + 1).square_().square_().square_()
    share = level.square_().square_().square_().sub_(low8).div_(high8.sub_(low8))
    code = low.add_(_drawn(share, random16)).clamp_(max=UNSIGNED_LEVELS)
    return code.to(torch.uint8), scale


def _drawn(share: Tensor, random16: Tensor) -> Tensor:
    """1 with probability `share`, else 0."""
    return (random16 < share.mul_(2**NOISE_BITS)).float()


# ------------------------------------------------------------------ split master weights


def join_master(weight: Tensor, correction: Tensor | None) -> Tensor:
    """The fp32 master of a bf16, fp16 or fp32 weight: always a new tensor."""
    if correction is None:
        return weight.to(torch.float32, copy=True)
    if weight.dtype == torch.bfloat16:
        bits = weight.view(torch.int16).to(torch.int32).mul_(2**8).add_(correction).mul_(2**8)
        return bits.view(torch.float32)
    bits = weight.view(torch.int16)
    unit = _fp16_ulp(bits).mul_(torch.where(bits < 0, -1 / 256, 1 / 256))
    return weight.float().addcmul_(unit, correction.float())


def split_master(
    master: Tensor, dtype: torch.dtype, *, correct: bool, random16: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Weight and int8 correction; to nearest, or stochastically with 16 random bits.

    The 24-bit master is rounded first; the weight is its nearest bf16 or fp16 value, the
    correction what is missing in 256ths of the weight's last place. Without
    a correction the weight itself is rounded.
    """
    if dtype == torch.float32:
        return master, None
    if dtype == torch.bfloat16:
        return _split_bf16(master, correct, random16)
    return _split_fp16(master, correct, random16)


def _split_bf16(
    master: Tensor, correct: bool, random16: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    bits = master.view(torch.int32).masked_fill(torch.isnan(master), NAN_BITS)
    if not correct:
        if random16 is None:
            return master.bfloat16(), None
        return ((bits + random16) >> 16).to(torch.int16).view(torch.bfloat16), None
    bits = (bits + (0x80 if random16 is None else random16 & 0xFF)) & ~0xFF
    # Half a place rounds away from zero: then the rest fits -128 to 127.
    upper = (bits + 0x8000) >> 16
    correction = ((bits - (upper << 16)) >> 8).to(torch.int8)
    return upper.to(torch.int16).view(torch.bfloat16), correction


def _split_fp16(
    master: Tensor, correct: bool, random16: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    magnitude = master.abs()
    if correct:
        bits = magnitude.half().view(torch.int16)
    else:
        if random16 is None:
            return master.half(), None
        bits = magnitude.half().view(torch.int16)
        # Towards zero, so that the place's width is that of the interval rounded in.
        bits = bits - (bits.view(torch.float16).float() > magnitude).to(torch.int16)
    ulp = _fp16_ulp(bits)
    # Of what is not finite nothing is left over: the weight is all of it.
    rest = magnitude.sub_(bits.view(torch.float16).float()).div_(ulp)
    rest.masked_fill_(bits >= FP16_INFINITY, 0.0)
    if not correct:
        assert random16 is not None
        bits = bits + (random16 < rest.mul_(2**NOISE_BITS)).to(torch.int16)
        return _signed_fp16(bits, master), None
    lift: Tensor | float = 0.5 if random16 is None else (random16 & 0xFF).float().mul_(1 / 256)
    units = rest.mul_(256).add_(lift).floor_()
    # Half a place up is written as half a place below the next weight, if that has the
    # same width; where it has not, nearest rounding leaves no exact half here.
    carry = (units > 127) & ((bits & 0x3FF) != 0x3FF)
    bits = bits + carry.to(torch.int16)
    units = units.sub_(256 * carry).clamp_(max=127)
    return _signed_fp16(bits, master), units.to(torch.int8)


def _fp16_ulp(bits: Tensor) -> Tensor:
    """The width of the last place of an fp16 number, from its bits."""
    exponent = ((bits.to(torch.int32) >> 10) & 31).clamp_(min=1)
    return ((exponent + (127 - 25)) << 23).view(torch.float32)


def _signed_fp16(bits: Tensor, like: Tensor) -> Tensor:
    """The fp16 number of these magnitude bits with the sign of `like`."""
    return torch.where(like < 0, bits | -0x8000, bits).view(torch.float16)


PIECE = 2**20
"""Elements of a weight that are split or joined at once."""


@dataclass(slots=True)
class Remainders:
    """What a converted model's weights lost, by parameter, until an optimizer takes it over."""

    small_numel: int = SMALL_NUMEL
    corrections: dict[Tensor, Tensor] = field(default_factory=dict)
    small: dict[Tensor, Tensor] = field(default_factory=dict)

    def pop_correction(self, p: Tensor) -> Tensor | None:
        """The int8 correction of a large parameter."""
        return self.corrections.pop(p, None)

    def pop_small(self, p: Tensor) -> Tensor | None:
        """The fp32 remainder of a small parameter."""
        return self.small.pop(p, None)


@torch.no_grad()
def to_lowbit(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    *,
    master_bits: int = 24,
    small_numel: int = SMALL_NUMEL,
    device: torch.device | None = None,
) -> Remainders:
    """Convert fp32 parameters in place, one at a time; buffers stay as they are.

    Hand the result to `LowBitAdamW(remainders=...)`: the masters then start within 2^-17 of
    the fp32 weights (small parameters exactly), not within bf16's 2^-9. A frozen
    parameter is only rounded. `device` is where the splitting is computed, a piece at a time,
    whatever the model lies on.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"weights are stored in bfloat16 or float16, not {dtype}")
    kept = Remainders(small_numel=small_numel)
    for p in model.parameters():
        if p.dtype != torch.float32:
            continue
        if not p.requires_grad:
            p.data = p.data.to(dtype)
        elif p.numel() <= small_numel:
            low = p.data.to(dtype)
            kept.small[p] = p.data - low.float()
            p.data = low
        elif master_bits == 24:
            weight, kept.corrections[p] = _split(p, dtype, device or p.device)
            p.data = weight
        else:
            p.data = p.data.to(dtype)
    return kept


def _split(p: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Weight and correction of a large parameter, without several fp32 copies of it at once."""
    weight = torch.empty_like(p, dtype=dtype)
    correction = torch.empty_like(p, dtype=torch.int8)
    if isinstance(p, FakeTensor):
        return weight, correction  # a trace has no values to split
    chunks = (torch.split(flat(t), PIECE) for t in (p, weight, correction))
    for full, low, rest in zip(*chunks, strict=True):
        new, units = split_master(_sent(full, device), dtype, correct=True)
        assert units is not None
        low.copy_(_fetched(new, low.device))
        rest.copy_(_fetched(units, rest.device))
    return weight, correction


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, by way of pinned memory.

    The driver reads and writes other host memory in one thread, which also waits for its pages:
    a second for BERT-Large. torch copies into pinned memory and out of it in several.
    """
    if tensor.is_cpu and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _fetched(tensor: Tensor, device: torch.device) -> Tensor:
    """The inverse of `_sent`."""
    if not (tensor.is_cuda and device.type == "cpu"):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
