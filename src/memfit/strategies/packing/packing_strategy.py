"""Padding-free packing: texts one after another, attention kept within each.

A padded batch computes on every padding token; a packed one on none. Both give the same
logits and gradients (tests/contract/test_packing_equals_padded.py), so this is `exact`.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.i18n import N_, Message
from memfit.models.layer_stack import shows_tokens
from memfit.strategies.base import Fidelity, PlanFigures, Setup, Strategy
from memfit.strategies.packing.packed_model import PackedModel, packing_problem
from memfit.units import percent


@dataclass(frozen=True, slots=True)
class Packing(Strategy):
    """Micro-batches are packed by the attention mask before they go to the device.

    Batches that are padded on the left, or between tokens, stay padded: what the model makes of
    them depends on it. A `compute_loss` of the user's own is handed padded batches, which are
    packed inside the model.
    """

    name = "packing"
    title = N_("packing")
    reason = "padding is computed and stored like text; packed batches have none"
    shrinks = ("activations", "time")

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def explain(self, plan: PlanFigures) -> str:
        return Message(
            "texts are packed without padding, which would be {share} of every batch",
            share=percent(plan.padding_share()),
        )

    def unavailable(self, setup: Setup) -> str:
        if shown := shows_tokens(setup.model):
            return Message(
                "{shown}=True in its config asks for one entry a token, padding included",
                shown=shown,
            )
        return packing_problem(setup.model)

    def change(self, setup: Setup) -> None:
        setup.packing = packing = PackedModel(setup.model)

        def undo() -> None:
            packing.remove()
            setup.packing = None

        setup.undo.append(undo)
        if setup.sees_inputs:
            packing.pack_inside()
