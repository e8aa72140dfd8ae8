"""What a trace writes down: every storage's birth and death, in order.

The tracer writes these, from fake or real tensors; the allocator model reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.memory.components import Component


@dataclass(frozen=True, slots=True)
class Event:
    """One storage is born or dies.

    `block` names the storage: its birth and its death carry the same number.
    `nbytes` is what the tensor asked for; rounding is the allocator's business.
    """

    block: int
    nbytes: int
    birth: bool
    component: Component
    module: str = ""


def peak_allocated_bytes(events: list[Event], *, rounding: int = 512) -> int:
    """The largest sum of live blocks, each rounded up as the CUDA allocator does."""
    now = peak = 0
    for event in events:
        size = -(-event.nbytes // rounding) * rounding
        if event.birth:
            now += size
            peak = max(peak, now)
        else:
            now -= size
    return peak
