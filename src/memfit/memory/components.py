"""Where training memory goes: one vocabulary for predictions, measurements and traces.

The tracer writes these, from fake or real tensors; the allocator model reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from memfit.i18n import N_


class Component(StrEnum):
    """What a byte of device memory is for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    WORKSPACE = "workspace"
    CONTEXT = "context"


COMPONENT_NAMES: Mapping[str, str] = {
    "weights": N_("weights"),
    "gradients": N_("gradients"),
    "optimizer": N_("optimizer"),
    "activations": N_("activations"),
    "workspace": N_("workspace"),
    "context": N_("context"),
}
"""What a reader calls each component."""


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The moment of the highest use, by component.

    Components other than the context add up to `allocated_bytes`; the device holds
    the reserved bytes and the context.
    """

    components: Mapping[Component, int]
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    module: str = ""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MemoryPeak:
        """Reads a peak back that was written as a dictionary of its fields."""
        parts = {Component(name): int(size) for name, size in values["components"].items()}
        return cls(**{**values, "components": parts})

    @property
    def held_bytes(self) -> int:
        """What the process holds on the card.

        A budget must allow `device_bytes`, which may be more: before the allocator maps a page,
        there must be room for the whole segment that the page belongs to.
        """
        return self.reserved_bytes + self.components.get(Component.CONTEXT, 0)


class Event(NamedTuple):
    """One storage is born or dies.

    `block` names the storage: its birth and its death carry the same number.
    `nbytes` is what the tensor asked for; rounding is the allocator's business.
    """

    block: int
    nbytes: int
    birth: bool
    component: Component
    module: str = ""
