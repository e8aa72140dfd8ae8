"""A model of PyTorch's CUDA caching allocator: what it reserves for births and deaths in order.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11), for one stream and the
default settings: requests are rounded up to 512 bytes; up to 1 MiB they come from segments of
2 MiB, beyond that from segments of 20 MiB or, from 10 MiB on, of their own size rounded up to
2 MiB; the smallest free block that fits is taken, the one at the lowest address among equals; what
is left of it is split off unless it is too small to be of use; neighbours join when freed; and
segments go back to the driver only when they are released. (The real allocator also releases them
when the driver refuses another one. A plan has no room for that: it must fit without.)

With `expandable_segments` each pool is one range of addresses, of which pages are mapped as needed.
A process that is held to a part of the card is asked more there: before a page is mapped, the whole
segment that the request would have taken otherwise must have room (`asked_bytes`).

Packed batches are of another size every step. With fixed segments each new size leaves gaps that
the next does not fit into (a tenth of an fp32 run's memory, measured); segments of mapped pages
grow and shrink instead. Linux only, and not where the user said otherwise.
"""

from __future__ import annotations

import contextlib
import os
import sys
from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Any

from memfit.units import MIB

ROUND_BYTES = 512
SMALL_REQUEST_BYTES = 1 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_FROM_BYTES = 10 * MIB
ROUND_SEGMENT_BYTES = 2 * MIB

# The address space of one expandable segment; larger than any card.
_RANGE_BYTES = 2**50
_LARGE_FROM = 2 * _RANGE_BYTES


def round_request(nbytes: int) -> int:
    """The size of the block a request asks for."""
    return max(ROUND_BYTES, -(-nbytes // ROUND_BYTES) * ROUND_BYTES)


def segment_bytes(size: int) -> int:
    """What the driver is asked for when no free block fits a (rounded) request."""
    if size <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_FROM_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_SEGMENT_BYTES) * ROUND_SEGMENT_BYTES


class Block:
    """A piece of a segment; its neighbours are the pieces before and after it."""

    __slots__ = ("address", "free", "mapped", "next", "previous", "size")

    def __init__(self, address: int, size: int, *, mapped: bool = True) -> None:
        self.address = address
        self.size = size
        self.free = True
        self.mapped = mapped
        self.previous: Block | None = None
        self.next: Block | None = None

    def insert_after(self, block: Block) -> None:
        """Puts `block` between this one and the next."""
        block.previous, block.next = self, self.next
        if self.next is not None:
            self.next.previous = block
        self.next = block

    @property
    def whole(self) -> bool:
        """Whether the block is all of its segment."""
        return self.previous is None and self.next is None


class Pool:
    """The free blocks of one kind, smallest first, and the segments they are cut from."""

    def __init__(self, *, small: bool, address: int) -> None:
        self.reserved_bytes = 0
        self._least_rest = ROUND_BYTES if small else SMALL_REQUEST_BYTES + 1
        """The smallest rest worth a block of its own."""
        # The driver hands out addresses from the top down: the newest segment is the lowest.
        self._lowest_address = address + _RANGE_BYTES
        self._free: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}

    def take(self, size: int) -> Block | None:
        """The best free block for `size`, cut to it; None when no free block fits."""
        place = self._best(size)
        if place == len(self._free):
            return None
        block = self._blocks[self._free.pop(place)[1]]
        block.free = False
        rest_bytes = block.size - size
        if rest_bytes >= self._least_rest:
            self._cut(block, size)
        return block

    def give(self, block: Block) -> None:
        """Frees a block and joins it with free neighbours."""
        block.free = True
        self._insert(self._join(block))

    def grow(self, size: int) -> None:
        """A new segment for a request of `size`."""
        nbytes = segment_bytes(size)
        self._lowest_address -= nbytes
        block = Block(self._lowest_address, nbytes)
        self._blocks[block.address] = block
        self.reserved_bytes += nbytes
        self._insert(block)

    def release(self) -> None:
        """Gives every segment that is wholly free back to the driver."""
        for size, address in list(self._free):
            if self._blocks[address].whole:
                self._free.remove((size, address))
                del self._blocks[address]
                self.reserved_bytes -= size

    def _best(self, size: int) -> int:
        return bisect_left(self._free, (size, 0))

    def _cut(self, block: Block, size: int, *, mapped: bool = True) -> Block:
        """Leaves `size` bytes of the block; the rest becomes a block, free if it is mapped."""
        rest = Block(block.address + size, block.size - size, mapped=mapped)
        block.size = size
        block.insert_after(rest)
        self._blocks[rest.address] = rest
        if mapped:
            self._insert(rest)
        return rest

    def _insert(self, block: Block) -> None:
        insort(self._free, (block.size, block.address))

    def _remove(self, block: Block) -> None:
        del self._free[bisect_left(self._free, (block.size, block.address))]

    def _join(self, block: Block) -> Block:
        """One block of `block` and its free neighbours, which leave the free list."""
        before, after = block.previous, block.next
        if after is not None and after.free and after.mapped:
            self._remove(after)
            self._swallow(block, after)
        if before is not None and before.free and before.mapped:
            self._remove(before)
            self._swallow(before, block)
            return before
        return block

    def _swallow(self, block: Block, after: Block) -> None:
        del self._blocks[after.address]
        block.size += after.size
        block.next = after.next
        if after.next is not None:
            after.next.previous = block


