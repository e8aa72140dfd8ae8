"""Smaller after a failure, larger again when there is room, and no swinging in between.

Down:  half the micro-batch; at one row, every layer recomputed; then activations offloaded.
       Captured steps first recompute an eighth of the layers more each time, and are cut when all
       are: a cut graph is slower by far, or none at all. Steps that must not be cut, a quarter.
Up:    one step after a number of clean steps, and never to what has failed, unless the memory
       there is has grown since. Between what works and what failed the gap is halved until it is
       not worth the try.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memfit.runtime.ways import Abilities, MemoryModel, Pieces, Way, fastest

CLEAN_STEPS = 20
"""So many steps must go well before more is tried."""
FLOOR_TRIES = 3
"""With nothing left to change, a step is tried so often: a neighbour may give memory back."""
GROWTH = 1.5
WORTH_IT = 1.1
"""A micro-batch that is not larger by this is not worth the risk."""
GROWN = 1.05
"""The limit must have grown by this before what failed is tried again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What did not fit, and into how much."""

    way: Way
    limit_bytes: int


class Adjuster:
    """Decides how the next batch is run."""

    def __init__(self, plan: Way, abilities: Abilities) -> None:
        self.plan = plan
        """The widest way there is a reason for."""
        self.abilities = abilities
        self.widest = plan
        """The widest way that is believed to fit."""
        self.keeps_plan = False
        """Whether the user said how batches are to be run."""
        self.keeps_tokens = False
        """Whether no micro-batch may be larger than planned: its memory was promised."""
        self.memory: MemoryModel | None = None
        self._failures: list[Failure] = []
        self._largest_failed = 0
        self._clean_steps = 0
        self._floor_tries = 0

    def replan(self, plan: Way) -> None:
        """Another plan from outside: what failed is remembered, what worked is not."""
        self.plan = self.widest = plan
        self._clean_steps = 0

    def keep(self, plan: Way) -> None:
        """What was learnt led to a way that did not fit: go by the plan from here on."""
        self.plan = self.widest = plan
        self.memory = None
        self._clean_steps = 0

    def learn(self, memory: MemoryModel) -> None:
        """What batches need is known: from here on each is run as its size allows.

        A number of layers to recompute was a guess for the worst batch, and so was a limit on
        tokens, unless a plan was priced with it.
        """
        self.memory = memory
        if not self.keeps_plan and self.abilities.by_batch:
            tokens = self.plan.max_tokens if self.keeps_tokens else None
            # Where no layer was seen to take anything, the plan knows more.
            recomputed = 0 if memory.layer_bytes > 0 else self.plan.recomputed
            self.plan = replace(self.plan, max_tokens=tokens, recomputed=recomputed)
        self.widest = self.plan

    def way_for(self, lengths: Sequence[int], limit_bytes: int | None, *, packed: bool) -> Way:
        """How a batch of rows of these lengths is run."""
        if self.memory is None or limit_bytes is None or not lengths:
            return self.widest
        known = [f.way for f in self._failures if limit_bytes < f.limit_bytes * GROWN]
        found = fastest(
            lengths,
            self.memory,
            limit_bytes,
            self.widest,
            self.abilities,
            packed=packed,
            fails=lambda way: any(way.needs_no_less_than(one) for one in known),
        )
        return found or self._smallest(lengths)

    def failed(self, used: Way, pieces: Pieces, limit_bytes: int) -> Way | None:
        """The next smaller way; None where nothing is left to change."""
        # The largest piece is what did not fit, however large the limit allowed it to be.
        tried = replace(used, max_tokens=pieces.tokens)
        self._failures.append(Failure(tried, limit_bytes))
        self._largest_failed = max(self._largest_failed, pieces.tokens)
        self._clean_steps = 0
        abilities = self.abilities
        may_cut = abilities.splits and pieces.rows > 1
        may_recompute = used.recomputed < abilities.depth
        if may_recompute and (abilities.keeps_whole or not may_cut):
            self.widest = replace(used, recomputed=self._more_layers(used.recomputed))
        elif may_cut:
            self.widest = replace(used, max_tokens=max(pieces.tokens // 2, 1))
        elif abilities.offloads and not used.offloaded:
            self.widest = replace(used, offloaded=True)
        elif self._floor_tries < FLOOR_TRIES:
            self._floor_tries += 1
            self.widest = used
        else:
            return None
        return self.widest

    def succeeded(self, limit_bytes: int) -> Way | None:
        """A step went well; the next wider way where it is time for one."""
        self._clean_steps += 1
        self._floor_tries = 0
        if self._clean_steps < CLEAN_STEPS or self.widest == self.plan:
            return None
        self._failures = [f for f in self._failures if limit_bytes < f.limit_bytes * GROWN]
        for wider in self._wider():
            if not any(wider.needs_no_less_than(f.way) for f in self._failures):
                self._clean_steps = 0
                self.widest = wider
                return wider
        return None

    def _wider(self) -> Iterator[Way]:
        """Larger micro-batches first, then less offloading, then less recomputation."""
        now, plan = self.widest, self.plan
        if now.max_tokens is not None and now.max_tokens != plan.max_tokens:
            yield replace(now, max_tokens=self._more_tokens(now.max_tokens))
            between = self._below_failure(now)
            if between >= now.max_tokens * WORTH_IT:
                yield replace(now, max_tokens=between)
        if now.offloaded and not plan.offloaded:
            yield replace(now, offloaded=False)
        if now.recomputed > plan.recomputed:
            yield replace(now, recomputed=(now.recomputed + plan.recomputed) // 2)
            failed = max((f.way.recomputed for f in self._failures), default=plan.recomputed)
            if plan.recomputed < failed < now.recomputed - 1:
                yield replace(now, recomputed=(now.recomputed + failed + 1) // 2)

    def _more_layers(self, now: int) -> int:
        """All at once where batches are cut already; in steps where that comes first."""
        depth = self.abilities.depth
        if not self.abilities.keeps_whole:
            return depth
        return min(depth, now + max(depth // (8 if self.abilities.captured else 4), 1))

    def _more_tokens(self, now: int) -> int | None:
        more = int(now * GROWTH) + 1
        if self.plan.max_tokens is not None:
            return min(more, self.plan.max_tokens)
        # Above all that ever failed, and with room for it now, no limit is worth keeping.
        return None if not self._failures and more > self._largest_failed else more

    def _below_failure(self, now: Way) -> int:
        """Half-way to the smallest micro-batch that failed, run as now."""
        failed = [
            f.way.max_tokens
            for f in self._failures
            if f.way.max_tokens is not None
            and f.way.recomputed >= now.recomputed
            and f.way.offloaded >= now.offloaded
            and now.max_tokens is not None
            and f.way.max_tokens > now.max_tokens
        ]
        return (min(failed) + (now.max_tokens or 0)) // 2 if failed else 0

    def _smallest(self, lengths: Sequence[int]) -> Way:
        """Nothing fits by the model: the least there is, and see."""
        tokens = max(lengths) if self.abilities.splits else self.widest.max_tokens
        return replace(self.widest, max_tokens=tokens, recomputed=self.abilities.depth)
