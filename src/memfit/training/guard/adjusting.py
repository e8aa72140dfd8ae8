"""Smaller steps after a failure, larger ones when there is room, and a line in the log for each.

Down:  half the micro-batch; at one row, every layer recomputed; then activations offloaded.
       Captured steps first recompute an eighth of the layers more each time, and are cut when all
       are: a cut graph is slower by far, or none at all. Steps that must not be cut, a quarter.
Up:    one step after a number of clean steps, and never to what has failed, unless the memory
       there is has grown since. Between what works and what failed the gap is halved until it is
       not worth the try.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from memfit.engine.micro_batches import MicroBatching, group_rows
from memfit.i18n import N_, t

KEY = "adjustment"
"""Under this name an entry of the Trainer's log history is an adjustment; checkpoints keep it."""

_LOGGER = logging.getLogger("memfit")


@dataclass(frozen=True, slots=True)
class Adjustment:
    """One change: when, why, from what to what."""

    step: int
    """The step during or before which it was made, counted from 1."""
    why: str
    before: str
    after: str

    def __str__(self) -> str:
        return t("step {step}: {why}: {before} -> {after}", **asdict(self))


class Adjustments:
    """Writes each change down where it will be found again."""

    def __init__(
        self, history: Callable[[], list[dict[str, Any]]], say: Callable[[str], None] | None = None
    ) -> None:
        self._history = history
        self.say = say

    def note(self, adjustment: Adjustment) -> None:
        """One line, one entry."""
        entry = {"step": adjustment.step, KEY: asdict(adjustment)}
        self._history().append(entry)
        if self.say is not None:
            self.say(str(adjustment))
        else:
            _LOGGER.warning("%s", adjustment)

    @property
    def made(self) -> list[Adjustment]:
        """All adjustments of the run, including those before it was resumed."""
        return [Adjustment(**entry[KEY]) for entry in self._history() if KEY in entry]


@dataclass(frozen=True, slots=True)
class Way:
    """What is on the device at once, and what is done about activations."""

    max_tokens: int | None = None
    """Tokens of one micro-batch; None: the whole effective batch."""
    max_rows: int | None = None
    recomputed: int = 0
    """How many layers, from the first on, are computed a second time in backward."""
    offloaded: bool = False

    @property
    def micro_batching(self) -> MicroBatching:
        """The limits as the step executor takes them."""
        return MicroBatching(self.max_rows, self.max_tokens)

    def needs_no_less_than(self, other: Way) -> bool:
        """Whether this way fails wherever the other one failed."""
        return (
            _most(self.max_tokens) >= _most(other.max_tokens)
            and _most(self.max_rows) >= _most(other.max_rows)
            and self.recomputed <= other.recomputed
            and self.offloaded <= other.offloaded
        )

    def __str__(self) -> str:
        kind = {
            (True, True): N_("{rows:,} rows and {tokens:,} tokens at once"),
            (True, False): N_("{rows:,} rows at once"),
            (False, True): N_("{tokens:,} tokens at once"),
            (False, False): N_("whole batches"),
        }[self.max_rows is not None, self.max_tokens is not None]
        words = t(kind, rows=self.max_rows, tokens=self.max_tokens)
        if self.recomputed:
            words = t("{way}, {layers} layers recomputed", way=words, layers=self.recomputed)
        return t("{way}, activations offloaded", way=words) if self.offloaded else words


def _most(limit: int | None) -> float:
    return float("inf") if limit is None else limit


@dataclass(frozen=True, slots=True)
class StepPieces:
    """How a batch falls into micro-batches: how many, and the largest of them."""

    count: int
    tokens: int
    rows: int
    most_rows: int
    """Rows of the piece that has the most rows; not always the one with the most tokens."""


def pieces_of(lengths: Sequence[int], limits: MicroBatching, *, packed: bool) -> StepPieces:
    """The micro-batches of a batch of these lengths."""
    groups = group_rows(lengths, limits, packed=packed)
    if len(groups) <= 1:
        groups = [list(range(len(lengths)))]
    sizes = [
        sum(lengths[row] for row in rows) if packed else len(rows) * max(lengths[r] for r in rows)
        for rows in groups
        if rows
    ]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    most_rows = max(len(rows) for rows in groups)
    return StepPieces(len(groups), sizes[largest], len(groups[largest]), most_rows)


