"""Runs beside each other: in the terminal, on a page, in Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import ACTING, EVIL, PLAN, Page, add_samples, make_run

import memfit
from memfit.cli import run as command
from memfit.errors import ConfigError, OutputError
from memfit.i18n import speaking
from memfit.memory.components import Component, MemoryPeak
from memfit.records.results import MemorySummary
from memfit.records.run_warnings import RunWarning
from memfit.report.comparison import compare_runs
from memfit.units import MIB

PEAK = MemoryPeak({Component.WEIGHTS: 600 * MIB}, 600 * MIB, 700 * MIB, 1000 * MIB)


def made(folder: Path, config: str = "", **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(
        f'output_dir = "{folder}"\n[data]\npath = "reviews.csv"\n[training]\n{config}'
    )
    add_samples(make_run(folder, **changes))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs: the second is more often right, in less memory and more time."""
    training = {"steps": 438, "effective_batch": 32, "learning_rate": 5e-5}
    memory = MemorySummary(4 * 10**9, PEAK, PEAK)
    first = made(tmp_path / "first", "learning_rate = 2e-5\n", metrics={"f1": 0.8, "mse": 0.5})
    second = made(
        tmp_path / "second", "learning_rate = 5e-5\nlr_scheduler_type = 'cosine'\n",
        training=training, memory=memory, metrics={"f1": 0.9, "mse": 0.7},
        seconds={"train": 300.0, "total": 320.0},
    )  # fmt: skip
    (second / "plan.toml").write_text(PLAN)
    return first, second


def rows(comparison: Any) -> dict[str, tuple[str, ...]]:
    return {row.name: row.cells for one in comparison.sections().values() for row in one}


def test_what_differs_is_listed_and_what_is_the_same_is_not(runs: tuple[Path, Path]) -> None:
    found = rows(memfit.compare(*runs))
    assert found["learning rate"] == ("2e-05", "5e-05")
    assert found["effective batch"] == ("16", "32")
    assert found["--lr-scheduler-type"] == ("–", "cosine")
    assert found["strategies"] == ("–", "packing, recomputing layers")
    assert found["F1"] == ("0.8000", "0.9000")
    assert found["peak, measured"] == ("2.15 GiB", "1000.0 MiB")
    assert found["of the budget"] == ("58 %", "26 %")
    assert found["time training"] == ("3 min 20 s", "5 min 00 s")
    assert found["rows a second"] == ("32", "64")
    for same in ("path", "output dir", "model", "memfit", "device"):
        assert same not in found


def test_the_best_figures_are_marked(runs: tuple[Path, Path]) -> None:
    best = {
        row.name: set(row.best)
        for one in memfit.compare(*runs).sections().values()
        for row in one
        if row.best
    }
    assert best == {
        "F1": {1}, "MSE": {0}, "peak, predicted": {1}, "peak, measured": {1},
        "time training": {0}, "time in all": {0}, "rows a second": {1},
    }  # fmt: skip


