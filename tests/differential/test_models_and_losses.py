"""Random models, heads, losses, data, optimizers and strategies: one training, no checkpoint."""

from __future__ import annotations

import pytest

from differential import check, drawn
from differential.selection import seeds_of


@pytest.mark.parametrize("seed", seeds_of("model"))
def test_is_the_stock_trainers_training(seed: int) -> None:
    check(drawn(seed))
