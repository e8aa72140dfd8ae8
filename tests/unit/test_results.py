"""The result folder: claiming it, cleaning up after failures, and reading it back."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from memfit.config.files import atomic_writer, staged_files, write_json
from memfit.errors import OutputError
from memfit.memory.components import Component, MemoryPeak
from memfit.records.evaluation import ClassRow, Evaluation, Mistake
from memfit.records.results import (
    MemorySummary,
    RunFolder,
    RunSummary,
    claim_output_folder,
    config_digest,
    read_evaluation,
    read_summary,
    versions,
    write_evaluation,
    write_summary,
)


def tree(folder: Path) -> list[str]:
    return sorted(str(item.relative_to(folder)) for item in folder.rglob("*"))


def summary() -> RunSummary:
    peak = MemoryPeak(
        components=MappingProxyType({Component.WEIGHTS: 400, Component.ACTIVATIONS: 600}),
        allocated_bytes=1000,
        reserved_bytes=1200,
        device_bytes=1700,
        module="bert.encoder.layer.3",
    )
    return RunSummary(
        model="hfl/rbt3",
        task="single_label",
        labels=("負評", "正評"),
        metrics={"f1": 0.925, "accuracy": 0.9},
        averaging="binary",
        positive="正評",
        training={"steps": 219, "epochs": 1.0, "learning_rate": 2e-5},
        data={"train_rows": 6988, "validation_rows": 777},
        seconds={"train": 61.5},
        memory=MemorySummary(budget_bytes=4 * 10**9, predicted=peak),
        versions=versions(),
    )


def test_a_summary_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = write_summary(tmp_path, summary())
    assert path == tmp_path / "summary.json"
    assert "正評" in path.read_text(encoding="utf-8")  # readable, not \u escapes
    again = read_summary(tmp_path)
    assert again.memory.predicted is not None
    assert dict(again.memory.predicted.components) == {"weights": 400, "activations": 600}
    assert again.to_dict() == summary().to_dict()


def test_what_json_cannot_hold_is_written_as_what_it_can(tmp_path: Path) -> None:
    path = write_json(
        tmp_path / "a.json",
        {"f1": np.float32(0.5), "rows": np.int64(3), "loss": float("nan"), "at": tmp_path, "x": ()},
    )
    assert json.loads(path.read_text()) == {
        "f1": 0.5,
        "rows": 3,
        "loss": None,
        "at": str(tmp_path),
        "x": [],
    }


def test_a_summary_of_a_later_version_is_still_read(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {**summary().to_dict(), "new_in_2": 1})
    assert read_summary(tmp_path).metrics["f1"] == 0.925


@pytest.mark.parametrize("text", ["{", "[1]", '{"model": "m"}', '{"memory": 3}', "\xff"])
def test_a_file_that_is_no_summary_is_an_output_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(OutputError, match=r"summary\.json"):
        read_summary(tmp_path)


def test_a_folder_without_summary_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"no summary\.json in .*; name the output folder"):
        read_summary(tmp_path)


def test_an_evaluation_comes_back_with_its_mistakes(tmp_path: Path) -> None:
    evaluation = Evaluation(
        task="single_label",
        rows=3,
        metrics={"f1": 0.5},
        classes=(ClassRow("負評", 0.5, 1.0, 2 / 3, 2),),
        confusion=((1, 0), (1, 1)),
    )
    mistakes = (Mistake("房間很髒", "負評", "正評", 0.98),)
    assert read_evaluation(tmp_path) is None
    write_evaluation(tmp_path, evaluation, mistakes)
    assert read_evaluation(tmp_path) == (evaluation, mistakes)
    (tmp_path / "evaluation.json").write_text('{"rows": 3}')
    with pytest.raises(OutputError, match="not an evaluation"):
        read_evaluation(tmp_path)


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    target.write_text("old")

    def fail() -> None:
        with atomic_writer(target) as file:
            file.write("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert tree(tmp_path) == ["out.csv"]
    assert target.read_text() == "old"
    with atomic_writer(target) as file:
        file.write("half an emoji \ud83d")
    assert target.read_text() == "half an emoji ?"
    assert tree(tmp_path) == ["out.csv"]


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_written_files_are_as_readable_as_any(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    path = write_json(tmp_path / "a.json", {})
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_a_new_folder_is_made_and_kept(tmp_path: Path) -> None:
    with claim_output_folder(tmp_path / "runs" / "a") as claim:
        (claim.path / "run.toml").write_text("")
        claim.keep()
    assert tree(tmp_path) == ["runs", "runs/a", "runs/a/run.toml"]


def fail_in(path: Path, *, keep: bool = False, resume: bool = False) -> None:
    with claim_output_folder(path, resume=resume) as claim:
        (claim.path / "checkpoints").mkdir(exist_ok=True)
        (claim.path / "checkpoints" / "part").write_text("x")
        if keep:
            claim.keep()
        raise RuntimeError("no such column")


def test_a_run_that_fails_before_its_first_step_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        fail_in(tmp_path / "runs" / "a")
    assert tree(tmp_path) == []


def test_a_run_that_fails_early_leaves_an_existing_empty_folder_as_it_was(tmp_path: Path) -> None:
    (tmp_path / ".gitkeep").write_text("")
    with pytest.raises(RuntimeError):
        fail_in(tmp_path)
    assert tree(tmp_path) == [".gitkeep"]


def test_a_run_that_fails_later_keeps_its_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        fail_in(tmp_path / "a", keep=True)
    assert (tmp_path / "a" / "checkpoints" / "part").exists()


@pytest.mark.parametrize("name", ["run.toml", "summary.json", "checkpoints", "model.safetensors"])
def test_a_folder_with_another_run_is_refused_and_untouched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(OutputError, match=r"already holds another run.*--resume"):
        fail_in(tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    assert tree(tmp_path) == [name]


def test_a_folder_with_other_files_is_refused_and_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "thesis.docx").write_text("")
    with pytest.raises(OutputError, match=r"already holds files \(thesis\.docx\)") as caught:
        fail_in(tmp_path)
    assert "--resume" not in str(caught.value)


def test_resuming_takes_the_folder_of_a_run_and_never_cleans_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(RuntimeError):
        fail_in(tmp_path, resume=True)
    assert "run.toml" in tree(tmp_path)


def test_resuming_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no run to resume"):
        fail_in(tmp_path / "nowhere", resume=True)
    assert tree(tmp_path) == []


def test_what_a_killed_write_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".run.toml.abcd_123", ".summary.json.x7x7x7x7", ".DS_Store"):
        (tmp_path / name).write_text("half")
    (tmp_path / ".unfinished" / "deep").mkdir(parents=True)
    with claim_output_folder(tmp_path) as claim:
        assert tree(claim.path) == [".DS_Store"]
        claim.keep()
    (tmp_path / ".thesis.docx.abcd_123").write_text("mine")
    with pytest.raises(OutputError, match=r"already holds files \(\.thesis\.docx\.abcd_123\)"):
        fail_in(tmp_path)
    assert (tmp_path / ".thesis.docx.abcd_123").read_text() == "mine"


def test_several_files_come_together_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    with staged_files(tmp_path) as place:
        (place / "a.txt").write_text("new")
        (place / "inner").mkdir()
        (place / "inner" / "b.txt").write_text("b")
        assert (tmp_path / "a.txt").read_text() == "old"
    assert tree(tmp_path) == ["a.txt", "inner", "inner/b.txt"]
    assert (tmp_path / "a.txt").read_text() == "new"

    def fail() -> None:
        with staged_files(tmp_path) as place:
            (place / "a.txt").write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert tree(tmp_path) == ["a.txt", "inner", "inner/b.txt"]
    assert (tmp_path / "a.txt").read_text() == "new"


def test_a_file_as_output_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(OutputError, match="lies under a file"):
        fail_in(tmp_path / "a")
    with pytest.raises(OutputError, match="lies under a file"):
        fail_in(tmp_path / "a" / "b")
    assert tree(tmp_path) == ["a"]


def test_a_place_one_may_not_write_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot (read|write to) the output folder"):
        fail_in(Path("/proc/memfit") if os.name == "posix" else tmp_path / "con:")


def checkpoint(folder: Path, step: int, *, complete: bool = True) -> Path:
    path = folder / "checkpoints" / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"12345")
    if complete:
        (path / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": step}]}))
    return path


def test_checkpoints_are_sorted_by_step_and_cut_off_ones_left_out(tmp_path: Path) -> None:
    late, early = checkpoint(tmp_path, 100), checkpoint(tmp_path, 20)
    checkpoint(tmp_path, 300, complete=False)
    folder = RunFolder(tmp_path)
    assert folder.checkpoints() == [early, late]
    assert folder.trainer_state()["log_history"] == [{"step": 100}]
    (tmp_path / "trainer_state.json").write_text('{"log_history": [{"step": 219}]}')
    assert folder.trainer_state()["log_history"] == [{"step": 219}]
    assert RunFolder(tmp_path / "none").trainer_state() == {}


def test_the_digest_changes_with_the_configuration() -> None:
    assert config_digest("a = 1") == config_digest("a = 1") != config_digest("a = 2")
    assert len(config_digest("")) == 12


def test_versions_name_what_numbers_depend_on() -> None:
    found = versions()
    assert {"memfit", "python", "torch", "transformers"} <= set(found)
    assert all(found.values())
