"""The settings of a step, how a failed step is made smaller, and a line in the log for each change.

fitting   before a step: cut or recomputed as far as the line of memory says it must be
smaller   after a failure: half the micro-batch; at one row every layer recomputed; then
          activations offloaded. A captured step first recomputes an eighth of the layers more
          each time: a graph that is cut is far slower, or cannot be replayed at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from memfit.engine.micro_batches import MicroBatching, group_rows
from memfit.i18n import N_, t
from memfit.memory.memory_line import MemoryLine

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
    """Writes each change into the Trainer's history and tells it the user."""

    def __init__(
        self, history: Callable[[], list[dict[str, Any]]], say: Callable[[str], None] | None = None
    ) -> None:
        self._history = history
        self.say = say

    def note(self, adjustment: Adjustment) -> None:
        """Adds an entry to the history and prints a line."""
        self._history().append({"step": adjustment.step, KEY: asdict(adjustment)})
        if self.say is not None:
            self.say(str(adjustment))
        else:
            _LOGGER.warning("%s", adjustment)

    @property
    def made(self) -> list[Adjustment]:
        """All adjustments of the run, including those before it was resumed."""
        return [Adjustment(**entry[KEY]) for entry in self._history() if KEY in entry]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What is on the device at once, and how activations are saved."""

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


@dataclass(frozen=True, slots=True)
class Pieces:
    """The micro-batches of a batch: how many, and tokens and rows of the largest."""

    count: int
    tokens: int
    rows: int


def pieces_of(lengths: Sequence[int], limits: MicroBatching, *, packed: bool) -> Pieces:
    """Returns the micro-batches that rows of these lengths are cut into."""
    groups = [rows for rows in group_rows(lengths, limits, packed=packed) if rows]
    if len(groups) <= 1:
        groups = [list(range(len(lengths)))]
    sizes = [
        sum(lengths[row] for row in rows) if packed else len(rows) * max(lengths[r] for r in rows)
        for rows in groups
    ]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return Pieces(len(groups), sizes[largest], len(groups[largest]))


@dataclass(frozen=True, slots=True)
class Dials:
    """What can be changed between two steps of this run."""

    depth: int = 0
    """Layers that could be recomputed; 0 where they are not known."""
    offloads: bool = False
    captured: bool = False
    """Whether steps are replayed from graphs."""

    def kept_layers(self, settings: StepSettings) -> int:
        """Returns how many layers' activations are on the device at the highest moment.

        A recomputed layer is there for its own backward: keeping one layer or none is the same.
        """
        return max(self.depth - settings.recomputed, min(self.depth, 1))

    def smaller(self, used: StepSettings, pieces: Pieces) -> StepSettings | None:
        """Returns the settings to try after these failed; None if nothing is left to change."""
        may_cut = pieces.rows > 1
        if used.recomputed < self.depth and (self.captured or not may_cut):
            more = max(self.depth // 8, 1) if self.captured else self.depth
            return replace(used, recomputed=min(used.recomputed + more, self.depth))
        if may_cut:
            return replace(used, max_tokens=max(pieces.tokens // 2, 1))
        if self.offloads and not used.offloaded:
            return replace(used, offloaded=True)
        return None

    def fitting(
        self,
        settings: StepSettings,
        lengths: Sequence[int],
        line: MemoryLine,
        limit_bytes: float,
        *,
        packed: bool,
    ) -> StepSettings:
        """Returns the settings for rows of these lengths, smaller where the line exceeds the limit.

        More layers are recomputed first if the step is captured, micro-batches cut first if not.
        """
        tokens = pieces_of(lengths, settings.micro_batching, packed=packed).tokens
        if line.peak_bytes(tokens, self.kept_layers(settings)) <= limit_bytes:
            return settings
        least = replace(settings, recomputed=self.depth)
        if self.captured:
            for layers in range(settings.recomputed, self.depth + 1):
                found = replace(settings, recomputed=layers)
                if line.peak_bytes(tokens, self.kept_layers(found)) <= limit_bytes:
                    return found
        else:
            cut = line.most_tokens(limit_bytes, self.kept_layers(settings))
            if cut >= max(lengths):
                return replace(settings, max_tokens=cut)
        cut = line.most_tokens(limit_bytes, self.kept_layers(least))
        return replace(least, max_tokens=max(cut, max(lengths)))
