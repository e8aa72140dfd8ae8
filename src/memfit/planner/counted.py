"""What a step does at any depth, size and number of micro-batches, from a few traced steps.

Counts are vectors here, in the order of StepCounts' fields: thousands of steps are composed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.memory.counts import StepCounts

Counts = NDArray[np.float64]
FIELDS = tuple(field.name for field in dataclasses.fields(StepCounts))
_GROWS = np.array(["flops" in name or "bytes" in name for name in FIELDS])
_ATTENTION = np.array(["attention" in name for name in FIELDS])
_ACCUMULATED_BYTES = 3
"""Adding a gradient to the one before it: two are read, one is written."""


def vector(counts: StepCounts) -> Counts:
    """Counts as numbers in a row."""
    return np.array([float(getattr(counts, name)) for name in FIELDS])


def counts_of(values: Counts) -> StepCounts:
    """A row of numbers as counts."""
    return StepCounts(**dict(zip(FIELDS, values.tolist(), strict=True)))


def zero() -> Counts:
    """Nothing is done."""
    return np.zeros(len(FIELDS))


@dataclass(frozen=True)
class Counted:
    """One part of a step as a line in the tokens: what it does at none, and for each."""

    constant: Counts
    slope: Counts

    @classmethod
    def through(cls, first: Counts, second: Counts, tokens: tuple[int, int]) -> Counted:
        """The line through what was counted at two numbers of tokens."""
        if tokens[0] == tokens[1]:  # one row of one token: all that can grow does
            return cls(np.where(_GROWS, 0.0, first), np.where(_GROWS, first / tokens[0], 0.0))
        slope = (second - first) / (tokens[1] - tokens[0])
        return cls(first - slope * tokens[0], slope)

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.constant + other.constant, self.slope + other.slope)

    def __mul__(self, factor: float) -> Counted:
        return Counted(self.constant * factor, self.slope * factor)

    def at(self, micro_batches: float, tokens: float) -> Counts:
        """Of so many micro-batches with so many tokens together."""
        return self.constant * micro_batches + self.slope * tokens

    def like(self, counts: Counts, tokens: int) -> Counted:
        """Something else that was counted at one number of tokens and grows as this does."""
        whole = self.at(1, tokens)
        share = np.where(_GROWS, 0.0, 1.0)
        np.divide(self.constant, whole, out=share, where=whole != 0)
        share = share.clip(0.0, 1.0)
        return Counted(counts * share, counts * (1 - share) / tokens)


def without_attention(counts: Counts) -> Counts:
    """All but attention's own arithmetic, which depends on the lengths and not on their sum."""
    return np.where(_ATTENTION, 0.0, counts)


def attention_of(counts: Counts, pairs: float) -> Counts:
    """Attention's arithmetic for each pair of a token and one it attends to."""
    return np.where(_ATTENTION, counts, 0.0) / pairs


def accumulated(parameters: float, gradient_bytes: float, tensors: float) -> Counts:
    """What a further micro-batch adds where gradients are kept in `.grad`."""
    moved = _ACCUMULATED_BYTES * gradient_bytes * parameters
    return vector(StepCounts(bytes_moved=moved, launches=tensors))


def replayed(counts: Counts) -> Counts:
    """The same step from graphs."""
    return vector(counts_of(counts).as_graphs())
