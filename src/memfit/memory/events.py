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
