"""A traced micro-batch cut into its layers, and put together again for any depth and size.

Counts are vectors here, in the order of StepCounts' fields: thousands of steps are composed.

One trace of three layers has a first, a middle and a last one. The middle one, forward and
backward, is what every further layer adds; layers that are recomputed or offloaded come from a
trace in which all are. Sizes that grow with the tokens are known from a second trace.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memfit.memory.allocator import Allocator, Block, segments_expand
from memfit.memory.components import Component
from memfit.memory.tracing.counting import StepCounts
from memfit.memory.tracing.depth import Kind, Mark, Segments, layer_of

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


TRACED_LAYERS = 3

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Growth:
    """How sizes depend on the tokens: as a line through two traces of the same step."""

    tokens: tuple[int, int]
    kinds: Mapping[Kind, int]
    """A kind of block in the first trace, and its size in the second."""
    sizes: Mapping[int, int]
    """The same by size alone, of those that grow: for kinds that only other traces have."""

    @classmethod
    def between(cls, first: Segments, second: Segments, tokens: tuple[int, int]) -> Growth:
        """From the same micro-batch at two numbers of tokens."""
        kinds: dict[Kind, int] = {}
        marks, others = (_births(one) for one in (first, second))
        # Blocks die in an order that depends on their size, so only births are compared.
        if [mark.kind[1:] for mark in marks] == [mark.kind[1:] for mark in others]:
            kinds = {mark.kind: other.kind[0] for mark, other in zip(marks, others, strict=True)}
        sizes = {kind[0]: size for kind, size in kinds.items() if kind[0] != size}
        return cls(tokens, kinds, sizes)

    def line(self, kind: Kind) -> tuple[float, float]:
        """Bytes at no token, and more bytes for each."""
        size, component, _ = kind
        first, second = self.tokens
        if component is not Component.ACTIVATIONS:
            return float(size), 0.0
        other = self.kinds.get(kind, self.sizes.get(size))
        if other is not None and first != second:
            slope = (other - size) / (second - first)
            return size - slope * first, slope
        return (0.0, size / first) if size % first == 0 else (float(size), 0.0)


def _births(segments: Segments) -> list[Mark]:
    return [mark for mark in segments.parts["micro"] if mark.birth]


class Rise(NamedTuple):
    """What a stretch of events adds."""

    net: float
    """Bytes that stay."""
    top: float
    """The most bytes at any moment in it, above those before it."""
    gradients: float
    """Of those that stay."""
    top_gradients: float


@dataclass(eq=False)
class Stretch:
    """Some events in a row, as sizes that depend on the tokens."""

    marks: Sequence[Mark]
    growth: Growth
    _known: dict[tuple[int, bool], Rise] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lines = [self.growth.line(mark.kind) for mark in self.marks]
        signs = np.array([1.0 if mark.birth else -1.0 for mark in self.marks])
        gradient = np.array([mark.kind[1] is Component.GRADIENTS for mark in self.marks], bool)
        self._sizes: _Floats = np.array(lines, np.float64).reshape(-1, 2)
        sizes = self._sizes
        others = np.where(gradient, 0.0, signs)[:, None] * sizes
        self._others: _Floats = np.cumsum(others, axis=0)
        born = np.where(gradient & (signs > 0), sizes[:, 0], 0.0)
        self._kept: _Floats = np.cumsum(born)
        places = np.where(born > 0, np.arange(len(born)), -1)
        last = np.maximum.accumulate(places) if len(born) else places
        self._passing: _Floats = np.where(last >= 0, born[last], 0.0) if len(born) else born

    def rise(self, tokens: int, *, keeps: bool) -> Rise:
        """With gradients that stay (`keeps`), or each only until the next one comes."""
        key = (tokens, keeps)
        if key not in self._known:
            self._known[key] = self._rise(tokens, keeps)
        return self._known[key]

    def _rise(self, tokens: int, keeps: bool) -> Rise:
        if not len(self.marks):
            return Rise(0.0, 0.0, 0.0, 0.0)
        others = self._others[:, 0] + tokens * self._others[:, 1]
        gradients = self._kept if keeps else self._passing
        live = others + gradients
        at = int(live.argmax())
        stay = float(self._kept[-1]) if keeps else 0.0
        top, there = (float(live[at]), float(gradients[at])) if live[at] > 0 else (0.0, 0.0)
        return Rise(float(others[-1]) + stay, top, stay, there)

    def sized(self, tokens: int, *, keeps: bool) -> tuple[list[int], list[int]]:
        """The events at another number of tokens, as bytes born or, negative, gone.

        The second list has the gradients that stay (`keeps`); they go after the update.
        """
        events: list[int] = []
        stay: list[int] = []
        exact = self._sizes[:, 0] + self._sizes[:, 1] * tokens
        for mark, size in zip(self.marks, np.rint(exact).clip(1).astype(int).tolist(), strict=True):
            if mark.kind[1] is not Component.GRADIENTS:
                events.append(size if mark.birth else -size)
            elif mark.birth:
                events.append(size)
                (stay if keeps else events).append(-size)
        return events, stay


@dataclass(frozen=True)
class TracedPieces:
    """The stretches of one micro-batch: before, through and after the layers, and back."""

    before: Stretch
    forward: tuple[Stretch, ...]
    middle: Stretch
    backward: tuple[Stretch, ...]
    """Of the lowest layer first, as `forward`; the step comes to it last."""
    after: Stretch
    whole: bool = False
    """Whether the layers could not be told apart: all of it is in `before`."""


def cut_pieces(marks: Sequence[Mark], growth: Growth, layers: int = TRACED_LAYERS) -> TracedPieces:
    """Cut a traced micro-batch where it enters another layer."""
    stack = _stack(marks)
    stages = ["before", *range(layers), "middle", *range(layers), "after"]
    starts = [0]
    for place, mark in enumerate(marks):
        if mark.birth and _enters(mark.module, stack, len(starts), layers):
            starts.append(place)
    if len(starts) < layers + 2:
        nothing = Stretch((), growth)
        several = (nothing,) * layers
        return TracedPieces(Stretch(marks, growth), several, nothing, several, nothing, whole=True)
    starts += [len(marks)] * (len(stages) + 1 - len(starts))
    cuts = [Stretch(marks[start:stop], growth) for start, stop in itertools.pairwise(starts)]
    forward, backward = cuts[1 : layers + 1], cuts[layers + 2 : 2 * layers + 2]
    return TracedPieces(
        cuts[0], tuple(forward), cuts[layers + 1], tuple(reversed(backward)), cuts[-1]
    )


def _enters(module: str, stack: str, stage: int, layers: int) -> bool:
    """Whether an event in this module begins the next stage, the one numbered `stage`."""
    found = layer_of(module)
    layer = found[1] if found is not None and found[0] == stack else None
    if stage <= layers:
        return layer == stage - 1
    if stage == layers + 1:
        return layer is None and bool(module)
    if stage <= 2 * layers + 1:
        return layer == 2 * layers + 1 - stage
    return stage == 2 * layers + 2 and layer is None and bool(module)


def _stack(marks: Iterable[Mark]) -> str:
    """The list of layers that most blocks are born in."""
    counts: dict[str, int] = {}
    for mark in marks:
        found = layer_of(mark.module) if mark.birth else None
        if found is not None:
            counts[found[0]] = counts.get(found[0], 0) + 1
    return max(counts, key=lambda name: counts[name], default="")


def walk(
    plain: TracedPieces, other: TracedPieces, depth: int, count: int
) -> list[tuple[Stretch, int]]:
    """The stretches of a model of so many layers, of which the first `count` are the other kind.

    Each with how often it comes in a row.
    """
    lowest = other if count else plain
    highest = plain if count < depth else other
    others = max(count - 1 - (count == depth and depth > 1), 0)
    plains = depth - others - (1 if depth == 1 else 2)
    # The one in the middle of those that were traced has neighbours of its own kind.
    inner = [(_middle(other.forward), others), (_middle(plain.forward), plains)]
    back = [(_middle(plain.backward), plains), (_middle(other.backward), others)]
    steps = [(lowest.before, 1), (lowest.forward[0], 1)]
    if depth > 1:
        steps += [*inner, (highest.forward[-1], 1), (plain.middle, 1), (highest.backward[-1], 1)]
        steps += back
    else:
        steps.append((plain.middle, 1))
    steps += [(lowest.backward[0], 1), (plain.after, 1)]
    return [(stretch, times) for stretch, times in steps if times > 0]


def _middle(layers: Sequence[Stretch]) -> Stretch:
    return layers[len(layers) // 2]


def peak_of(
    steps: Iterable[tuple[Stretch, int]], tokens: int, *, keeps: bool
) -> tuple[float, float]:
    """The highest moment of a micro-batch above what lies there before it; its gradients then."""
    live = gradients = 0.0
    best, best_gradients = 0.0, 0.0
    for stretch, times in steps:
        rise = stretch.rise(tokens, keeps=keeps)
        # What is added is the same every time, so the first or the last one is the highest.
        for number in {0, times - 1}:
            moment = live + number * rise.net + rise.top
            if moment > best:
                best = moment
                best_gradients = gradients + number * rise.gradients + rise.top_gradients
        live += times * rise.net
        gradients += times * rise.gradients
    return best, best_gradients


def top_bytes(marks: Iterable[Mark]) -> int:
    """The highest moment of some events, above what lies there before them."""
    live = itertools.accumulate(mark.kind[0] if mark.birth else -mark.kind[0] for mark in marks)
    return max(live, default=0)


def gap_bytes(
    steps: Iterable[tuple[Stretch, int]],
    before: Segments,
    tokens: int,
    *,
    keeps: bool,
) -> int:
    """What the allocator reserves beyond what is allocated at the peak of such a micro-batch."""
    allocator = Allocator(expandable_segments=segments_expand())
    living: defaultdict[int, list[Block]] = defaultdict(list)
    highest = 0

    def happen(events: Iterable[int]) -> int:
        most = 0
        for nbytes in events:
            if nbytes > 0:
                block = allocator.allocate(nbytes)
                assert block is not None  # there is no cap
                living[nbytes].append(block)
                most = max(most, allocator.allocated_bytes)
            elif blocks := living[-nbytes]:  # what another layer bore may be missing at a seam
                allocator.free(blocks.pop())
        return most

    for name in ("build", "start"):
        marks = before.parts.get(name, ())
        happen(mark.kind[0] if mark.birth else -mark.kind[0] for mark in marks)
    micro = [(*one.sized(tokens, keeps=keeps), times) for one, times in steps]
    for _ in range(2):  # a second step finds what the first one left
        for events, _, times in micro:
            for _ in range(times):
                highest = max(highest, happen(events))
        for _, gradients, times in micro:
            for nbytes in gradients:
                happen([nbytes] * times)
    return allocator.reserved_bytes - highest
