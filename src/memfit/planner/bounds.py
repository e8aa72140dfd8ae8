"""What slow kinds of plans take at least, so that most of them need not be traced."""

from __future__ import annotations

import math
from collections.abc import Sequence

from memfit.memory.cards import DeviceProfile
from memfit.planner.timing import REACH_FACTOR, UPDATE_SHARE, speeds_of
from memfit.planner.values import Price

_TWICE = 1.6
"""All but the update comes twice."""
_BUT_FOR_UPDATE = 0.8
"""Of a step that updates on the card, what is left at least where the host does it."""
_LEAST_STATE = 4
"""Two moments of a byte are read and written."""
_WEIGHTS_COST = 1.02
"""Layers' weights cross the bus twice in every micro-batch."""


def least_seconds(
    kind: str, prices: Sequence[Price], learning: int, card: DeviceProfile | None
) -> float:
    """A step of this kind, with so many parameters that learn, beside plans that have prices."""
    speeds = speeds_of(card)
    host = learning / (speeds.host_parameters_per_second * UPDATE_SHARE)
    reach = speeds.bus_bytes_per_second * REACH_FACTOR
    bus = 4 * learning / speeds.bus_bytes_per_second  # gradients of two bytes go and come back
    launched = min(
        (one.step_seconds for one in prices if not one.candidate.get("cuda_graphs")), default=0.0
    )
    least = {
        "checkpointing": lambda: _fastest(prices),
        "two_pass": lambda: _TWICE * _fastest(prices),
        "state_offload": lambda: max(_fastest(prices), _LEAST_STATE * learning / reach),
        # None of the following is captured.
        "host": lambda: max(bus, launched),
        "activation_offload": lambda: launched,
        "recomputed_and_offloaded": lambda: _launched_with("checkpointing", prices),
        # The host begins when the last gradient has come.
        "optimizer_offload": lambda: host + _BUT_FOR_UPDATE * launched,
        "hosted_weights": lambda: _WEIGHTS_COST * _launched_with("optimizer_offload", prices),
    }
    return least[kind]()


def _launched_with(name: str, prices: Sequence[Price]) -> float:
    return _fastest(
        [one for one in prices if one.candidate.get(name) and not one.candidate.get("cuda_graphs")]
    )


def _fastest(prices: Sequence[Price]) -> float:
    """Infinite where there are none: of a kind that was slow enough to be left out."""
    return min((one.step_seconds for one in prices), default=math.inf)
