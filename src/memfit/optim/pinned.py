"""Host memory that a card's kernels read and write in place, across the bus.

Pinned memory has one address for both sides. A kernel that uses every byte once loses nothing by
reaching for it there: nothing is copied first, nothing lies on the card, and a captured graph may
do it too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from memfit import traced

_CHUNK_BYTES = 1 << 26
_ALIGNMENT = 512


class Arena:
    """Host memory handed out end to end and taken back all at once.

    A step takes memory layer after layer and gives it back in reverse, so when nothing is
    out any more the whole arena is free again and the next step asks the system for nothing.
    Chunks are powers of two, since torch's pinned memory is rounded up to these anyway.
    """

    def __init__(self, allocate: Callable[[int], Tensor], chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._allocate = allocate
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        self._chunk = 0
        self._used = 0
        self._out = 0

    @property
    def reserved_bytes(self) -> int:
        """All memory ever asked of the system."""
        return sum(chunk.numel() for chunk in self._chunks)

    def take(self, nbytes: int) -> Tensor:
        """So many bytes, uninitialised."""
        start = self._place(nbytes)
        self._out += 1
        self._used = start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._chunks[self._chunk][start : start + nbytes]

    def give(self) -> None:
        """One piece is back; after the last one all memory is free again."""
        self._out -= 1
        if self._out == 0:
            self._chunk = self._used = 0

    def _place(self, nbytes: int) -> int:
        """Where in the current chunk the next piece begins; moves on to one that has the room."""
        while self._chunk < len(self._chunks):
            if self._used + nbytes <= self._chunks[self._chunk].numel():
                return self._used
            self._chunk, self._used = self._chunk + 1, 0
        # A piece larger than a chunk gets one of its own.
        self._chunks.append(self._allocate(max(self._chunk_bytes, 1 << (nbytes - 1).bit_length())))
        return 0


class HostMemory:
    """Zeroed tensors for the kernels of one device; all of it is given back at once.

    They are views of a few large storages, whatever their types. `apart` gives each a storage.
    """

    def __init__(self, device: torch.device) -> None:
        self._arena = Arena(partial(_zeroed, pinned=device.type == "cuda"))

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """So many elements, zeroed."""
        if traced.device() is not None:
            return traced.hosted(torch.zeros(count, dtype=dtype, device="cpu"))
        return self._arena.take(count * dtype.itemsize).view(dtype)


def apart(tensor: Tensor) -> Tensor:
    """Returns a host tensor over the same bytes whose storage holds these bytes alone.

    torch.save writes whole storages, and refuses one that is seen as different types.
    """
    return torch.from_numpy(tensor.detach().numpy())


def _zeroed(nbytes: int, *, pinned: bool) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def give_back_unused() -> None:
    """Frees the pinned memory that torch keeps for tensors to come."""
    # The name in torch 2.13, and the one before.
    for name in ("_accelerator_emptyHostCache", "_host_emptyCache"):
        if hasattr(torch._C, name):
            getattr(torch._C, name)()
            return
