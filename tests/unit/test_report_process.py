"""The report is drawn by a process of its own, and written by the training's where that fails."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import add_samples, make_run

from memfit.api import finetune
from memfit.i18n import speaking
from memfit.records.results import RunFolder, read_summary
from memfit.report import page, plots
from memfit.report.page import render
from memfit.run import preloading
from memfit.run.report_process import ReportProcess
from sentences import FEW_REVIEWS


def refused(*_: Any, **__: Any) -> Path:
    raise AssertionError("the training's process writes the report")


def test_a_run_of_the_command_has_its_report_written_by_another_process(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "a.csv"
    table.write_text(FEW_REVIEWS, encoding="utf-8")
    monkeypatch.setattr(preloading, "processes_to_use", lambda: 2)
    monkeypatch.setattr(page, "write_report", refused)
    with speaking("zh"):
        finetune(
            table, output_dir=tmp_path / "run", model=tiny_model_dir, max_length=16, max_steps=1,
            exact=True,
        )  # fmt: skip
    written = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert 'lang="zh-Hans"' in written
    assert written == render(RunFolder(tmp_path / "run"))


def test_it_ends_with_its_input_and_the_training_then_writes_the_report(tmp_path: Path) -> None:
    """As after kill -9: the system closes the pipe."""
    run = make_run(tmp_path)
    with ReportProcess(run) as report:
        report.start()
        process: Any = report._process
        report.start()
        assert report._process is process
        process.stdin.close()
        assert process.wait(60) == 1
        assert not RunFolder(run).report.exists()
        process.stdin = None
        report.write()
    assert RunFolder(run).report.is_file()


def test_it_is_gone_with_a_run_that_fails(tmp_path: Path) -> None:
    with contextlib.suppress(ValueError), ReportProcess(tmp_path) as report:
        report.start()
        process: Any = report._process
        raise ValueError
    assert process.returncode is not None
    assert process.stdin.closed


@pytest.mark.parametrize("executable", ["/no/such/python", "/bin/false"])
def test_where_it_cannot_start_or_dies_the_report_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    run = make_run(tmp_path)
    monkeypatch.setattr("sys.executable", executable)
    with ReportProcess(run) as report:
        report.start()
        report.draw(read_summary(run), [])
        report.begin_writing()
        report.write()
    assert RunFolder(run).report.is_file()


def test_what_is_drawn_before_the_last_files_is_not_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    add_samples(run)
    folder, summary = RunFolder(run), read_summary(run)
    state = json.loads((run / "trainer_state.json").read_text())
    before = replace(summary, seconds={"train": 200.0}).to_dict()
    folder.summary.unlink()
    (run / "trainer_state.json").unlink()
    early = render(folder, ending={"summary": before, "trainer_state": state})
    assert early.count("<svg") > 5
    make_run(tmp_path)
    monkeypatch.setattr(plots.Drawing, "__enter__", refused)
    whole = render(folder)
    assert whole != early  # the times of the whole run
    assert whole.count("<svg") == early.count("<svg")


def test_a_drawing_is_made_again_when_its_values_or_its_language_change() -> None:
    def draw(last: float) -> str:
        line = plots.Line("a", [(1.0, 2.0), (20.0, last)], 0)
        return plots.line_chart([line], name="x", label="x", x_label="x", steps_per_epoch=10).svg

    first = draw(3.0)
    assert draw(3.0) is first
    with speaking("zh"):
        assert "epoch" in first
        assert "epoch" not in draw(3.0)
    assert draw(4.0) != first
    assert draw(3.0) == first
