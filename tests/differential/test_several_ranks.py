"""Random trainings on two and four ranks, against one process of the stock Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from differential.selection import COUNT, FIRST
from differential.several_ranks import differences, run

DROPS_LAST_BATCH = 8019
SHARED = {
    2: [*range(FIRST, FIRST + COUNT // 5), DROPS_LAST_BATCH],
    4: range(FIRST, FIRST + COUNT // 20),
}
"""By the number of ranks; starting them is the larger part of their time."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    made = {}
    for ranks, seeds in SHARED.items():
        made[ranks] = tmp_path_factory.mktemp(f"ranks-{ranks}")
        run(seeds, ranks, made[ranks])
    return made


@pytest.mark.parametrize(
    ("ranks", "seed"), [(ranks, seed) for ranks, seeds in SHARED.items() for seed in seeds]
)
def test_ranks_are_the_stock_trainers_training(
    folders: dict[int, Path], ranks: int, seed: int
) -> None:
    assert differences(seed, ranks, folders[ranks]) == []
