"""Small cuBLAS workspaces: on Hopper torch gives each of two handles 32 MiB of scratch memory.

Products of a classifier's size run as fast in 8 MiB, where older cards have always been; what
changes is which algorithm cuBLAS picks, so sums may round differently. The setting is an
environment variable that torch parses anew before every product it launches, some 60 to 170
microseconds each time (benchmarks/results/step_time_h200.json); products that graphs replay cost
nothing. So the planner has it beside graphs, and elsewhere where the memory is needed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from memfit.strategies.base import Fidelity, Setup, Strategy

_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_SMALL = ":4096:2:16:8"
SETTING = {_VARIABLE: _SMALL}
"""What it puts into the environment."""
_LARGE_FROM = (9, 0)


@dataclass(frozen=True, slots=True)
class SmallWorkspace(Strategy):
    """The workspace older cards get, on cards where the default is four times as large."""

    name = "small_workspace"
    reason = "some 50 MiB of scratch memory that small products do not need"
    shrinks = ("workspace",)

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def unavailable(self, setup: Setup) -> str:
        if setup.device_type != "cuda":
            return f"a {setup.device_type} has no cuBLAS"
        if os.environ.get(_VARIABLE, _SMALL) != _SMALL:
            return f"you set {_VARIABLE} yourself"
        if setup.capability < _LARGE_FROM:
            return "this card's workspace is small already"
        return ""

    def change(self, setup: Setup) -> None:
        if setup.card is not None:
            return  # this process has nothing to do with that card
        if _VARIABLE not in os.environ:  # whoever set it, to the same, keeps it
            setup.undo.append(_unset)
        os.environ[_VARIABLE] = _SMALL
        _drop_workspaces()


def _unset() -> None:
    if os.environ.pop(_VARIABLE, None) is not None:
        _drop_workspaces()


def _drop_workspaces() -> None:
    """Torch tells cuBLAS the size it reads now, whatever the size of the workspace it has.

    One made under the small setting would be written to far beyond its end under the large one.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
