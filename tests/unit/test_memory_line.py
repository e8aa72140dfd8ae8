"""The line of memory: fitted to points, corrected by one, asked for what fits."""

from __future__ import annotations

import pytest

from memfit.memory.memory_line import MemoryLine, MemoryPoint

LINE = MemoryLine(fixed_bytes=2e9, token_bytes=30_000, layer_token_bytes=9_000)


def point(tokens: int, kept_layers: int) -> MemoryPoint:
    return MemoryPoint(tokens, kept_layers, LINE.peak_bytes(tokens, kept_layers))


def test_a_line_through_four_points_foretells_a_fifth() -> None:
    settings = [(1024, 2), (1024, 22), (3000, 2), (3000, 22)]
    fitted = MemoryLine.through([point(*one) for one in settings])
    assert fitted.peak_bytes(2048, 12) == pytest.approx(LINE.peak_bytes(2048, 12), rel=1e-9)


def test_a_correction_moves_the_line_through_the_measurement() -> None:
    corrected = LINE.corrected(MemoryPoint(2048, 12, 2.5e9))
    assert corrected.peak_bytes(2048, 12) == pytest.approx(2.5e9)
    assert corrected.bytes_per_token(12) == LINE.bytes_per_token(12)


def test_the_most_tokens_are_the_last_that_fit() -> None:
    tokens = LINE.most_tokens(3e9, 12)
    assert LINE.peak_bytes(tokens, 12) <= 3e9 < LINE.peak_bytes(tokens + 1, 12)
    assert LINE.most_tokens(1e9, 12) == 0


def test_the_most_kept_layers_are_the_last_that_fit() -> None:
    kept = LINE.most_kept_layers(2.3e9, 2048, 24)
    assert kept is not None
    assert LINE.peak_bytes(2048, kept) <= 2.3e9 < LINE.peak_bytes(2048, kept + 1)
    assert LINE.most_kept_layers(1e9, 2048, 24) is None