def test_the_command_prints_tables_and_writes_a_page(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "both.html"
    names = [str(one) for one in runs]
    (runs[0] / "report.html").write_text("")
    assert command(["compare", *names, "--output", str(page)]) == 0
    out = capsys.readouterr().out
    for words in ("Settings that differ", "first", "second", "0.9000", str(page)):
        assert words in out
    found = Page(page.read_text(encoding="utf-8"))
    assert found.values("html", "lang") == ["en"]
    assert found.values("a", "href")[1:] == ["first/report.html"]
    assert [name for name in ("Loss", "Rows trained on a second") if name in found.words]
    assert found.values("td", "class").count("best") == 7
    # Training loss, validation loss, F1, throughput, gradient norm, learning rate; two runs each.
    hovers = [json.loads(one) for one in found.values("figure", "data-hover")]
    assert [[line["name"] for line in one["lines"]] for one in hovers] == [["first", "second"]] * 6
    assert command(["compare", *names, "--output", str(page), "--json", "--lang", "zh"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in said["runs"]] == ["first", "second"]
    assert said["runs"][1]["settings"]["effective_batch"] == 32
    assert said["runs"][1]["memory"]["measured_bytes"] == 1000 * MIB
    assert "设置的差异" in Page(page.read_text(encoding="utf-8")).words


@pytest.mark.usefixtures("undrawn")
def test_another_file_is_not_overwritten(runs: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    with pytest.raises(OutputError, match="is not a page of memfit"):
        memfit.compare(*runs).write_page(tmp_path / "mine.html")
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"
    made_page = memfit.compare(*runs).write_page(tmp_path)
    assert made_page == tmp_path / "comparison.html"
    memfit.compare(*runs).write_page(tmp_path)


def test_a_folder_of_runs_stands_for_all_of_them(tmp_path: Path) -> None:
    for name in ("a/run", "a/other", "b/run"):
        made(tmp_path / name)
    (tmp_path / "a" / "empty").mkdir()
    found = memfit.compare(tmp_path / "a", tmp_path / "b" / "run", tmp_path / "b" / "run")
    assert list(found.runs) == ["a/other", "a/run", "b/run"]
    with pytest.raises(ConfigError, match="at least two runs"):
        memfit.compare(tmp_path / "b")
    with pytest.raises(OutputError):
        memfit.compare(tmp_path / "a", tmp_path / "nowhere")


def test_runs_on_other_rows_or_of_other_classes_are_compared_with_care(tmp_path: Path) -> None:
    one = made(tmp_path / "one")
    same = made(tmp_path / "same")
    other = made(tmp_path / "other", positive="負評", data={"validation_rows": 11}, device="T4")
    assert memfit.compare(one, same).cautions() == []
    said = " ".join(memfit.compare(one, other).cautions())
    for words in ("not evaluated on the same rows", "same positive class", "different devices"):
        assert words in said


def test_internals_are_no_settings_and_settings_have_names(tmp_path: Path) -> None:
    one = made(tmp_path / "one", "save_steps = 10.0\n[plan]\nsettings = '315b'\n")
    plan = "[plan]\nsettings = 'bffa'\nworkload = {model = 'm'}\n"
    other = made(tmp_path / "other", f"save_steps = 12000.0\nmax_steps = 5\n{plan}")
    (other / "run.toml").write_text((other / "run.toml").read_text().replace("reviews", "more"))
    with speaking("zh"):
        found = rows(memfit.compare(one, other))
    assert found["--save-steps"] == ("10", "12,000")
    assert found["--max-steps"] == ("–", "5")
    assert found["数据文件"] == ("reviews.csv", "more.csv")
    (other / "plan.toml").write_text(PLAN)
    with speaking("zh"):
        both = memfit.compare(one, other)
        found, said = rows(both), both.to_dict()
    assert found["策略"] == ("–", "紧密拼接、层重计算")
    assert found["保真度"] == ("–", "仅舍入")
    assert said["runs"][1]["settings"]["strategies"] == ["packing", "checkpointing"]
    assert not {"settings", "workload", "--settings", "--workload"} & set(found)


def test_no_figure_is_the_best_of_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    one = made(tmp_path / "one", metrics={"accuracy": 0.9})
    other = made(
        tmp_path / "other", metrics={"accuracy": 0.99}, data={"validation_rows": 11}, device="T4",
        seconds={"train": 1.0},
    )  # fmt: skip
    found = memfit.compare(one, other).sections()
    assert not [row for name in ("metrics", "time") for row in found[name] if row.best]


def test_a_model_that_must_not_be_used_is_never_the_best(tmp_path: Path) -> None:
    warned = RunWarning("one_class", {"label": "a", "rows": 10, "missed": "b"})
    scores = {"bad": 0.99, "good": 0.9, "worse": 0.8}
    made_runs = [
        made(tmp_path / name, metrics={"accuracy": score}, warnings=(warned,) * (name == "bad"))
        for name, score in scores.items()
    ]
    metrics = memfit.compare(*made_runs).sections()["metrics"]
    assert metrics[0].best == {1}


def test_epochs_of_different_length_are_drawn_over_each_other(tmp_path: Path) -> None:
    one, other = made(tmp_path / "one"), made(tmp_path / "other")
    state = json.loads((other / "trainer_state.json").read_text())
    for entry in state["log_history"]:
        if "epoch" in entry:
            entry["epoch"] *= 2
    (other / "trainer_state.json").write_text(json.dumps(state))
    found = Page(memfit.compare(one, other).page())
    loss = json.loads(found.values("figure", "data-hover")[0])
    assert loss["by_epoch"]
    assert [line["points"][-1][0] for line in loss["lines"]] == [1.95, 3.9]


def test_nine_runs_have_nine_looks(tmp_path: Path) -> None:
    found = memfit.compare(*(made(tmp_path / str(number)) for number in range(9)))
    loss = json.loads(Page(found.page()).values("figure", "data-hover")[0])
    assert len({line["css"] for line in loss["lines"]}) == 9


def test_names_and_settings_never_become_markup(tmp_path: Path) -> None:
    one = made(tmp_path / "one")
    name = EVIL.replace("\x00", "").replace("/", "")
    other = made(tmp_path / name, model=f"org/{EVIL}", device=EVIL)
    html = compare_runs([one, other]).page(tmp_path)
    assert Page(html).tags.count("script") == 1
    assert not ACTING & set(html)


@pytest.mark.usefixtures("undrawn")
def test_a_notebook_shows_the_tables_and_python_prints_them(runs: tuple[Path, Path]) -> None:
    compared = memfit.compare(*runs)
    assert repr(compared) == "Comparison(first, second)"
    assert "effective batch" in str(compared)
    words = Page(compared._repr_html_()).words
    assert "effective batch 16 32" in words
