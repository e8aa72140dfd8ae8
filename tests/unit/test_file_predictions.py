"""`predict --file`: rows stream in the file's order, and a killed run goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.cli import run
from memfit.data.table_files import open_file
from memfit.data.tables import Row, Table
from memfit.errors import OutputError
from memfit.run import file_predictions, partial_output
from memfit.run.file_predictions import FilePredictions, predict_file
from memfit.run.inference import Classifier
from memfit.run.signals import Stopped
from memfit.waiting import telling
from sentences import SENTENCES
from waits import without_waits

ROWS, WINDOW, MANY = 50, 7, 6000
TEXTS = [(SENTENCES[row % len(SENTENCES)] * 3)[: 3 + 11 * row % 40] for row in range(ROWS)]


@pytest.fixture(scope="module")
def classifier(tiny_model_dir: Path) -> Classifier:
    return Classifier.load(tiny_model_dir)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window is kept as soon as it is written."""
    monkeypatch.setattr(file_predictions, "CPU_WINDOW_ROWS", WINDOW)
    monkeypatch.setattr(partial_output, "KEPT_AFTER_SECONDS", 0.0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.csv"
    lines = [f"{row},{text}\n" for row, text in enumerate(TEXTS)]
    path.write_text("id,text\n" + "".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def whole(classifier: Classifier, source: Path, tmp_path: Path) -> bytes:
    """What a run writes that nothing stops."""
    classifier.predict_file(source, tmp_path / "whole.csv")
    return (tmp_path / "whole.csv").read_bytes()


def table_of(source: Path, error: BaseException, at_row: int) -> Table:
    """The table of the file; its reader raises when it has come to a row."""
    table = open_file(source, None)

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        for number, row in enumerate(table.read(wanted)):
            if number == at_row:
                raise error
            yield row
        if at_row == ROWS:
            raise error

    return dataclasses.replace(table, read=read)


def stopped(
    classifier: Classifier, source: Path, target: Path, at_row: int, error: BaseException
) -> None:
    """Predicts until a row, where the run is ended; half a window is written beyond what counts."""
    with pytest.raises(type(error)):
        predict_file(classifier, table_of(source, error, at_row), source, target)
    with target.with_name("out.csv.partial").open("ab") as file:
        file.write(b"48,half a wind")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("out"))


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "json", "txt", "parquet"])
def test_rows_stream_in_the_order_of_the_file(
    classifier: Classifier, tmp_path: Path, ending: str
) -> None:
    source, target = tmp_path / f"in.{ending}", tmp_path / "out.jsonl"
    rows = [{"id": str(row), "text": text} for row, text in enumerate(TEXTS)]
    if ending == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    elif ending == "json":
        source.write_text(json.dumps(rows), encoding="utf-8")
    elif ending == "jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        mark = "," if ending == "csv" else "\t"
        lines = [mark.join(row.values()) + "\n" for row in [{"id": "id", "text": "text"}, *rows]]
        source.write_text("".join(lines), encoding="utf-8")
    table, ahead = open_file(source, None), []

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        for number, row in enumerate(table.read(wanted)):
            ahead.append(number - kept_rows(target))
            yield row

    watched = dataclasses.replace(table, read=read)
    assert predict_file(classifier, watched, source, target).rows == ROWS
    assert len(ahead) == ROWS
    assert max(ahead) < WINDOW  # no row is read before the window before it is written
    written = [json.loads(line) for line in target.read_text("utf-8").splitlines()]
    assert [row["text"] for row in written] == TEXTS
    expected = classifier.predict(TEXTS)
    assert [row["label"] for row in written] == [answer.label for answer in expected]
    assert [row["score"] for row in written] == pytest.approx(
        [answer.score for answer in expected], abs=2e-6
    )


def kept_rows(target: Path) -> int:
    """How many rows a run that is killed now goes on from."""
    state = target.with_name(f"{target.name}.partial.json")
    return int(json.loads(state.read_text())["rows"]) if state.exists() else 0


def test_long_texts_make_short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_predictions, "WINDOW_CHARS", 10)
    rows = iter([("a" * 11, 1), ("b", None), ("c" * 5, "c" * 5), ("d",), ("e",)])
    sizes = [len(window) for window in file_predictions._windows(rows, 3)]
    assert sizes == [1, 2, 2]


@pytest.mark.parametrize("at_row", [0, 3, WINDOW, 22, ROWS - 1, ROWS])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), Stopped(signal.SIGTERM), RuntimeError("CUDA out of memory")]
)
def test_a_run_that_is_stopped_goes_on_where_it_was(
    classifier: Classifier,
    source: Path,
    whole: bytes,
    tmp_path: Path,
    at_row: int,
    error: BaseException,
) -> None:
    target = tmp_path / "out.csv"
    target.write_text("old")
    stopped(classifier, source, target, at_row, error)
    assert target.read_text() == "old"
    assert names_in(tmp_path) == ["out.csv", "out.csv.partial", "out.csv.partial.json"]
    done = classifier.predict_file(source, target)
    complete = at_row // WINDOW * WINDOW
    assert done == FilePredictions(target, ROWS, 0, "label", "score", resumed_rows=complete)
    assert target.read_bytes() == whole
    assert names_in(tmp_path) == ["out.csv"]


