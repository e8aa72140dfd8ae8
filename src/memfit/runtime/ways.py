"""Ways of running one effective batch, and what each of them needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from memfit.messages import N_, t
from memfit.runtime.batching import MicroBatching, group_rows


@dataclass(frozen=True, slots=True)
class Way:
    """What is on the device at once, and what is done about activations."""

    max_tokens: int | None = None
    """Of one micro-batch; None: the whole effective batch."""
    max_rows: int | None = None
    recomputed: int = 0
    """The first so many layers are computed a second time in backward."""
    offloaded: bool = False

    @property
    def micro_batching(self) -> MicroBatching:
        """As the step executor takes it."""
        return MicroBatching(self.max_rows, self.max_tokens)

    def needs_no_less_than(self, other: Way) -> bool:
        """Whether whatever had no room for the other way has none for this one."""
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
class Pieces:
    """How a batch falls into micro-batches: how many, and the largest of them."""

    count: int
    tokens: int
    rows: int


def pieces_of(lengths: Sequence[int], limits: MicroBatching, *, packed: bool) -> Pieces:
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
    return Pieces(len(groups), sizes[largest], len(groups[largest]))


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The highest moment of forward and backward, as the rehearsal found it.

    fixed + tokens x (token + layer x (depth - recomputed)) + gradients, if there are several
    """

    fixed_bytes: float
    token_bytes: float
    """Of each token, whatever is recomputed."""
    layer_bytes: float
    """Of each token and each layer that is kept."""
    depth: int
    gradient_bytes: float = 0.0
    """What the second of several micro-batches finds there already."""

    def peak_bytes(self, pieces: Pieces, recomputed: int) -> float:
        """What micro-batches need of which this is the largest."""
        kept = max(self.depth - recomputed, 0)
        there_bytes = self.fixed_bytes + (self.gradient_bytes if pieces.count > 1 else 0)
        return there_bytes + pieces.tokens * (self.token_bytes + self.layer_bytes * kept)

    def fewest_recomputed(self, pieces: Pieces, limit_bytes: float) -> int | None:
        """The least recomputation that stays inside; None where none does."""
        most = self.depth if self.layer_bytes > 0 else 0
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
    """Whether steps are replayed: one way for all batches, and rather recomputed than cut."""
    piece_tokens: int = 64
    """What it costs to begin another micro-batch, in tokens computed."""
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
