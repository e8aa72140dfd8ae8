"""The settings of a step: cut by the line of memory, smaller after a failure."""

from __future__ import annotations

import pytest

from memfit.engine.micro_batches import MicroBatching
from memfit.memory.memory_line import MemoryLine
from memfit.training.guard.adjusting import Dials, Pieces, StepSettings, pieces_of

DEPTH = 12
DIALS = Dials(DEPTH, offloads=True)
CAPTURED = Dials(DEPTH, captured=True)
LINE = MemoryLine(fixed_bytes=1000, token_bytes=1, layer_token_bytes=2)


# ---- after a failure ----


def test_a_failure_halves_the_piece_then_recomputes_then_offloads_then_gives_up():
    settings, tried = StepSettings(), []
    for rows, tokens in ((4, 400), (2, 200), (1, 100), (1, 100)):
        smaller = DIALS.smaller(settings, Pieces(1, tokens, rows))
        assert smaller is not None
        settings = smaller
        tried.append(settings)
    assert tried == [
        StepSettings(200), StepSettings(100), StepSettings(100, recomputed=DEPTH),
        StepSettings(100, recomputed=DEPTH, offloaded=True),
    ]  # fmt: skip
    assert DIALS.smaller(settings, Pieces(1, 100, 1)) is None


def test_a_captured_step_recomputes_more_before_it_is_cut():
    settings, tried = StepSettings(recomputed=10), []
    for _ in range(3):
        smaller = CAPTURED.smaller(settings, Pieces(1, 400, 4))
        assert smaller is not None
        settings = smaller
        tried.append(settings)
    assert tried == [
        StepSettings(recomputed=11), StepSettings(recomputed=12), StepSettings(200, recomputed=12)
    ]  # fmt: skip


# ---- each batch by its tokens ----


def test_a_short_batch_runs_whole_and_a_long_one_in_pieces_or_recomputed():
    limit, found = 6000, {}
    for length in (10, 40, 100, 400):
        settings = DIALS.fitting(StepSettings(), [length] * 8, LINE, limit, packed=True)
        pieces = pieces_of([length] * 8, settings.micro_batching, packed=True)
        assert LINE.peak_bytes(pieces.tokens, DIALS.kept_layers(settings)) <= limit
        found[length] = settings
    assert found[10] == StepSettings()
    assert found[100] == StepSettings(200)  # (6000 - 1000) / (1 + 12 x 2)
    # 400 tokens in one row need more than there is without recomputation.
    assert found[400].recomputed == DEPTH


def test_a_captured_batch_recomputes_just_as_many_layers_as_it_must():
    recomputed = [
        CAPTURED.fitting(StepSettings(), [tokens], LINE, 6000, packed=True).recomputed
        for tokens in (150, 250, 400)
    ]
    # (6000 - 1000) / 400 = 12.5 = 1 + 2 x 5.75: five layers can stay.
    assert recomputed == [0, 3, 7]


def test_a_captured_batch_that_never_fits_whole_is_cut_too():
    settings = CAPTURED.fitting(StepSettings(), [1000] * 4, LINE, 6000, packed=True)
    assert settings == StepSettings(1666, recomputed=DEPTH)


def test_where_nothing_fits_the_longest_row_is_tried_alone():
    settings = DIALS.fitting(StepSettings(), [50, 70], LINE, 500, packed=True)
    assert settings == StepSettings(70, recomputed=DEPTH)


def test_recomputing_the_last_layer_frees_nothing():
    """It is on the device for its own backward."""
    assert DIALS.kept_layers(StepSettings(recomputed=DEPTH)) == 1
    assert DIALS.kept_layers(StepSettings(recomputed=DEPTH - 1)) == 1
    assert Dials().kept_layers(StepSettings()) == 0


# ---- values ----


@pytest.mark.parametrize("packed", [True, False])
def test_pieces_are_those_the_step_will_run(packed):
    lengths, limits = [7, 30, 12, 30, 3], MicroBatching(max_tokens=60)
    pieces = pieces_of(lengths, limits, packed=packed)
    assert pieces == (Pieces(2, 42, 2) if packed else Pieces(2, 60, 2))
    whole = pieces_of(lengths, MicroBatching(), packed=packed)
    assert whole == (Pieces(1, 82, 5) if packed else Pieces(1, 150, 5))


def test_settings_in_words():
    assert str(StepSettings()) == "whole batches"
    words = str(StepSettings(1200, recomputed=3, offloaded=True))
    assert words == "1,200 tokens at once, 3 layers recomputed, activations offloaded"
