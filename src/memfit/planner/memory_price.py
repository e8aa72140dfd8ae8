"""A traced step's parts as a run on one card: what each phase allocates, reserves and occupies."""

from __future__ import annotations

import dataclasses
import os
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass

from memfit.memory.allocator import Allocator, Block, segments_expand
from memfit.memory.cards import DeviceProfile
from memfit.memory.components import Component, Event, MemoryPeak
from memfit.memory.cuda_context import (
    SMALL,
    VARIABLE,
    handle_workspace_bytes,
    lt_workspace_bytes,
    run_context_bytes,
)
from memfit.memory.phases import (
    EVALUATION,
    RESUMING,
    SAVING,
    TRAINING,
    Books,
    Run,
    peaks,
    play_run,
    with_loaded_state,
    with_workspaces,
)
from memfit.memory.tracing.depth import Mark, Segments
from memfit.planner.rank_cost import on_ranks

_ON_STREAM = ("workspace", "micro", "micro_more", "update", "update_first", "clear")
"""Parts of a run that the stream of the graphs runs, until the first is captured."""


@dataclass(frozen=True, kw_only=True)
class Priced:
    """What decides a run's memory beside the parts of its step."""

    segments: Segments
    biases: bool
    recompute: bool
    small_workspace: bool
    streams: bool = False
    """Whether something runs beside the computation: copies to the host, or graphs."""
    graphs: int = 0
    """Graphs that will be captured; none where the step is launched."""
    graphed_kernels: float = 0
    nccl_bytes: int = 0
    """What ranks on several cards hold to reach each other."""
    ranks: int = 1
    whole_bytes: int = 0
    """What FSDP2 holds whole at once; 0: weights are not divided among the ranks."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment the run will have."""
        return {**os.environ, VARIABLE: SMALL} if self.small_workspace else os.environ

    @property
    def is_stepped(self) -> bool:
        """Whether a stock optimizer makes its state in the first update."""
        return "update" in self.segments.parts


def phase_peaks(run: Priced, card: DeviceProfile | None) -> dict[str, MemoryPeak]:
    """The peak of each phase, by name."""
    segments = on_ranks(with_loaded_state(run.segments), run.ranks, run.whole_bytes)
    if card is not None:
        segments = with_libraries(run, segments, card)
        card = dataclasses.replace(card, context_bytes=context_bytes(run, card))
    whole = play_run(segments, _order(run, cuda=card is not None))
    end, count = whole.starts[-1][0], len(whole.events)
    stretches = [(0, end), (end, end), (end, count)]
    training, saving, evaluation = peaks(whole, stretches, card, books=_books(run, whole, card))
    # BudgetTrainer has the optimizer's state before the first step, so that resuming is no more.
    return {TRAINING: training, EVALUATION: evaluation, SAVING: saving, RESUMING: training}


def context_bytes(run: Priced, card: DeviceProfile) -> int:
    """What lies on the card outside the allocator; a run makes its handles small."""
    return run.nccl_bytes + run_context_bytes(
        card.context_bytes,
        card.capability,
        {} if card.here else ChainMap(os.environ, {VARIABLE: SMALL}),
        streams=run.streams or run.graphs > 0,
        graphed_kernels=run.graphs * run.graphed_kernels,
    )


def with_libraries(run: Priced, segments: Segments, card: DeviceProfile) -> Segments:
    """The scratch memory of the matrix libraries, for each stream that multiplies."""
    made = with_workspaces(
        segments,
        card.capability,
        recompute=run.recompute,
        biases=run.biases,
        environment=run.environment,
    )
    if not run.graphs:
        return made
    # An evaluation is launched on another stream than the graphs, with a workspace of its own.
    product = handle_workspace_bytes(card.capability, run.environment)
    linear = lt_workspace_bytes(run.environment) if run.biases else 0
    marks = [Mark(True, (size, Component.WORKSPACE, ""), "") for size in (product, linear) if size]
    return Segments({**made.parts, "evaluate": [*marks, *made.parts["evaluate"]]})


def _order(run: Priced, *, cuda: bool) -> list[str]:
    """The state, two steps of the largest batch (the first is a rehearsal), an evaluation."""
    parts = run.segments.parts
    micro = ["micro"] + ["micro_more"] * ("micro_more" in parts)
    begin = ["build"] + ["workspace"] * cuda + ["features"] * ("features" in parts) + ["start"]
    begin += ["load_state"] * run.is_stepped
    update = "update" if run.is_stepped else "update_first"
    step = [*(["static"] if run.graphs else []), *micro, update, "clear"]
    return [*begin, *step, *step, "evaluate"]


def _books(run: Priced, played: Run, card: DeviceProfile | None) -> Books:
    if card is None or not run.graphs:
        return Books(card, expandable_segments=card is not None and segments_expand())
    return GraphBooks(card, played)


class GraphBooks(Books):
    """Steps run on a stream of their own, whose memory no other stream uses.

    The first step is launched there; what is captured next lies in a pool of its own.
    """

    def __init__(self, device: DeviceProfile, played: Run) -> None:
        super().__init__(device, expandable_segments=False)
        expand = segments_expand()
        self._usual, self._steps, self._pool = (
            Allocator(expandable_segments=expand) for _ in range(3)
        )
        self._owner: dict[int, tuple[Allocator, Block]] = {}
        self._turns = self._places(played)
        self._place = self._usual
        self._at = 0

    def _places(self, played: Run) -> dict[int, Allocator]:
        """Where the events from each of these on take their memory."""
        places: dict[int, Allocator] = {}
        steps = 0
        for at, name in played.starts:
            steps += name == "micro"
            on_stream = name in _ON_STREAM and steps < 2
            if name == "micro" and steps == 2:
                places[at] = self._pool
            else:
                places[at] = self._steps if on_stream or name == "static" else self._usual
        return places

    def enter(self, event: Event) -> None:
        """Let an event happen."""
        place = self._turns.get(self._at, self._place)
        if place is self._pool and self._place is not self._pool:
            self._usual.release()  # what the launched step left would lie beside the graphs
            self._steps.release()
        self._place = place
        self._at += 1
        every = (self._usual, self._steps, self._pool)
        before = sum(one.reserved_bytes for one in every)
        asked = 0
        if event.birth:
            held = place.reserved_bytes
            block = place.allocate(event.nbytes)
            assert block is not None
            self._owner[event.block] = (place, block)
            asked = place.asked_bytes - held
        else:
            owner, block = self._owner.pop(event.block)
            owner.free(block)
        self.allocated = sum(one.allocated_bytes for one in every)
        self.reserved = sum(one.reserved_bytes for one in every)
        self.asked = max(self.reserved, before + asked)
