"""kill -9 at any moment, also while saving: resumed, the run ends with the very same weights."""

from __future__ import annotations

import random
import shutil
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
        process.join(600)
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
        wait = 600 if kills >= KILLS or attempts > 8 else moments.uniform(0, 1.1 * seconds)
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


def test_a_kill_between_the_last_save_and_its_rotation_leaves_no_checkpoint_too_many(
    clean: tuple[Path, float], tmp_path: Path
) -> None:
    expected, _ = clean
    root = tmp_path / "killed"
    shutil.copytree(expected, root)
    last = root / "run" / f"checkpoint-{STEPS - 1}"
    shutil.copytree(last, last.with_name(f"checkpoint-{STEPS - 2}"))
    process = in_child(train, root)
    process.join(600)
    assert process.exitcode == 0, (root / "said.txt").read_text()
    assert_same_run(root, expected)


COMMAND_KILLS = 8


def command(root: Path, words: list[str]) -> None:
    """`memfit train` in a process whose temporary files lie in the test's own folder."""
    import tempfile

    from memfit.cli import run

    tempfile.tempdir = str(root.parent / "temporary")
    raise SystemExit(run([*words, "--output-dir", str(root / "out"), "--quiet"]))


def test_the_command_killed_at_random_moments_is_resumed_to_the_same_result(
    by_plan: list[str], tmp_path: Path
) -> None:
    (tmp_path / "temporary").mkdir()
    from_the_start = [*by_plan, "--epochs", "4"]
    for name in ("warm", "clean"):
        started = time.perf_counter()
        process = in_child(command, tmp_path / name, from_the_start)
        process.join(600)
        assert process.exitcode == 0, (tmp_path / name / "said.txt").read_text()
    seconds = time.perf_counter() - started
    moments, kills, finished, attempts = random.Random(12), 0, 0, 0
    while kills < COMMAND_KILLS or attempts:
        root, attempts = tmp_path / f"killed-{finished}", attempts + 1
        begun = (root / "out" / "run.toml").exists()
        process = in_child(command, root, ["train", "--resume"] if begun else from_the_start)
        process.join(600 if kills >= COMMAND_KILLS else moments.uniform(0.3, 1.0) * seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
        else:
            assert process.exitcode == 0, (root / "said.txt").read_text()
            assert_same_result(root / "out", tmp_path / "clean" / "out")
            finished, attempts = finished + 1, 0
    assert kills == COMMAND_KILLS
    # What killed ones left of their tables is gone, but for the last one's own.
    assert len(list((tmp_path / "temporary").iterdir())) <= 1


def assert_same_result(out: Path, clean: Path) -> None:
    assert same_weights(out / "model.safetensors", clean / "model.safetensors")
    assert names_in(out) == names_in(clean)
    assert (out / "evaluation.json").read_text() == (clean / "evaluation.json").read_text()
