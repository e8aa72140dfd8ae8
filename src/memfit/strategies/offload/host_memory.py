"""Pinned host memory, and the copies between it and the device beside the computation.

Pinned memory has one address for both sides. A kernel that uses every byte once loses nothing by
reaching for it there: nothing is copied first, nothing lies on the card, and a captured graph may
do it too.

All copies of a link run on one side stream, in the order they are asked for. Nothing waits on
the CPU and no tensor is `record_stream`ed: memory that a copy reads or writes is held until the
computing stream itself has waited for that copy, so the allocator may reuse it at once and the
peak is the same in every run. The waits are also what a CUDA graph captures as its edges.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from memfit.memory.tracing import traced_device

_CHUNK_BYTES = 1 << 26

ALIGNMENT_BYTES = 512
"""As the CUDA allocator aligns tensors: a matrix product may choose its kernel by it."""


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
        """Returns uninitialised bytes."""
        start = self._place(nbytes)
        self._out += 1
        self._used = start + -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
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
        """Returns zeroed elements."""
        if traced_device.device() is not None:
            return traced_device.hosted(torch.zeros(count, dtype=dtype, device="cpu"))
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


class Link(Protocol):
    """How bytes travel; a `mark` is a point in the order of the copies."""

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Host memory for this many elements; it belongs to the link until `give`."""

    def give(self) -> None:
        """One tensor that was taken is not needed any more."""

    def follow(self) -> None:
        """Copies from here on come after everything that is queued for computing now."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queues a copy; both tensors must live until a stream has waited for it."""

    def mark(self) -> Any:
        """The point after all copies queued so far."""

    def wait(self, mark: Any) -> None:
        """What is computed from here on comes after that point."""

    def finish(self, mark: Any) -> None:
        """The CPU waits until the copies before that point are done."""


class PlainLink:
    """Copies at once, within one memory: a CPU's, or that of a trace over fake tensors.

    `on_host` is told of every tensor that would lie in host memory on a real device.
    """

    def __init__(self, on_host: Callable[[Tensor], Any] | None = None) -> None:
        self._on_host = on_host

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        taken = torch.empty(count, dtype=dtype)
        if self._on_host is not None:
            self._on_host(taken)
        return taken

    def give(self) -> None:
        pass

    def follow(self) -> None:
        pass

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        pass

    def finish(self, mark: Any) -> None:
        pass


class CudaLink:
    """Copies to and from pinned memory on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._arena = Arena(lambda n: torch.empty(n, dtype=torch.uint8, pin_memory=True))

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        return self._arena.take(count * dtype.itemsize).view(dtype)

    def give(self) -> None:
        # Only copies of this link touch the arena, one after another: memory given back while
        # a copy out of it is still queued is written by a later copy only.
        self._arena.give()

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self, mark: Any) -> None:
        mark.synchronize()


def link_to(device: torch.device) -> Link:
    """The link between a device and the host."""
    if traced_device.device() is not None:
        return PlainLink(traced_device.hosted)
    return CudaLink(device) if device.type == "cuda" else PlainLink()


class Staging:
    """A few pinned slots through which tensors of any size travel, piece by piece, both ways.

    The order is kept: a slot is used again when what travelled in it has arrived, and what
    waits on the device for its turn is never more than the slots hold.
    """

    def __init__(self, link: Link, slot_bytes: int = 1 << 24, slots: int = 4) -> None:
        self._link = link
        self._slots = [_Slot(link.take(slot_bytes, torch.uint8)) for _ in range(slots)]
        self._next = 0

    def down(self, source: Tensor, deliver: Callable[[int, Tensor], None]) -> None:
        """Send a flat device tensor; `deliver` gets each piece and where it begins, on the CPU."""
        for start, piece in self._pieces(source):
            slot = self._free_slot()
            landed = slot.view(piece)
            self._link.follow()
            self._link.copy(landed, piece)
            slot.travels(self._link.mark(), piece, partial(deliver, start, landed))

    def up(self, source: Tensor, target: Tensor) -> None:
        """Send a flat CPU tensor into a flat device tensor, in the precision of the latter."""
        for start, piece in self._pieces(target):
            slot = self._free_slot()
            loaded = slot.view(piece).copy_(source[start : start + piece.numel()])
            self._link.follow()
            self._link.copy(piece, loaded)
            slot.travels(self._link.mark(), piece, None)

    def flush(self) -> None:
        """The CPU waits until everything has arrived and was delivered."""
        for _ in self._slots:
            self._free_slot()

    def _pieces(self, tensor: Tensor) -> list[tuple[int, Tensor]]:
        count = self._slots[0].buffer.numel() // tensor.itemsize
        return [(i, tensor[i : i + count]) for i in range(0, tensor.numel(), count)]

    def _free_slot(self) -> _Slot:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.arrive(self._link)
        return slot


class _Slot:
    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._mark: Any = None
        self._held: Tensor | None = None
        self._deliver: Callable[[], None] | None = None

    def view(self, like: Tensor) -> Tensor:
        return self.buffer[: like.nbytes].view(like.dtype)

    def travels(self, mark: Any, held: Tensor, deliver: Callable[[], None] | None) -> None:
        self._mark, self._held, self._deliver = mark, held, deliver

    def arrive(self, link: Link) -> None:
        if self._held is None:
            return
        link.finish(self._mark)
        if self._deliver is not None:
            self._deliver()
        self._mark = self._held = self._deliver = None