def test_only_the_rows_that_are_missing_are_predicted(
    classifier: Classifier, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, predicted = tmp_path / "out.csv", 0
    stopped(classifier, source, target, 30, KeyboardInterrupt())
    forward = Classifier.forward

    def counting(self: Classifier, rows: list[dict[str, list[int]]]) -> Any:
        nonlocal predicted
        predicted += len(rows)
        return forward(self, rows)

    monkeypatch.setattr(Classifier, "forward", counting)
    classifier.predict_file(source, target)
    assert predicted == ROWS - 28


def test_a_full_disk_keeps_what_is_complete(
    classifier: Classifier, source: Path, whole: bytes, tmp_path: Path
) -> None:
    target = tmp_path / "out.csv"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, limits[1]))
    try:
        with pytest.raises(OutputError, match=r"cannot write .*; the same command goes on"):
            classifier.predict_file(source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert classifier.predict_file(source, target).resumed_rows in range(14, 28)
    assert target.read_bytes() == whole


@pytest.mark.parametrize("what", ["file", "model", "options"])
def test_a_run_from_other_inputs_begins_again_and_says_so(
    classifier: Classifier,
    source: Path,
    tmp_path: Path,
    what: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, other = tmp_path / "out.csv", classifier
    stopped(classifier, source, target, 22, KeyboardInterrupt())
    if what == "file":
        os.utime(source, ns=(0, source.stat().st_mtime_ns + 1))
    elif what == "options":
        other = dataclasses.replace(classifier, max_length=8)
    else:
        other = Classifier.load(classifier.model.name_or_path)
        with torch.no_grad():
            other.model.classifier.bias += 1e-3
    with telling():
        assert other.predict_file(source, target).resumed_rows == 0
    words = {
        "file": "is of a file that has changed since; beginning again",
        "model": "is of another model; beginning again",
        "options": "was made with other options; beginning again",
    }
    assert f"out.csv.partial {words[what]}\n" in capsys.readouterr().err
    other.predict_file(source, tmp_path / "fresh.csv")
    assert target.read_bytes() == (tmp_path / "fresh.csv").read_bytes()


@pytest.mark.parametrize("damage", ["cut", "no state", "state cut"])
def test_what_is_damaged_is_begun_again(
    classifier: Classifier, source: Path, whole: bytes, tmp_path: Path, damage: str
) -> None:
    target = tmp_path / "out.csv"
    stopped(classifier, source, target, 22, KeyboardInterrupt())
    partial, state = tmp_path / "out.csv.partial", tmp_path / "out.csv.partial.json"
    if damage == "cut":  # the machine lost power
        os.truncate(partial, 10)
    elif damage == "no state":
        state.unlink()
    else:
        os.truncate(state, 10)
    assert classifier.predict_file(source, target).resumed_rows == 0
    assert target.read_bytes() == whole
    assert names_in(tmp_path) == ["out.csv"]


def test_a_source_that_cannot_be_read_now_may_be_read_later(
    classifier: Classifier, source: Path, whole: bytes, tmp_path: Path
) -> None:
    from memfit.errors import DataError

    target = tmp_path / "out.csv"
    table = table_of(source, OSError(5, "Input/output error"), 30)
    with pytest.raises(DataError, match="cannot be read to its end"):
        predict_file(classifier, table, source, target)
    assert classifier.predict_file(source, target).resumed_rows == 28
    assert target.read_bytes() == whole


def test_two_runs_do_not_write_one_file(
    classifier: Classifier, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.csv"
    with (
        partial_output.partial_output(target, {}, b"id,text\n"),
        pytest.raises(OutputError, match="another process is writing"),
    ):
        classifier.predict_file(source, target)


def test_gpus_go_with_an_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "nowhere", "--file", "in.csv", "--gpus", "2"]) == 2
    assert "--gpus shares the rows of a file; it goes with --output" in capsys.readouterr().err


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """More rows than are predicted before somebody looks."""
    path = tmp_path / "many.csv"
    lines = [f"{row},{TEXTS[row % ROWS][:9]}\n" for row in range(MANY)]
    path.write_text("id,text\n" + "".join(lines), encoding="utf-8")
    return path


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's log files
@pytest.mark.usefixtures("quick_agent")
def test_a_killed_run_goes_on_with_two_ranks_as_with_one(
    tiny_model_dir: Path,
    many: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # other processes have windows of the usual size
    target = tmp_path / "out.csv"
    words = ["predict", str(tiny_model_dir), "--file", str(many), "--output", str(target)]
    with subprocess.Popen([sys.executable, "-m", "memfit", *words]) as process:
        while not kept_rows(target):
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
    capfd.readouterr()
    first_row = kept_rows(target)
    assert 0 < first_row < MANY
    assert run([*words, "--gpus", "2"]) == 0
    out, err = capfd.readouterr()
    assert out == f"wrote {MANY:,} rows to {target}\n"
    resumed, *_, done = (line.strip() for line in without_waits(err).splitlines())
    assert resumed == f"going on from row {first_row + 1:,}"
    assert done.startswith(f"{MANY - first_row:,} rows in ")
    Classifier.load(tiny_model_dir).predict_file(many, tmp_path / "whole.csv")
    found, expected = target.read_text("utf-8-sig"), (tmp_path / "whole.csv").read_text("utf-8-sig")
    assert found.splitlines() == expected.splitlines()
