"""State offload: the low-bit optimizer's state lies in host memory, and the update reaches for it.

On the card remain the weights and what a step makes. The update runs there as before, reads two or
three bytes a parameter across the bus and writes as many back; with `gradients`, those that are
added up in 8 bits wait there, too. The numbers are the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.i18n import N_, Message, t
from memfit.strategies.base import Fidelity, PlanFigures, Setup, Strategy, host_shortage
from memfit.strategies.lowbit.gradient_sinks import KeptInt8
from memfit.units import gb

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

    def in_words(self) -> str:
        if self.gradients:
            return t("the optimizer's state and gradients in host memory")
        return t("the optimizer's state in host memory")

    def explain(self, plan: PlanFigures) -> str:
        fields = {**plan.saves(self), "host": gb(plan.host_bytes)}
        if self.gradients:
            return Message(
                "the optimizer's state and the 8-bit gradients lie in host memory, "
                "{host} there, where the card reads and writes them: saves {saved}, "
                "costs {cost} of the step",
                **fields,
            )
        return Message(
            "the optimizer's state lies in host memory, {host} there, where the "
            "card's update reads and writes it: saves {saved}, costs {cost} of the "
            "step",
            **fields,
        )

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
        if self.gradients and setup.make_sink is not KeptInt8:
            return Message("only gradients of eight bits can be added up there; take kept8")
        # What the host of a card that is not here has free is the planner's to ask.
        if setup.card is not None:
            return ""
        learning = sum(p.numel() for p in setup.model.parameters() if p.requires_grad)
        return host_shortage((_STATE_BYTES + self.gradients) * learning)

    def change(self, setup: Setup) -> None:
        setup.state_on_host = True
        setup.gradients_on_host = self.gradients
