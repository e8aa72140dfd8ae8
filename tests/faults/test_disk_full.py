"""The disk fills up at any write of a save: the last good checkpoint stays, nothing half does."""

# ruff: noqa: ARG002 - the Trainer decides what callbacks are given.
from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_run import STEPS, in_child, model_of, names_in, same_weights, trainer_in
from transformers import TrainerCallback

from memfit.cli import run
from memfit.errors import SaveError
from memfit.training.checkpoints import problem_with

GOOD_STEPS = 2
_PAGE = 4096
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000


class AtStep(TrainerCallback):
    """Calls something when a step is done, before it is saved."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


def begun_in(folder: Path) -> Path:
    """A run with two good checkpoints."""
    trainer_in(folder, max_steps=GOOD_STEPS).train()
    return folder


def assert_only_good_ones(folder: Path, before: list[str]) -> None:
    assert names_in(folder) == before
    for step in range(1, GOOD_STEPS + 1):
        assert problem_with(folder / f"checkpoint-{step}") == ""


def save_error_of(trainer: Any) -> SaveError | None:
    """Goes on with the run; what it was stopped by, if it was."""
    try:
        trainer.train(resume_from_checkpoint=True)
    except SaveError as error:
        return error
    return None


# ---- a real disk that is full, in a mount of the child's own ----


def fill_at_every_page(root: Path) -> None:
    """Leaves 0, 1, 2, ... pages free when step 3 is saved, until saving works."""
    disk = root / "disk"
    disk.mkdir()
    own_mounts(disk, size_bytes=8 << 20)
    begun = begun_in(root / "begun")
    reasons: set[str] = set()
    for pages in range(400):
        run_dir = disk / "run"
        shutil.copytree(begun, run_dir)
        before = names_in(run_dir)
        fill = AtStep(GOOD_STEPS + 1, lambda pages=pages: leave_free(disk, pages))
        trainer = trainer_in(run_dir, fill, max_steps=GOOD_STEPS + 1, save_total_limit=3)
        refused = save_error_of(trainer)
        if refused is None:
            assert problem_with(run_dir / f"checkpoint-{GOOD_STEPS + 1}") == ""
            (root / "pages.txt").write_text(f"{pages} {len(reasons)}")
            return
        reasons.add(f"{type(refused.__cause__).__module__}: {refused.__cause__}")
        assert re.search(r"the disk is (probably )?full \(.* are free in ", str(refused)), refused
        assert refused.last_good == run_dir / f"checkpoint-{GOOD_STEPS}"
        (disk / "filler").unlink()
        assert_only_good_ones(run_dir, before)
        if pages % 10 == 0:  # with room again it goes on
            trainer = trainer_in(run_dir, max_steps=GOOD_STEPS + 1, save_total_limit=3)
            trainer.train(resume_from_checkpoint=True)
            assert problem_with(run_dir / f"checkpoint-{GOOD_STEPS + 1}") == ""
        shutil.rmtree(run_dir)
    raise AssertionError("the save never worked")


def own_mounts(disk: Path, size_bytes: int) -> None:
    """A small disk that only this process sees, and that goes with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_MOUNTS) != 0:
        assert libc.unshare(_NEW_USER | _NEW_MOUNTS) == 0, os.strerror(ctypes.get_errno())
        for name, text in (
            ("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1"),
        ):  # fmt: skip
            Path("/proc/self", name).write_text(text)
    options = f"size={size_bytes}".encode()
    made = libc.mount(b"none", str(disk).encode(), b"tmpfs", 0, options)
    assert made == 0, os.strerror(ctypes.get_errno())


def leave_free(disk: Path, pages: int) -> None:
    free_bytes = shutil.disk_usage(disk).free
    with (disk / "filler").open("wb") as file:
        file.write(b"\0" * max(free_bytes - pages * _PAGE, 0))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "unshare"), reason="needs mounts of its own")
def test_a_disk_that_fills_up_at_any_page_of_a_save(tmp_path: Path) -> None:
    process = in_child(fill_at_every_page, tmp_path)
    process.join(600)
    assert process.exitcode == 0, (tmp_path / "said.txt").read_text()
    pages, reasons = map(int, (tmp_path / "pages.txt").read_text().split())
    assert pages > 30  # so many places of the save were hit
    assert reasons >= 3  # by Python, by torch's own writer, by that of safetensors


# ---- the same without a mount: the system refuses files beyond a size ----


