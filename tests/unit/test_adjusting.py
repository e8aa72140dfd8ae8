"""Smaller after a failure, larger again when there is room, and no swinging in between."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from memfit.engine.micro_batches import MicroBatching
from memfit.training.guard.adjusting import (
    CLEAN_STEPS,
    FLOOR_TRIES,
    Abilities,
    Adjuster,
    MemoryModel,
    StepPieces,
    Way,
    fastest,
    pieces_of,
)

DEPTH = 12
FULL = Abilities(splits=True, depth=DEPTH, offloads=True)
MODEL = MemoryModel(fixed_bytes=1000, token_bytes=1, layer_bytes=2, depth=DEPTH, gradient_bytes=100)


def peak_bytes(way: Way, pieces: StepPieces) -> float:
    """What the simulated allocator needs; the adjuster is not told."""
    kept = 0 if way.offloaded else DEPTH - way.recomputed
    return 1000 + 100 * (pieces.count > 1) + pieces.tokens * (1 + 2 * kept)


class Simulation:
    """Random batches on a card whose memory changes from step to step."""

    def __init__(self, adjuster: Adjuster, capacity: Callable[[int], int], seed: int = 0) -> None:
        self.adjuster = adjuster
        self.capacity = capacity
        self.failures = 0
        self.changes: list[int] = []
        self._random = random.Random(seed)

    def run(self, steps: range, *, longest: int = 100) -> None:
        for step in steps:
            lengths = [self._random.randint(longest // 2, longest) for _ in range(16)]
            self._step(step, lengths)

    def _step(self, step: int, lengths: list[int]) -> None:
        limit = self.capacity(step)
        way = self.adjuster.way_for(lengths, limit, packed=True)
        while True:
            pieces = pieces_of(lengths, way.micro_batching, packed=True)
            if peak_bytes(way, pieces) <= limit:
                break
            self.failures += 1
            self.changes.append(step)
            smaller = self.adjuster.failed(way, pieces, limit)
            assert smaller is not None, f"gave up at {way}, {pieces}"
            way = smaller
        if self.adjuster.succeeded(limit):
            self.changes.append(step)


def test_a_failure_halves_the_piece_then_recomputes_then_offloads_then_gives_up():
    adjuster = Adjuster(Way(), FULL)
    ways: list[Way | None] = []
    pieces, way = StepPieces(1, 400, 4, 4), Way()
    for rows, tokens in ((4, 400), (2, 200), (1, 100), (1, 100), (1, 100)):
        pieces = StepPieces(1, tokens, rows, rows)
        way = adjuster.failed(way, pieces, 0) or way
        ways.append(way)
    assert ways == [
        Way(max_tokens=200), Way(max_tokens=100), Way(max_tokens=100, recomputed=DEPTH),
        Way(max_tokens=100, recomputed=DEPTH, offloaded=True),
        Way(max_tokens=100, recomputed=DEPTH, offloaded=True),
    ]  # fmt: skip
    last = [adjuster.failed(way, pieces, 0) for _ in range(FLOOR_TRIES)]
    assert last == [way] * (FLOOR_TRIES - 1) + [None]


def test_a_captured_step_recomputes_more_before_it_is_cut():
    adjuster = Adjuster(Way(recomputed=10), Abilities(depth=DEPTH, captured=True))
    way, ways = Way(recomputed=10), []
    for _ in range(3):
        way = adjuster.failed(way, StepPieces(1, 400, 4, 4), 0) or way
        ways.append(way)
    assert ways == [Way(recomputed=11), Way(recomputed=12), Way(200, recomputed=12)]


def test_what_cannot_be_replayed_in_pieces_is_recomputed_instead():
    memory = MemoryModel(0, 10, 100, depth=4)
    # 400 tokens whole with one layer more, or 200 twice: the second is cheaper if it is replayed.
    lengths, limit = [100] * 4, 400 * (10 + 100 * 2)
    widest = Way(recomputed=0)
    free = fastest(lengths, memory, limit, widest, Abilities(depth=4, piece_tokens=1), packed=True)
    kept = Abilities(depth=4, piece_tokens=1, captured=True, cut_tokens=10_000)
    assert free is not None
    assert free.max_tokens is not None
    assert fastest(lengths, memory, limit, widest, kept, packed=True) == Way(recomputed=2)


def test_a_step_that_must_not_be_split_recomputes_more_each_time():
    adjuster = Adjuster(Way(), Abilities(splits=False, depth=DEPTH))
    way, ways = Way(), []
    for _ in range(DEPTH // 3):
        way = adjuster.failed(way, StepPieces(1, 400, 4, 4), 0) or way
        ways.append(way)
    assert ways == [Way(recomputed=layers) for layers in (3, 6, 9, 12)]


def test_layers_are_given_back_down_to_just_above_what_failed():
    adjuster = Adjuster(Way(), Abilities(splits=False, depth=DEPTH))
    for failed in (0, 3, 6):
        adjuster.failed(Way(recomputed=failed), StepPieces(1, 400, 4, 4), 1000)
    assert adjuster.widest == Way(recomputed=9)
    for _ in range(CLEAN_STEPS * 10):
        adjuster.succeeded(1000)
    assert adjuster.widest == Way(recomputed=7)  # 6 failed; 7 was never tried and went well
    for _ in range(CLEAN_STEPS * 10):
        adjuster.succeeded(2000)
    assert adjuster.widest == Way()


def test_a_captured_step_keeps_the_plans_layers_whatever_was_learnt():
    adjuster = Adjuster(Way(recomputed=4), Abilities(splits=False, depth=DEPTH, captured=True))
    adjuster.learn(MODEL)
    assert adjuster.way_for([100], 10**9, packed=True) == Way(recomputed=4)
    assert adjuster.way_for([400], 6000, packed=True) == Way(recomputed=7)


def test_on_a_card_that_does_not_change_it_settles_just_below_what_fails():
    simulation = Simulation(Adjuster(Way(), FULL), lambda _: 6000)
    simulation.run(range(2000))
    # The largest micro-batch that fits has (6000 - 1100) / 25 = 196 tokens.
    assert 150 < (simulation.adjuster.widest.max_tokens or 0) <= 196
    assert simulation.failures <= 6
    assert max(simulation.changes) < 400  # and then it rests


def test_it_grows_back_when_memory_returns_and_not_before():
    def capacity(step: int) -> int:
        return 4000 if 100 <= step < 300 else 60_000

    simulation = Simulation(Adjuster(Way(), FULL), capacity)
    simulation.run(range(100))
    assert simulation.changes == []
    simulation.run(range(100, 300))
    small = simulation.adjuster.widest
    assert small.max_tokens is not None
    assert small.max_tokens <= (4000 - 1100) // 25
    failures = simulation.failures
    simulation.run(range(300, 900))
    assert simulation.adjuster.widest == Way()
    assert simulation.failures == failures  # the way back cost nothing


def test_a_neighbour_that_comes_and_goes_costs_a_few_failures_and_no_swinging():
    def capacity(step: int) -> int:
        return 9000 if (step // 250) % 2 else 6000

    simulation = Simulation(Adjuster(Way(), FULL), capacity)
    simulation.run(range(5000))
    assert simulation.failures < 40
    assert len(simulation.changes) < 5000 / CLEAN_STEPS


def test_recomputation_is_taken_out_when_there_is_room():
    adjuster = Adjuster(Way(), FULL)
    adjuster.widest = Way(max_tokens=100, recomputed=DEPTH, offloaded=True)
    simulation = Simulation(adjuster, lambda _: 10**9)
    simulation.run(range(CLEAN_STEPS * 20))
    assert adjuster.widest == Way()
    assert simulation.failures == 0


def test_a_plan_of_the_users_own_is_never_exceeded():
    adjuster = Adjuster(Way(max_tokens=300), FULL)
    adjuster.keeps_plan = True
    adjuster.learn(MODEL)
    assert adjuster.failed(Way(max_tokens=300), StepPieces(2, 300, 3, 3), 5000) == Way(
        max_tokens=150
    )
    for _ in range(CLEAN_STEPS * 10):
        adjuster.succeeded(10**9)
    assert adjuster.widest == Way(max_tokens=300)


def test_a_planned_limit_on_tokens_stays_and_planned_layers_are_as_few_as_fit():
    adjuster = Adjuster(Way(max_tokens=300, recomputed=4), FULL)
    adjuster.keeps_tokens = True
    adjuster.learn(MODEL)
    assert adjuster.plan == Way(max_tokens=300)
    assert adjuster.way_for([400] * 8, 10**9, packed=True) == Way(max_tokens=300)


# ---- each batch by its tokens ----


def test_a_short_batch_is_run_whole_and_a_long_one_in_pieces_or_recomputed():
    limit = 6000
    ways = {
        length: fastest([length] * 8, MODEL, limit, Way(), FULL, packed=True)
        for length in (10, 40, 100, 400)
    }
    assert ways[10] == Way()
    for length, way in ways.items():
        assert way is not None
        pieces = pieces_of([length] * 8, way.micro_batching, packed=True)
        assert MODEL.peak_bytes(pieces, way.recomputed) <= limit
    # 400 tokens in one row need more than there is without recomputation.
    assert ways[400] is not None
    assert ways[400].recomputed > 0


def test_fewer_layers_are_recomputed_for_fewer_tokens():
    whole = Abilities(splits=False, depth=DEPTH)
    found = [
        fastest([tokens], MODEL, 6000, Way(), whole, packed=True) for tokens in (150, 250, 400)
    ]
    recomputed = [way.recomputed for way in found if way is not None]
    assert recomputed == [0, 3, 7]
    # (6000 - 1000) / 400 = 12.5 = 1 + 2 x 5.75: five layers can be kept.
    assert DEPTH - recomputed[-1] == 5


def test_a_piece_that_costs_much_to_begin_is_recomputed_instead():
    cheap = fastest([100] * 4, MODEL, 6000, Way(), FULL, packed=True)
    dear = fastest(
        [100] * 4, MODEL, 6000, Way(), Abilities(True, DEPTH, True, piece_tokens=5000), packed=True
    )
    assert cheap is not None
    assert dear is not None
    assert cheap.max_tokens is not None
    assert dear.max_tokens is None
    assert dear.recomputed > cheap.recomputed


def test_nothing_that_fits_is_the_least_there_is():
    adjuster = Adjuster(Way(), FULL)
    adjuster.learn(MODEL)
    assert adjuster.way_for([50, 70], 500, packed=True) == Way(max_tokens=70, recomputed=DEPTH)
    assert fastest([50, 70], MODEL, 500, Way(), FULL, packed=True) is None


@pytest.mark.parametrize("packed", [True, False])
def test_pieces_are_those_the_step_will_run(packed):
    lengths, limits = [7, 30, 12, 30, 3], MicroBatching(max_tokens=60)
    pieces = pieces_of(lengths, limits, packed=packed)
    assert pieces == (StepPieces(2, 42, 2, 3) if packed else StepPieces(2, 60, 2, 3))
    whole = pieces_of(lengths, MicroBatching(), packed=packed)
    assert whole == (StepPieces(1, 82, 5, 5) if packed else StepPieces(1, 150, 5, 5))


def test_a_way_in_words():
    assert str(Way()) == "whole batches"
    words = str(Way(max_tokens=1200, recomputed=3, offloaded=True))
    assert words == "1,200 tokens at once, 3 layers recomputed, activations offloaded"


def test_where_no_layer_was_seen_to_take_anything_the_plans_are_recomputed():
    adjuster = Adjuster(Way(max_tokens=300, recomputed=4), FULL)
    adjuster.learn(dataclasses.replace(MODEL, layer_bytes=0.0))
    assert adjuster.plan.recomputed == 4


def test_a_plan_that_is_kept_is_what_comes_next_whatever_was_learnt():
    adjuster = Adjuster(Way(max_tokens=300, recomputed=4), FULL)
    adjuster.learn(MODEL)
    adjuster.keep(Way(max_tokens=300, recomputed=4))
    assert adjuster.way_for([400] * 8, 10**9, packed=True) == Way(max_tokens=300, recomputed=4)
