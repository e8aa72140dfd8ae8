"""Small cuBLAS workspaces: on Hopper torch gives each of two handles 32 MiB of scratch memory.

Products of a classifier's size run as fast in 8 MiB, where older cards have always been; what
changes is which algorithm cuBLAS picks, so sums may round differently. The setting is an
environment variable that torch parses anew before every product it launches, which takes longer
than the launch; products that graphs replay cost nothing. So the planner has it beside graphs, and
elsewhere where the memory is needed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from memfit.memory.workspace import drop_workspaces
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
        if setup.card is None:  # else this process has nothing to do with that card
            setup.around_training.append(_small_workspaces)


@contextlib.contextmanager
def _small_workspaces() -> Iterator[None]:
    """For one training: whatever else the process does launches its products as ever.

    Torch tells cuBLAS the size it reads now, whatever the size of the workspace it has: one made
    under the small setting would be written to far beyond its end under the large one.
    """
    if _VARIABLE in os.environ:  # whoever set it, to the same, keeps it
        drop_workspaces()
        yield
        return
    os.environ[_VARIABLE] = _SMALL
    drop_workspaces()
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        with contextlib.suppress(RuntimeError):  # of a card that no longer answers
            drop_workspaces()