class ExpandablePool(Pool):
    """One range of addresses; pages of it are mapped at the lowest place that takes a request."""

    def __init__(self, *, small: bool, address: int) -> None:
        super().__init__(small=small, address=address)
        self._least_rest = ROUND_BYTES
        self._start = address
        self._page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        first = Block(address, _RANGE_BYTES, mapped=False)
        self._blocks[address] = first
        self._unmapped = [address]

    def grow(self, size: int) -> None:
        """Maps pages until `size` fits in one block."""
        block = self._lowest(size)
        if not block.mapped:
            block = self._map(block, size)
        while block.size < size:
            assert block.next is not None  # the range never ends
            block = self._map(block.next, size - block.size)

    def release(self) -> None:
        """Unmaps every page that lies wholly in a free block."""
        for _, address in list(self._free):
            block = self._blocks[address]
            first = -(-(address - self._start) // self._page_bytes)
            last = (address + block.size - self._start) // self._page_bytes
            if last > first:
                self._unmap(block, first * self._page_bytes, last * self._page_bytes)

    def _best(self, size: int) -> int:
        """A block that can still grow counts as large as it can grow, and is taken last."""
        place = super()._best(size)
        last = len(self._free) - 1
        while place < last:
            reach = self._reach(place)
            if reach == self._free[place][0] or self._reach(place + 1) >= reach:
                break
            place += 1
        return place

    def _reach(self, place: int) -> int:
        """The size the block has once the unmapped bytes after it are mapped."""
        block = self._blocks[self._free[place][1]]
        after = block.next
        return block.size + (after.size if after is not None and not after.mapped else 0)

    def _lowest(self, size: int) -> Block:
        """The first block from which `size` bytes are free or can be mapped."""
        for address in self._unmapped:
            block = self._blocks[address]
            before = block.previous
            start = before if before is not None and before.free else block
            room = 0
            after: Block | None = start
            while room < size and after is not None and after.free:
                room, after = room + after.size, after.next
            if room >= size:
                return start
        raise AssertionError("the last unmapped block takes any request")

    def _map(self, block: Block, size: int) -> Block:
        """Maps the pages that `size` bytes from the start of an unmapped block need."""
        nbytes = min(-(-size // self._page_bytes) * self._page_bytes, block.size)
        self._unmapped.remove(block.address)
        if nbytes < block.size:
            insort(self._unmapped, self._cut(block, nbytes, mapped=False).address)
        block.mapped = True
        self.reserved_bytes += nbytes
        joined = self._join(block)
        self._insert(joined)
        return joined

    def _unmap(self, block: Block, begin: int, end: int) -> None:
        """Gives the pages from `begin` to `end` (from the range's start) back."""
        self._remove(block)
        begin, end = self._start + begin, self._start + end
        if begin > block.address:
            hole = self._cut(block, begin - block.address, mapped=False)
            self._insert(block)
            block = hole
        if end < block.address + block.size:
            self._cut(block, end - block.address)
        self.reserved_bytes -= block.size
        block.mapped = False
        before, after = block.previous, block.next
        if after is not None and not after.mapped:
            self._unmapped.remove(after.address)
            self._swallow(block, after)
        if before is not None and not before.mapped:
            self._swallow(before, block)
        else:
            insort(self._unmapped, block.address)


class Allocator:
    """The state between two requests.

    `allocated_bytes` is what `torch.cuda.memory_allocated` would say: it counts whole blocks, and
    a block is more than the request where the rest of it was too small to be split off.
    """

    def __init__(self, *, expandable_segments: bool = False) -> None:
        kind = ExpandablePool if expandable_segments else Pool
        self.small = kind(small=True, address=0)
        self.large = kind(small=False, address=_LARGE_FROM)
        self.allocated_bytes = 0
        self.asked_bytes = 0
        """What the last request needed to be allowed: all that was reserved, and its segment."""

    @property
    def reserved_bytes(self) -> int:
        """What the driver has handed out."""
        return self.small.reserved_bytes + self.large.reserved_bytes

    def allocate(self, nbytes: int) -> Block:
        """A block for `nbytes`."""
        size = round_request(nbytes)
        pool = self.small if size <= SMALL_REQUEST_BYTES else self.large
        block = pool.take(size)
        self.asked_bytes = self.reserved_bytes
        if block is None:
            self.asked_bytes += segment_bytes(size)
            pool.grow(size)
            block = pool.take(size)
            assert block is not None  # the pool has just grown for it
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block) -> None:
        """Puts a block back among the free ones."""
        self.allocated_bytes -= block.size
        (self.small if block.address < _LARGE_FROM else self.large).give(block)

    def release(self) -> None:
        """`torch.cuda.empty_cache`: what is wholly unused goes back to the driver."""
        self.large.release()
        self.small.release()


_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def segments_expand(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether memfit's runs have them on a CUDA card."""
    said = ",".join(environment.get(name, "") for name in _VARIABLES)
    return sys.platform == "linux" and "expandable_segments:False" not in said


def use_expandable_segments() -> None:
    """From the next segment on; before the model is moved, so that all of it has them."""
    if not segments_expand():
        return
    import torch

    settings: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    with contextlib.suppress(RuntimeError):  # a driver without virtual memory management
        (settings or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
