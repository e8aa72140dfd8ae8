"""Padding-free packing: texts one after another, attention kept within each.

A padded batch computes on every padding token; a packed one on none. Both give the same
logits and gradients (tests/contract/test_packing_equals_padded.py), so this is `exact`.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.packing import can_pack, packed
from memfit.strategies.base import Fidelity, Setup, Strategy


@dataclass(frozen=True, slots=True)
class Packing(Strategy):
    """Micro-batches are packed by the attention mask before they go to the device."""

    name = "packing"
    reason = "padding is computed and stored like text; packed batches have none"
    shrinks = ("activations", "time")

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def unavailable(self, setup: Setup) -> str:
        support = can_pack(setup.model)
        return "" if support.ok else support.reason

    def change(self, setup: Setup) -> None:
        setup.packing = packed(setup.model)
        setup.undo.append(setup.packing.remove)