def kept_layers(depth: int, recomputed: int) -> int:
    """Returns how many layers' activations are there at the highest moment.

    A recomputed layer is there for its own backward, so keeping one layer or none takes the same.
    """
    return max(depth - recomputed, min(depth, 1))


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The highest moment of forward and backward, as the rehearsal found it.

    fixed + tokens x token + (tokens x layer + rows x row_layer) x kept layers
          + gradients, if there are several micro-batches
    """

    fixed_bytes: float
    token_bytes: float
    """Bytes of each token, whatever is recomputed."""
    layer_bytes: float
    """Bytes of each token in each layer that is kept."""
    depth: int
    gradient_bytes: float = 0.0
    """What the second of several micro-batches finds there already."""
    row_layer_bytes: float = 0.0
    """Bytes of each row in each layer that is kept, however short the row is."""

    @classmethod
    def read(cls, values: Mapping[str, float]) -> MemoryModel:
        """The model with these fields, as a file has them."""
        numbers: dict[str, Any] = {**values, "depth": int(values["depth"])}
        return cls(**numbers)

    def peak_bytes(self, pieces: StepPieces, recomputed: int) -> float:
        """Bytes at the peak of a step whose largest micro-batch this is."""
        kept = kept_layers(self.depth, recomputed)
        there_bytes = self.fixed_bytes + (self.gradient_bytes if pieces.count > 1 else 0)
        layer_bytes = pieces.tokens * self.layer_bytes + pieces.most_rows * self.row_layer_bytes
        return there_bytes + pieces.tokens * self.token_bytes + layer_bytes * kept

    @property
    def sees_layers(self) -> bool:
        """Whether a layer that is kept was seen to take anything."""
        return self.layer_bytes > 0 or self.row_layer_bytes > 0

    def fewest_recomputed(self, pieces: StepPieces, limit_bytes: float) -> int | None:
        """The least recomputation that stays inside; None where none does."""
        most = self.depth if self.sees_layers else 0
        for recomputed in range(most + 1):
            if self.peak_bytes(pieces, recomputed) <= limit_bytes:
                return recomputed
        return None


@dataclass(frozen=True, slots=True)
class Abilities:
    """What can be changed between two steps of this run."""

    splits: bool = True
    """Whether a step may take several micro-batches."""
    depth: int = 0
    """Layers that could be recomputed; none where the model's are not known."""
    offloads: bool = False
    captured: bool = False
    """Whether steps are replayed from graphs. Then all batches run one way, and layers are
    recomputed before a batch is cut."""
    piece_tokens: int = 64
    """The cost of one more micro-batch, in tokens computed."""
    cut_tokens: int = 0
    """What it costs to cut a batch at all: kept gradients of several graphs cannot be added up,
    so that such a step is launched."""

    @property
    def by_batch(self) -> bool:
        """Whether each batch may be run in another way."""
        return not self.captured

    @property
    def keeps_whole(self) -> bool:
        """Whether more layers are recomputed before a batch is cut."""
        return self.captured or not self.splits


def fastest(
    lengths: Sequence[int],
    memory: MemoryModel,
    limit_bytes: float,
    widest: Way,
    abilities: Abilities,
    *,
    packed: bool,
    fails: Callable[[Way], bool] = lambda _: False,
) -> Way | None:
    """The cheapest way within `widest` that stays inside the limit; None where none does.

    `fails` knows ways that did not fit, whatever the model says of them.
    """
    best: tuple[float, Way] | None = None
    for way in _splits(lengths, widest, abilities):
        pieces = pieces_of(lengths, way.micro_batching, packed=packed)
        fewest = memory.fewest_recomputed(pieces, limit_bytes)
        if fewest is None:
            continue
        shown = replace(way, max_tokens=pieces.tokens)
        enough = (
            layers
            for layers in range(max(fewest, widest.recomputed), max(abilities.depth, fewest) + 1)
            if not fails(replace(shown, recomputed=layers))
        )
        recomputed = next(enough, None)
        if recomputed is None:
            continue
        # Backward is two forwards; a recomputed layer is one more.
        share = recomputed / max(memory.depth, 1)
        cost = sum(lengths) * (3 + share) + 3 * pieces.count * abilities.piece_tokens
        cost += abilities.cut_tokens if pieces.count > 1 else 0
        if best is None or cost < best[0]:
            best = cost, replace(way, recomputed=recomputed)
        if way is widest and recomputed == widest.recomputed:
            break  # all others are cut smaller or computed again
    return None if best is None else best[1]


def _splits(lengths: Sequence[int], widest: Way, abilities: Abilities) -> Iterator[Way]:
    """Ever smaller micro-batches, down to the longest row alone."""
    yield widest
    tokens = min(_most(widest.max_tokens), sum(lengths))
    while abilities.splits and tokens > max(lengths):
        tokens = max(int(tokens * 0.75), max(lengths))
        yield replace(widest, max_tokens=tokens)


CLEAN_STEPS = 20
"""How many steps must succeed before a larger step is tried."""

FLOOR_TRIES = 3
"""How often a step is tried with nothing left to change: other processes may free memory."""

GROWTH = 1.5

WORTH_IT = 1.1
"""A micro-batch must grow at least by this factor to be worth the risk."""

GROWN = 1.05
"""The limit must grow by this factor before a failed way is tried again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What did not fit, and into how much."""

    way: Way
    limit_bytes: int


class Adjuster:
    """Decides how the next batch is run."""

    def __init__(self, plan: Way, abilities: Abilities) -> None:
        self.plan = plan
        """The widest way that is of any use."""
        self.abilities = abilities
        self.widest = plan
        """The widest way that is believed to fit."""
        self.keeps_plan = False
        """Whether the user said how batches are to be run."""
        self.keeps_tokens = False
        """Whether no micro-batch may exceed the plan, whose memory was promised."""
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
        """Follows the plan from now on, because the learnt model chose a way that did not fit."""
        self.plan = self.widest = plan
        self.memory = None
        self._clean_steps = 0

    def learn(self, memory: MemoryModel) -> None:
        """Takes the measured model; from now on each batch runs as its size allows.

        A number of layers to recompute was a guess for the worst batch, and so was a limit on
        tokens, unless a plan was priced with it.
        """
        self.memory = memory
        if not self.keeps_plan and self.abilities.by_batch:
            tokens = self.plan.max_tokens if self.keeps_tokens else None
            # Where no layer was seen to take anything, the plan knows more.
            recomputed = 0 if memory.sees_layers else self.plan.recomputed
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

    def failed(self, used: Way, pieces: StepPieces, limit_bytes: int) -> Way | None:
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
        """The micro-batch half-way between this one and the smallest that failed."""
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
        """The way that needs least, for when nothing fits by the model."""
        tokens = max(lengths) if self.abilities.splits else self.widest.max_tokens
        return replace(self.widest, max_tokens=tokens, recomputed=self.abilities.depth)
