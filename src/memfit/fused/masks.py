"""Dropout masks that are never stored: a hash of a seed, a site and the element's index.

The seed is a number on the device, drawn from torch's own generator: `torch.manual_seed` decides
it, and a captured graph draws another one at every replay. Forward and backward compute the same
mask from it. It is not the mask torch's dropout would draw from the same generator.

    key1 = mix(low(seed) + site * STRIDE)      key2 = mix(high(seed) ^ key1)
    draw = half2(half1(index + key1) + key2)   dropped where its upper 24 bits are below p * 2^24
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# A finalizer with little bias, found by search: github.com/skeeto/hash-prospector. All below 2^31,
# so that every language reads them as the same type.
FACTOR_A = 0x21F0AAAD
FACTOR_B = 0x735A2D97
SITE_STRIDE = 0x61C88647
DRAW_BITS = 24

_UINT32 = 0xFFFFFFFF


class Drop(NamedTuple):
    """What one dropout needs to draw its mask, as often as it is asked to."""

    p: float
    seed: Tensor
    """int64, one element, on the device."""
    site: int
    """Which dropout of the model this is."""

    @property
    def threshold(self) -> int:
        """Draws below this are dropped."""
        return int(self.p * 2**DRAW_BITS + 0.5)

    @property
    def scale(self) -> float:
        """What the kept elements are multiplied by."""
        return 1.0 / (1.0 - self.p)


class Seeds:
    """Where dropouts get their seed: one a forward pass, or one a call.

    One a forward pass costs one small kernel; all recomputation in backward then has to belong
    to the last forward pass. One a call is drawn where the mask is needed, like torch's own:
    right for any order of passes, since recomputation puts the generator back.
    """

    def __init__(self, *, per_call: bool = False) -> None:
        self.per_call = per_call
        self._current: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Seeds:
        # A copied model's dropouts ask the same object as its copied hook draws for.
        return self

    def advance(self, device: torch.device) -> None:
        """A forward pass begins, outside of anything that is recomputed."""
        if not self.per_call:
            self._current = _draw(device)

    def take(self, device: torch.device) -> Tensor:
        """The seed for a dropout on this device."""
        if self.per_call or self._current is None or self._current.device != device:
            return _draw(device)
        return self._current


def _draw(device: torch.device) -> Tensor:
    return torch.randint(2**62, (1,), device=device)


def keep_mask(shape: torch.Size, drop: Drop) -> Tensor:
    """The mask in plain torch, bit for bit as the kernels draw it."""
    seed = drop.seed.reshape(())
    key1 = _mix((seed + drop.site * SITE_STRIDE) & _UINT32)
    key2 = _mix((seed >> 32 & _UINT32) ^ key1)
    index = torch.arange(shape.numel(), device=drop.seed.device) & _UINT32
    x = (index + key1) & _UINT32
    x = x ^ (x >> 16)
    x = x * FACTOR_A & _UINT32
    x = ((x ^ (x >> 15)) + key2) & _UINT32
    x = x * FACTOR_B & _UINT32
    x = x ^ (x >> 15)
    return (x >> (32 - DRAW_BITS) >= drop.threshold).view(shape)


def _mix(x: Tensor) -> Tensor:
    """The finalizer on 32 bits, in int64: torch has no unsigned product."""
    x = x ^ (x >> 16)
    x = x * FACTOR_A & _UINT32
    x = x ^ (x >> 15)
    x = x * FACTOR_B & _UINT32
    return x ^ (x >> 15)