@pytest.mark.parametrize(
    "phase", ["_save", "_save_optimizer_and_scheduler", "_save_rng_state", "_write_beside"]
)
@pytest.mark.parametrize("limit_bytes", [0, 100, 1000])
def test_a_file_the_system_refuses_in_any_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, limit_bytes: int
) -> None:
    folder = begun_in(tmp_path / "run")
    before = names_in(folder)
    trainer = trainer_in(folder, max_steps=GOOD_STEPS + 1, save_total_limit=3)
    owner = trainer.checkpoints if phase == "_write_beside" else trainer
    work, limits = getattr(owner, phase), resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*args: Any, **kwargs: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
        try:
            return work(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(owner, phase, limited)
    with pytest.raises(SaveError, match=r"checkpoint-3 could not be written: .* are free in"):
        trainer.train(resume_from_checkpoint=True)
    assert_only_good_ones(folder, before)


# ---- and at every call that ends a save: fsync, rename ----


def failing_at(
    monkeypatch: pytest.MonkeyPatch, name: str, call: int, under: Path | None = None
) -> list[int]:
    """The n-th call from now on finds no room; of those to a path `under` that one, if given."""
    real, calls = getattr(os, name), [0]

    def maybe(*args: Any, **kwargs: Any) -> Any:
        calls[0] += under is None or Path(args[-1]).is_relative_to(under)
        if calls[0] == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, maybe)
    return calls


def test_every_single_call_that_brings_a_checkpoint_to_the_disk_may_fail(tmp_path: Path) -> None:
    begun = begun_in(tmp_path / "begun")
    failed: dict[str, int] = {"fsync": 0, "rename": 0}
    for name in failed:
        for call in range(1, 100):
            folder = tmp_path / f"{name}-{call}"
            shutil.copytree(begun, folder)
            before = names_in(folder)
            with pytest.MonkeyPatch.context() as patch:
                fail = AtStep(3, lambda n=name, c=call, p=patch: failing_at(p, n, c))
                trainer = trainer_in(folder, fail, max_steps=3, save_total_limit=3)
                refused = save_error_of(trainer)
            if refused is None:
                break
            failed[name] = call
            assert "the disk is full" in str(refused)
            assert f"last good checkpoint is {folder / 'checkpoint-2'}" in str(refused)
            assert_only_good_ones(folder, before)
    assert failed["fsync"] == 10  # eight files, the manifest, the folder
    assert failed["rename"] == 1


def test_a_failed_rotation_ends_no_run(tmp_path: Path) -> None:
    """The checkpoint is there already; what could not be removed is removed next time."""
    folder = begun_in(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        fail = AtStep(3, lambda: failing_at(patch, "rename", 2))
        trainer_in(folder, fail, max_steps=4).train(resume_from_checkpoint=True)
    assert sorted(item.name for item in folder.iterdir()) == ["checkpoint-3", "checkpoint-4"]


# ---- the command ----


def test_the_command_says_where_to_go_on_and_ends_with_1(
    tmp_path: Path, by_plan: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    words = [*by_plan, "--epochs", "2", "--quiet", "--output-dir"]
    with pytest.MonkeyPatch.context() as patch:
        # 15 calls or so bring a checkpoint to the disk: this is in the second epoch's.
        failing_at(patch, "fsync", 25)
        assert run([*words, str(output)]) == 1
    said = capsys.readouterr().err
    assert "the disk is full" in said
    assert "could not be written" in said
    assert f"go on with: memfit train --resume --output-dir {output}" in said
    assert "the last good checkpoint is" in said
    assert [item.name for item in (output / "checkpoints").iterdir()] == ["checkpoint-7"]
    assert run(["train", "--resume", "--output-dir", str(output), "--quiet"]) == 0
    assert run([*words, str(tmp_path / "whole")]) == 0
    name = "model.safetensors"
    assert same_weights(output / name, tmp_path / "whole" / name)


@pytest.mark.parametrize("call", range(1, 8))
def test_the_result_itself_may_find_no_room(
    tmp_path: Path, by_plan: list[str], capsys: pytest.CaptureFixture[str], call: int
) -> None:
    output = tmp_path / "out"
    words = [*by_plan, "--max-steps", "2", "--save-strategy", "no", "--quiet"]
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        failing_at(patch, "replace", call, under=output)
        code = run([*words, "--output-dir", str(output)])
    said = capsys.readouterr().err
    assert code == 1, said
    assert "could not be written: the disk is full" in said
    assert "Traceback" not in said
    left = {item.name for item in output.iterdir()} if output.exists() else set()
    assert not {name for name in left if name.startswith(".")}
    assert "summary.json" not in left


def test_tokens_that_cannot_be_kept_for_the_next_run_cost_none(
    tmp_path: Path, by_plan: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("MEMFIT_CACHE", str(cache))
    calls = failing_at(monkeypatch, "replace", 1, under=cache / "tokens")
    words = [*by_plan, "--max-steps", "2", "--quiet", "--output-dir", str(tmp_path / "out")]
    assert run(words) == 0
    assert calls[0] == 2
    assert len(list((cache / "tokens").iterdir())) == 1


def test_the_model_of_these_tests_is_the_one_that_is_saved(tmp_path: Path) -> None:
    """A save in nine files: what the numbers above count."""
    folder = begun_in(tmp_path / "run")
    files = {item.name for item in (folder / "checkpoint-2").iterdir()}
    assert files == {
        "model.safetensors", "config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth",
        "trainer_state.json", "training_args.bin", "memfit.json", "manifest.json",
    }  # fmt: skip
    assert sum(p.numel() for p in model_of().parameters()) < 10_000
    assert STEPS == 15
