"""Why strategies cannot be used for a task on a card, asked of the strategies themselves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit import traced
from memfit.errors import ConfigError, ModelError
from memfit.memory.cards import DeviceProfile
from memfit.memory.models import empty_like, materialize
from memfit.planner.trace_setup import ON_META, apply_one, build_model, make_setup, traced_device
from memfit.planner.values import Workload
from memfit.strategies import Setup, Strategy
from memfit.traced import TracedDevice


@dataclass(frozen=True)
class _Unwatched:
    """A trace that follows nothing."""

    device: TracedDevice

    def hosted(self, tensor: Tensor) -> None:
        """Nobody counts."""

    def on_host(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def resized(self, tensor: Tensor) -> None:
        """Nobody counts."""

    def alike(self, key: Hashable, run: Callable[[], None], times: int) -> None:
        """No step is run."""


def first_objection(
    workload: Workload, card: DeviceProfile | None, config: Any, strategies: Sequence[Strategy]
) -> str:
    """The first sentence against one of them, each asked after those before it were applied."""
    setup = make_setup(workload, build_model(workload, config), card)
    early = [one for one in strategies if one.name in ON_META]
    if reason := _objection(early, setup):
        return reason
    with FakeTensorMode(), traced.tracing(_Unwatched(traced_device(card))):
        materialize(setup.model, empty_like)
        return _objection([one for one in strategies if one.name not in ON_META], setup)


def _objection(strategies: Sequence[Strategy], setup: Setup) -> str:
    for strategy in strategies:
        try:
            apply_one(strategy, setup)
        except (ConfigError, ModelError) as error:
            return error.reason
    return ""
