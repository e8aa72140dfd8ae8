"""A small table, and the words that train on it by a plan that was made once."""

from __future__ import annotations

from pathlib import Path

import pytest

SETTINGS = ("--max-length", "16", "--batch-size", "8", "--learning-rate", "1e-3")


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 short reviews, all different."""
    rows = "".join(f"{row % 2},服務人員都{'不很'[row % 2]}親切 {row}\n" for row in range(60))
    path = tmp_path_factory.mktemp("reviews") / "reviews.csv"
    path.write_text(f"label,review\n{rows}", encoding="utf-8")
    return path


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
