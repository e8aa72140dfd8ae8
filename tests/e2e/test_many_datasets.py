"""Several datasets in one command: a folder each, failures named, resumed where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memfit
from memfit.cli import run
from memfit.errors import OutputError
from memfit.run.several_datasets import folder_names, train_many

pytestmark = pytest.mark.usefixtures("undrawn")


def write_table(path: Path, rows: int = 40) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{index % 2},{('不', '很')[index % 2]}親切{index % 5}" for index in range(rows)]
    path.write_text("label,review\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_folders_are_named_after_the_files_and_clashes_resolved() -> None:
    names = folder_names(["a.csv", "x/a.csv", "y/A.jsonl", "org/corpus", "b c.tar.csv"])
    assert list(names) == ["a", "a-2", "A-3", "corpus", "b-c.tar"]


def test_a_failed_dataset_is_named_and_stops_none_of_the_others(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, last = write_table(tmp_path / "first.csv"), write_table(tmp_path / "last.csv")
    broken = tmp_path / "broken.csv"
    broken.write_text("x\n1\n", encoding="utf-8")
    output = tmp_path / "runs"
    code = run(
        ["train", str(first), str(broken), str(last), "--model", str(tiny_model_dir),
         "--max-length", "16", "--max-steps", "1", "--exact", "--output-dir", str(output)]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 1
    assert "1 of 3 datasets failed: broken" in printed.err
    assert "finished" in printed.out
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    states = {one["name"]: one["status"] for one in summary["datasets"]}
    assert states == {"first": "finished", "broken": "failed", "last": "finished"}
    assert all((output / name / "model.safetensors").is_file() for name in ("first", "last"))
    # Mended, and gone on with: what is finished stays as it is.
    before = (output / "first" / "model.safetensors").stat().st_mtime_ns
    write_table(broken)
    assert run(["train", "--resume", "--output-dir", str(output), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["status"] for one in said["datasets"]] == ["finished"] * 3
    assert said["datasets"][1]["rows"] == 32  # four rows a text, one text of each class held out
    assert (output / "first" / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(OutputError, match="goes on with the datasets of"):
        memfit.finetune_many([tmp_path / "other.csv"], output_dir=output, resume=True)


def test_what_was_done_before_an_interruption_is_kept(tmp_path: Path) -> None:
    files = [str(write_table(tmp_path / f"{name}.csv")) for name in "abc"]
    result = memfit_result()
    trained: list[str] = []

    def train(data: str, folder: Path, begun: bool, options: dict[str, Any]) -> Any:
        assert Path(data).stem == folder.name
        assert options == {"epochs": 1}
        assert not begun
        trained.append(folder.name)
        if folder.name == "b" and trained.count("b") == 1:
            raise KeyboardInterrupt
        return result

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        train_many(files, tmp_path / "runs", {"epochs": 1}, train, said.append, resume=False)
    assert "stopped at b; 1 of 3 datasets are done" in said[-1]
    with pytest.raises(OutputError, match="or go on with --resume"):
        train_many(files, tmp_path / "runs", {}, train, said.append, resume=False)
    done = train_many([], tmp_path / "runs", {}, train, said.append, resume=True)
    assert [one.status for one in done.outcomes] == ["finished"] * 3
    assert trained == ["a", "b", "a", "b", "c"]


def memfit_result() -> Any:
    from types import SimpleNamespace

    from memfit.records.results import RunSummary

    summary = RunSummary(
        model="m", task="single_label", metrics={"f1": 0.5}, data={"train_rows": 9}
    )
    return SimpleNamespace(summary=summary)
