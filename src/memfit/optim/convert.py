"""From an fp32 model to bf16 or fp16 weights, with what they cannot hold kept for the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memfit.optim.formats import split_master
from memfit.optim.layout import SMALL_NUMEL, flat

_CHUNK = 2**20


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
    chunks = (torch.split(flat(t), _CHUNK) for t in (p, weight, correction))
    for full, low, rest in zip(*chunks, strict=True):
        new, units = split_master(full.to(device), dtype, correct=True)
        assert units is not None
        low.copy_(new)
        rest.copy_(units)
    return weight, correction
