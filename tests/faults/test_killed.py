"""kill -9 at any moment, also while saving: resumed, the run ends with the very same weights."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from small_run import STEPS, counts_of, in_child, names_in, rows_by_step, same_weights, train

KILLS = 50


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The run nobody disturbed, and the seconds it took."""
    root = tmp_path_factory.mktemp("clean")
    for attempt in ("warm", "clean"):  # the first one starts the fork server
        started = time.perf_counter()
        process = in_child(train, root / attempt)
        process.join(120)
        assert process.exitcode == 0, (root / attempt / "said.txt").read_text()
    return root / "clean", time.perf_counter() - started


def assert_same_run(root: Path, clean: Path) -> None:
    """Weights, counts, rows and files are those of the run that was not disturbed."""
    assert same_weights(root / "final.safetensors", clean / "final.safetensors")
    counts = counts_of(root / "run" / f"checkpoint-{STEPS}")
    assert counts == counts_of(clean / "run" / f"checkpoint-{STEPS}")
    assert counts["state"] == counts["schedule"] == STEPS
    assert counts["optimizer"] == {STEPS}
    assert counts["logged"] == list(range(1, STEPS + 1))
    assert names_in(root / "run") == names_in(clean / "run")
    expected = rows_by_step(clean / "rows.jsonl")
    begun = rows_by_step(root / "rows.jsonl")
    assert begun.keys() == expected.keys()
    for step, batches in begun.items():
        assert all(rows == expected[step][0] for rows in batches), step


def test_fifty_kills_at_random_moments_change_nothing(
    clean: tuple[Path, float], tmp_path: Path
) -> None:
    expected, seconds = clean
    moments = random.Random(6)
    kills = in_a_save = finished = attempts = 0
    while kills < KILLS or attempts:
        root = tmp_path / f"run-{finished}"
        process = in_child(train, root)
        attempts += 1
        # After the last kill, and where a run was killed often already, it may come to its end.
        wait = 120 if kills >= KILLS or attempts > 8 else moments.uniform(0, 1.1 * seconds)
        process.join(wait)
        if process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
            in_a_save += (root / "run" / ".unfinished").exists()
            continue
        assert process.exitcode == 0, (root / "said.txt").read_text()
        assert_same_run(root, expected)
        finished, attempts = finished + 1, 0
    assert kills == KILLS
    assert finished >= 5
    # Most of a run of such a small model is saving; without these the test would show little.
    assert in_a_save >= 5, in_a_save
