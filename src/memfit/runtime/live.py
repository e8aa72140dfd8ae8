"""Strategies that come and go while a run trains: recomputation and offload of activations.

Both are exact, so a step may have them and the next may not.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from memfit.strategies._layers import stack_of, stack_problem
from memfit.strategies.activation_offload import ActivationOffload
from memfit.strategies.checkpointing import Checkpointing

if TYPE_CHECKING:
    from memfit.runtime.ways import Way
    from memfit.strategies import Setup


class LiveStrategies:
    """What a set-up recomputes and offloads, changed between two steps."""

    def __init__(self, setup: Setup, used: frozenset[str]) -> None:
        self._setup = setup
        self._used = used
        self._offload: tuple[int, int] | None = None

    @property
    def recomputed(self) -> int:
        """The layers that are recomputed now."""
        turns = self._setup.recomputed
        return 0 if turns is None else min(turns.limit, self.depth)

    @functools.cached_property
    def depth(self) -> int:
        """The layers that could be; none where that cannot be changed here."""
        setup = self._setup
        if setup.recomputed is None and not self._may_recompute():
            return 0
        return 0 if stack_problem(setup.model, None) else stack_of(setup.model).depth

    @property
    def offloads(self) -> bool:
        """Whether activations could be offloaded beside what is used."""
        taken = {"activation_offload", "cuda_graphs", "optimizer_offload"}
        return not (self._used & taken or ActivationOffload().unavailable(self._setup))

    def apply(self, way: Way) -> bool:
        """Have it this way from the next step on; whether anything changed."""
        changed = False
        if way.recomputed != self.recomputed and self.depth:
            if self._setup.recomputed is None:
                Checkpointing().apply(self._setup)
            assert self._setup.recomputed is not None
            self._setup.recomputed.limit = way.recomputed
            changed = True
        if way.offloaded and self._offload is None and self.offloads:
            self._add_offload()
            changed = True
        elif not way.offloaded and self._offload is not None:
            self._remove_offload()
            changed = True
        return changed

    def _may_recompute(self) -> bool:
        # These wrap the layers themselves, and recomputation belongs inside of them.
        if self._used & {"activation_offload", "optimizer_offload", "frozen_features"}:
            return False
        return not Checkpointing().unavailable(self._setup)

    def _add_offload(self) -> None:
        before = len(self._setup.undo), len(self._setup.around_micro_batch)
        ActivationOffload().apply(self._setup)
        self._offload = before

    def _remove_offload(self) -> None:
        assert self._offload is not None
        undone, around = self._offload
        while len(self._setup.undo) > undone:
            self._setup.undo.pop()()
        del self._setup.around_micro_batch[around:]
        self._offload = None
