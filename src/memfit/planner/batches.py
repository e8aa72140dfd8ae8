"""What effective batches look like: how many tokens they have, and into how many parts they fall.

Memory is planned for the worst batch the shuffle can draw, time for an average one. Both come
from the data's own lengths.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from memfit.runtime.batching import MicroBatching, group_rows
from memfit.strategies import Strategy, Truncation

if TYPE_CHECKING:
    from memfit.planner.values import Workload

_SAMPLED_BATCHES = 64


@dataclass(frozen=True, slots=True)
class Cutting:
    """How effective batches are cut under one limit."""

    micro_batches: float
    """Parts of an average effective batch."""
    tokens: float
    """Tokens of an average effective batch on the device, padding included."""
    worst_tokens: int
    """The most tokens that are on the device at once."""
    worst_part_tokens: int
    """The same of a batch that is cut: packed parts are even, and so not as large as may be."""
    worst_micro_batches: int
    """Parts of the largest effective batch."""
    pairs: float
    """Pairs of a token and one it attends to, in an average effective batch."""


class Batches:
    """Effective batches drawn from the rows of a dataset, always the same ones."""

    def __init__(self, lengths: Sequence[int], effective_rows: int) -> None:
        self._lengths = tuple(lengths)
        self._rows = min(effective_rows, len(self._lengths))
        draw = random.Random(0)
        self._sampled = [
            draw.sample(self._lengths, self._rows)
            if len(self._lengths) > self._rows
            else list(self._lengths)
            for _ in range(_SAMPLED_BATCHES if len(self._lengths) > self._rows else 1)
        ]
        self._worst = sorted(self._lengths, reverse=True)[: self._rows]
        self._cut = cache(self._measure)
        self._evaluated = cache(self._most_evaluated)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest row."""
        return self._worst[0]

    @property
    def worst_tokens(self) -> int:
        """Tokens of the largest effective batch, without padding."""
        return sum(self._worst)

    def usual_most_tokens(self) -> int:
        """More than most batches have: the largest of those sampled, and a little."""
        return min(round(1.02 * max(map(sum, self._sampled))), self.worst_tokens)

    def padding_share(self) -> float:
        """The share of a padded batch that is padding."""
        padded = sum(len(rows) * max(rows) for rows in self._sampled)
        return 1 - sum(map(sum, self._sampled)) / padded

    def cut(self, limits: MicroBatching, *, packed: bool) -> Cutting:
        """What these limits make of the batches."""
        return self._cut(limits, packed)

    def _measure(self, limits: MicroBatching, packed: bool) -> Cutting:
        parts = [self._parts(rows, limits, packed) for rows in self._sampled]
        worst = self._parts(self._worst, limits, packed)
        most = self._most(limits, packed)
        even = (self.worst_tokens + self.longest_tokens) // 2
        cut_evenly = packed and len(worst) > 1 and limits.max_rows is None
        return Cutting(
            micro_batches=sum(map(len, parts)) / len(parts),
            tokens=sum(map(sum, parts)) / len(parts),
            worst_tokens=most,
            worst_part_tokens=min(most, even) if cut_evenly else most,
            worst_micro_batches=len(worst),
            pairs=sum(self._pairs(rows, limits, packed) for rows in self._sampled) / len(parts),
        )

    def cut_whole(self, packed: bool) -> int:
        """Tokens of the largest effective batch at once, padding included."""
        return self.cut(MicroBatching(), packed=packed).worst_tokens

    def evaluated_tokens(self, rows: int, limits: MicroBatching, *, packed: bool) -> int:
        """Tokens of the largest part of an evaluation batch of so many rows."""
        return self._evaluated(rows, limits, packed)

    def _most_evaluated(self, rows: int, limits: MicroBatching, packed: bool) -> int:
        ordered = sorted(self._lengths, reverse=True)
        longest = ordered[0]
        rows = min(rows, limits.max_rows or rows)
        repeated, rest = divmod(rows, len(ordered))
        most = repeated * sum(ordered) + sum(ordered[:rest]) if packed else rows * longest
        return most if limits.max_tokens is None else max(min(most, limits.max_tokens), longest)

    def _pairs(self, rows: Sequence[int], limits: MicroBatching, packed: bool) -> int:
        if packed:
            return sum(length**2 for length in rows)
        groups = group_rows(rows, limits, packed=False)
        return sum(len(group) * max(rows[index] for index in group) ** 2 for group in groups)

    def _most(self, limits: MicroBatching, packed: bool) -> int:
        """No batch brings more: all rows at the longest, up to the limits."""
        rows = min(self._rows, limits.max_rows or self._rows)
        longest = self._worst[0]
        most = sum(self._worst[:rows]) if packed else rows * longest
        if limits.max_tokens is None:
            return most
        return max(min(most, limits.max_tokens), longest)

    @staticmethod
    def _parts(rows: Sequence[int], limits: MicroBatching, packed: bool) -> list[int]:
        """Tokens of each micro-batch of one effective batch."""
        groups = group_rows(rows, limits, packed=packed)
        if packed:
            return [sum(rows[index] for index in group) for group in groups]
        return [len(group) * max(rows[index] for index in group) for group in groups]


def batches_of(workload: Workload, strategies: Sequence[Strategy]) -> Batches:
    """Effective batches of the rows as these strategies leave them."""
    cut = next((one for one in strategies if isinstance(one, Truncation)), None)
    longest = workload.longest_tokens if cut is None else cut.max_length
    known = workload.batches
    if longest not in known:
        lengths = [min(length, longest) for length in workload.lengths]
        known[longest] = Batches(lengths, workload.effective_rows)
    return known[longest]
