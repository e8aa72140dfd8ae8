"""Host memory that a card's kernels read and write in place, across the bus.

Pinned memory has one address for both sides. A kernel that uses every byte once loses nothing by
reaching for it there: nothing is copied first, nothing lies on the card, and a captured graph may
do it too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memfit import traced

_CHUNK_BYTES = 1 << 26
"""Torch rounds pinned memory up to powers of two; many tensors share one piece of it."""
_ALIGNMENT = 512


class HostMemory:
    """Zeroed tensors for the kernels of one device; all of it is given back at once."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._chunk: Tensor | None = None
        self._used = 0

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """So many elements, zeroed."""
        if not self._pinned:
            return traced.hosted(torch.zeros(count, dtype=dtype, device="cpu"))
        nbytes = count * dtype.itemsize
        if self._chunk is None or self._used + nbytes > self._chunk.numel():
            size = max(_CHUNK_BYTES, 1 << (nbytes - 1).bit_length())
            self._chunk = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._used = 0
        taken = self._chunk[self._used : self._used + nbytes].view(dtype)
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return taken
