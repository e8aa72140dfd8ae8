"""Whatever is wrong with what is given: one clear sentence, exit code 2, nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from malformed import GOOD, Place
from malformed_folders import checkpoints, models, runs
from malformed_settings import configurations, options, output_folders
from malformed_tables import json_tables, parquet_tables, tables

from memfit.cli import run
from memfit.errors import InputError
from memfit.units import parse_budget
from waits import without_waits

SOURCES = (tables, json_tables, parquet_tables, options, output_folders, configurations,
           models, runs, checkpoints)  # fmt: skip
CASES = {f"{source.__name__}: {name}": case for source in SOURCES for name, case in source()}
GENERATED = 60


@pytest.fixture(scope="module")
def finished(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that came to its end, to be spoilt."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "good.csv").write_text(GOOD, encoding="utf-8")
    words = ["train", str(folder / "good.csv"), "--model", str(tiny_model_dir), "--output-dir",
             str(folder / "run"), "--max-length", "16", "--batch-size", "8", "--epochs", "2",
             "--quiet"]  # fmt: skip
    assert run(words) == 0
    return folder / "run"


@pytest.fixture
def place(tmp_path: Path, tiny_model_dir: Path, finished: Path) -> Path:
    return Place(tmp_path, tiny_model_dir, finished)


def assert_refused(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Exit code 2 and one sentence that says more than that something is wrong."""
    monkeypatch.setenv("COLUMNS", "200")
    code = run(words)
    captured = capsys.readouterr()
    said = without_waits(captured.err).strip()
    assert code == 2, f"{code}: {said[-600:]}"
    assert captured.out == ""
    lines = [line for line in said.splitlines() if not line.startswith(("note", "resuming"))]
    assert len(lines) == 1, said
    assert lines[0].startswith("memfit: ")
    assert len(lines[0]) > 25, lines[0]
    assert "Traceback" not in said
    assert "should not have happened" not in said
    assert "object at 0x" not in said
    return said


def test_there_are_three_hundred() -> None:
    assert len(CASES) + 2 * GENERATED >= 420


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_input_is_refused_in_one_sentence(
    name: str,
    place: Place,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = CASES[name](place)
    monkeypatch.chdir(place.folder)
    before = sorted(os.listdir(place.folder))
    said = assert_refused(words, capsys, monkeypatch)
    about_length = re.search(r"max-length 9", name)
    assert ("positions of" in said) == bool(about_length)  # else the length is what is refused
    assert sorted(os.listdir(place.folder)) == before


@pytest.mark.parametrize("name", list(CASES)[::4])
def test_what_is_wrong_is_said_in_chinese_too(
    name: str,
    place: Place,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = CASES[name](place)
    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("MEMFIT_LANG", "zh")
    assert run(words) == 2
    # What was given is quoted as it is, and a library's reason may follow.
    said = re.sub(r"'[^']*'|\"[^\"]*\"|/\S+", "", capsys.readouterr().err)
    assert re.search(r"[\u4e00-\u9fff]{2}", said), said


bytes_of_a_file = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(st.text(max_size=8), max_size=20).map(
        lambda rows: "\n".join(rows).encode("utf-8", "replace")
    ),
)


@settings(
    max_examples=GENERATED,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(content=bytes_of_a_file, ending=st.sampled_from(["csv", "tsv", "jsonl", "json", "parquet"]))
@example(content=b"label,review\n\x00,\x00\n", ending="csv")
@example(content=b"os error", ending="csv")
def test_a_file_of_anything_is_refused(
    content: bytes,
    ending: str,
    place: Place,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = place.folder / f"data.{ending}"
    path.write_bytes(content)
    assert_refused(place.train(path), capsys, monkeypatch)
    assert not (place.folder / "out").exists()


@settings(
    max_examples=GENERATED,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(text=st.text(max_size=40).filter(lambda text: "\r" not in text))
@example(text="4GBB")
@example(text="[data]\nmax_length = 1e400")
def test_a_budget_and_a_configuration_of_anything_are_refused(
    text: str, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        parse_budget(text)
    except InputError:
        words = place.train(place.good(), f"--budget={text}")
        assert_refused(words, capsys, monkeypatch)
    path = place.folder / "run.toml"
    path.write_text(f"{text}\nnonesuch = 1\n", encoding="utf-8", errors="replace")
    assert_refused(place.train(place.good(), "--config", str(path)), capsys, monkeypatch)
    assert not (place.folder / "out").exists()


def test_the_inputs_that_were_spoilt_were_good(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise everything above would be refused for another reason."""
    words = place.train(place.good(), "--max-length", "16", "--batch-size", "8", "--epochs", "1")
    assert run(words) == 0
    shutil.copytree(place.run, place.folder / "again")
    (place.folder / "again" / "summary.json").unlink()
    assert run(["train", "--resume", "--output-dir", str(place.folder / "again"), "--quiet"]) == 0
    capsys.readouterr()
