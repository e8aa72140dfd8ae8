"""Small cuBLAS workspaces: on Hopper torch gives each of two handles 32 MiB of scratch memory.

Products of a classifier's size run as fast in 8 MiB, where older cards have always been; what
changes is which algorithm cuBLAS picks, so sums may round differently. The setting is an
environment variable that torch parses anew before every product it launches, which takes longer
than the launch; products that graphs replay cost nothing. So the planner has it beside graphs, and
elsewhere where the memory is needed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from memfit.i18n import N_, Message
from memfit.memory.cuda_context import (
    LARGE_WORKSPACE_FROM,
    SMALL,
    VARIABLE,
    small_workspaces,
)
from memfit.strategies.base import Fidelity, PlanFigures, Setup, Strategy


@dataclass(frozen=True, slots=True)
class SmallWorkspace(Strategy):
    """The workspace older cards get, on cards where the default is four times as large."""

    name = "small_workspace"
    title = N_("small workspaces")
    reason = "some 50 MiB of scratch memory that small products do not need"
    shrinks = ("workspace",)

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def explain(self, plan: PlanFigures) -> str:  # noqa: ARG002
        return Message("cuBLAS gets small workspaces, which these products do not need larger")

    def unavailable(self, setup: Setup) -> str:
        if setup.device_type != "cuda":
            return Message("a {device} has no cuBLAS", device=setup.device_type)
        if os.environ.get(VARIABLE, SMALL) != SMALL:
            return Message("you set {variable} yourself", variable=VARIABLE)
        if setup.capability < LARGE_WORKSPACE_FROM:
            return Message("this card's workspace is small already")
        return ""

    def change(self, setup: Setup) -> None:
        if setup.card is None:  # else this process has nothing to do with that card
            setup.around_training.append(small_workspaces)
