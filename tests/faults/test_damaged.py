"""A checkpoint cut in half, or with a bit turned over, in any file: the one before is taken."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_run import counts_of, names_in, trainer_in

from memfit.errors import OutputError
from memfit.training.checkpoints import newest_good, problem_with

STEPS = 5
FILES = (
    "model.safetensors", "config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth",
    "trainer_state.json", "training_args.bin", "memfit.json", "manifest.json",
)  # fmt: skip


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def missing(path: Path) -> None:
    path.unlink()


def turn_bit(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(bytes(content))


def turn_some_bit(path: Path) -> None:
    turn_bit(path, random.Random(path.name).randrange(path.stat().st_size * 8))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], Path]:
    """A run cut after step 4, the weights of the whole one, and its folder."""
    root = tmp_path_factory.mktemp("damaged")
    trainer_in(root / "begun", max_steps=4, lr_scheduler_type="constant").train()
    whole = trainer_in(root / "whole", max_steps=STEPS, lr_scheduler_type="constant")
    whole.train()
    return root / "begun", whole.model.state_dict(), root / "whole"


@pytest.mark.parametrize("damage", [cut_in_half, emptied, grown, missing, turn_some_bit])
@pytest.mark.parametrize("name", FILES)
def test_any_damage_to_any_file_is_seen_and_the_run_ends_the_same(
    begun: tuple[Path, dict[str, torch.Tensor], Path],
    tmp_path: Path,
    damage: Callable[[Path], None],
    name: str,
) -> None:
    folder, expected, whole = begun
    run = shutil.copytree(folder, tmp_path / "run")
    damage(run / "checkpoint-4" / name)
    resumed = trainer_in(run, max_steps=STEPS, lr_scheduler_type="constant")
    with pytest.warns(UserWarning, match=rf"checkpoint-4 is passed over: {name}"):
        resumed.train(resume_from_checkpoint=True)
    weights = resumed.model.state_dict()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    # The damaged one was written again on the way.
    assert names_in(run) == names_in(whole)
    for step in (STEPS - 1, STEPS):
        assert counts_of(run / f"checkpoint-{step}")["optimizer"] == {step}


def test_every_bit_of_a_small_file_counts(
    begun: tuple[Path, dict[str, torch.Tensor], Path], tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(begun[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    assert problem_with(checkpoint) == ""
    for name in ("memfit.json", "manifest.json"):
        path = checkpoint / name
        content, unseen = path.read_bytes(), []
        for place in range(0, len(content) * 8, 1 if name == "memfit.json" else 13):
            turn_bit(path, place)
            if not problem_with(checkpoint):
                unseen.append(place)
            path.write_bytes(content)
        assert unseen == []
    assert problem_with(checkpoint) == ""


def test_several_damaged_ones_are_passed_over_to_the_newest_good(
    begun: tuple[Path, dict[str, torch.Tensor], Path], tmp_path: Path
) -> None:
    for step in (2, 3, 10, 20):
        shutil.copytree(begun[0] / "checkpoint-4", tmp_path / f"checkpoint-{step}")
    emptied(tmp_path / "checkpoint-20" / "optimizer.pt")
    missing(tmp_path / "checkpoint-10" / "manifest.json")
    found = newest_good(tmp_path)
    assert found.good == tmp_path / "checkpoint-3"
    assert [path.name for path, _ in found.passed_over] == ["checkpoint-20", "checkpoint-10"]
    assert "optimizer.pt has 0 of its" in found.notes()[0]
    assert "manifest.json, which is written last, is missing" in found.notes()[1]


def test_where_none_is_good_nothing_is_started_over(
    begun: tuple[Path, dict[str, torch.Tensor], Path], tmp_path: Path
) -> None:
    run = shutil.copytree(begun[0], tmp_path / "run")
    for step in (3, 4):
        cut_in_half(run / f"checkpoint-{step}" / "model.safetensors")
    before = names_in(run)
    with pytest.raises(OutputError, match=r"no checkpoint in .* is whole.*checkpoint-4.*-3"):
        trainer_in(run, max_steps=STEPS).train(resume_from_checkpoint=True)
    assert names_in(run) == before


def test_an_undamaged_run_says_nothing(
    begun: tuple[Path, dict[str, torch.Tensor], Path], tmp_path: Path
) -> None:
    run = shutil.copytree(begun[0], tmp_path / "run")
    resumed = trainer_in(run, max_steps=STEPS, lr_scheduler_type="constant")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.train(resume_from_checkpoint=True)
    weights = resumed.model.state_dict()
    assert all(torch.equal(weights[key], begun[1][key]) for key in begun[1])
