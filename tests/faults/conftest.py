"""A small table, and the words that train on it by a plan that was made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentences import write_short_reviews

SETTINGS = ("--max-length", "16", "--batch-size", "8", "--learning-rate", "1e-3")


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 short reviews, all different."""
    return write_short_reviews(tmp_path_factory.mktemp("reviews") / "reviews.csv", 60)


@pytest.fixture(scope="session")
def by_plan(
    reviews: Path, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """`memfit train` without an output folder: 7 steps an epoch, and nothing to search for."""
    from memfit.cli import run

    out = tmp_path_factory.mktemp("planned") / "out"
    words = ["train", str(reviews), "--model", str(tiny_model_dir), *SETTINGS, "--epochs", "1"]
    assert run([*words, "--output-dir", str(out), "--quiet"]) == 0
    return [*words[:-2], "--plan", str(out / "plan.toml")]
