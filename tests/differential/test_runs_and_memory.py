"""Random runs: saved, resumed, repeated, searched, with a budget, and out of memory at times."""

from __future__ import annotations

import pytest

from differential import check, drawn
from differential.selection import seeds_of


@pytest.mark.parametrize("seed", seeds_of("run"))
def test_is_the_stock_trainers_training(seed: int) -> None:
    check(drawn(seed))
