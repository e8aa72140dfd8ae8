"""State offload: the low-bit optimizer's state lies in host memory, and the update reaches for it.

On the card remain the weights and what a step makes. The update runs there as before, reads two or
three bytes a parameter across the bus and writes as many back; with `gradients`, those that are
added up in 8 bits wait there, too. The numbers are the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.strategies.base import Fidelity, Setup, Strategy, host_shortage
from memfit.text import N_, Message

_STATE_BYTES = 3
"""A parameter's correction and two moments."""


@dataclass(frozen=True, slots=True)
class StateOffload(Strategy):
    """The low-bit optimizer's state in pinned host memory, used in place."""

    name = "state_offload"
    title = N_("state offload")
    reason = "the low-bit optimizer's state lies in the computer's own memory, not on the card"
    shrinks = ("optimizer", "gradients")
    conflicts = frozenset({"optimizer_offload", "small_state_optimizer"})

    gradients: bool = False
    """Gradients of eight bits (kept8) wait there, too."""

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def unavailable(self, setup: Setup) -> str:
        if setup.device_type != "cuda":
            return Message(
                "on a {device} device the state is in host memory already", device=setup.device_type
            )
        if setup.make_optimizer is None:
            return Message(
                "it needs the low-bit optimizer, whose state is small enough to cross the bus"
            )
        if reason := setup.lacks_triton:
            return reason
        if self.gradients and getattr(setup.make_sink, "name", "") != "kept8":
            return Message("only gradients of eight bits can be added up there; take kept8")
        # What the host of a card that is not here has free is the planner's to ask.
        if setup.card is not None:
            return ""
        learning = sum(p.numel() for p in setup.model.parameters() if p.requires_grad)
        return host_shortage((_STATE_BYTES + self.gradients) * learning)

    def change(self, setup: Setup) -> None:
        setup.state_on_host = True
        setup.gradients_on_host = self.gradients
