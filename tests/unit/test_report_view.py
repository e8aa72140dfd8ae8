"""What a folder tells of runs that still train, were stopped, failed or were killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import PLAN, Page, add_samples, make_run

from memfit.errors import OutputError
from memfit.records.results import RunFolder, RunSummary
from memfit.records.run_log import FILE, RunLog, read_log
from memfit.report.page import write_report
from memfit.report.view import RunView, adjustments, read_plan, read_view
from memfit.units import MIB


def view(folder: Path, **options: Any) -> RunView:
    return read_view(RunFolder(folder), **options)


def test_a_failed_run_says_why_and_how_to_go_on(tmp_path: Path) -> None:
    add_samples(tmp_path, steps=12).ended("failed", "the GPU no longer answers")
    told = view(tmp_path)
    assert (told.state, told.step, told.max_steps, told.seconds) == ("failed", 12, 438, 6.0)
    found = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "Failed 6.0 s of training on RTX 3060 step 12 of 438" in found.words
    assert "the GPU no longer answers" in found.words
    assert f"memfit train --resume --output-dir {tmp_path}" in found.words
    assert "import memfit" not in found.words  # there is no model to use yet
    assert len(found.values("svg", "role")) == 4  # bars, over time, loss, learning rate


def test_without_a_last_word_it_is_running_or_was_cut_off(tmp_path: Path) -> None:
    add_samples(tmp_path)
    assert view(tmp_path, live=True).state == "running"
    assert view(tmp_path).state == "cut"
    text = Page(write_report(tmp_path, lang="zh").read_text(encoding="utf-8")).words
    assert "没有结束记录" in text
    assert "进程已被终止" in text


def test_a_resumed_run_replaces_what_it_does_again(tmp_path: Path) -> None:
    log = add_samples(tmp_path, steps=10)
    log.ended("stopped", "")
    log.write(begun={"model": "m", "task": "t"}, step=6, max_steps=20, seconds=3.0)
    log.write(step=7, seconds=3.5, now_bytes=5, peak_bytes=9)
    log.write(logged={"step": 7, "loss": 9.0})
    found = read_log(tmp_path)
    assert [sample.step for sample in found.samples] == [1, 2, 3, 4, 5, 6, 7]
    assert [entry["step"] for entry in found.logged] == [1, 2, 3, 4, 5, 6, 7]
    assert (found.ended, found.seconds, found.max_steps) == ("", 3.5, 20)


def test_what_came_after_the_last_checkpoint_is_in_the_curves(tmp_path: Path) -> None:
    add_samples(tmp_path, steps=5)
    checkpoint = tmp_path / "checkpoints" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    saved = [{"step": step, "loss": 100.0} for step in (1, 2, 3)]
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": saved}))
    losses = view(tmp_path).series("loss")
    assert losses[:3] == [(1, 100.0), (2, 100.0), (3, 100.0)]
    assert losses[-2:] == [(4, 1 / 4), (5, 1 / 5)]


def test_a_run_before_its_first_line_is_told_from_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\nmodel = "hfl/rbt3"\n')
    told = view(tmp_path, live=True)
    assert (told.summary.model, told.state, told.step) == ("hfl/rbt3", "running", 0)
    (tmp_path / "run.toml").write_text("[model\n")
    with pytest.raises(OutputError, match=r"run\.toml"):
        view(tmp_path)


def test_broken_lines_are_passed_over(tmp_path: Path) -> None:
    add_samples(tmp_path, steps=2)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 3, "sec\n[1]\n{"step": "x", "seconds": 1}\n7\n{"logged": 3}\n')
    found = read_log(tmp_path)
    assert len(found.samples) == 2
    assert len(found.logged) == 2


def test_adjustments_are_found_in_both_places_and_in_order(tmp_path: Path) -> None:
    inner = {"step": 9, "why": "out of memory", "before": "whole batches", "after": "512 tokens"}
    history = [{"step": 1, "loss": 1.0}, {"step": 9, "adjustment": inner}]
    line = {"step": 4, "seconds": 2.5, "why": "a neighbour", "from": {"rows": 8}, "to": [4, 2]}
    (tmp_path / "adjustments.jsonl").write_text(json.dumps(line) + "\n{broken\n[]\n")
    made = adjustments(tmp_path, history)
    assert [(one.step, one.before, one.after) for one in made] == [
        (4, "rows 8", "4, 2"),
        (9, "whole batches", "512 tokens"),
    ]
    assert made[0].seconds == 2.5


def test_adjustments_are_marked_in_the_picture_and_listed(tmp_path: Path) -> None:
    log = add_samples(tmp_path, steps=30)
    inner = {"step": 7, "why": "out of memory", "before": "whole batches", "after": "512 tokens"}
    log.write(logged={"step": 7, "adjustment": inner})
    text = write_report(tmp_path).read_text(encoding="utf-8")
    found = Page(text)
    assert "1 7 out of memory whole batches 512 tokens" in found.words
    assert "Dotted lines are adjustments" in found.words
    assert text.count("stroke-dasharray: 1,1.65") == 1


def test_the_context_is_added_where_the_samples_are_an_allocators(tmp_path: Path) -> None:
    add_samples(tmp_path, steps=3)
    told = view(tmp_path)
    assert told.context_bytes == 500 * MIB
    assert not told.on_cpu
    label = Page(write_report(tmp_path).read_text(encoding="utf-8")).values("svg", "aria-label")[-1]
    assert label == "Memory over 3 steps: at most 2.15 GiB"  # 1,700 MiB and the context


def test_a_plan_is_shown_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    assert read_plan(path) is None
    path.write_text("[broken\n")
    assert read_plan(path) is None
    path.write_text('strategies = 3\nreasons = ["because"]\n[predicted]\nstep_seconds = "x"\n')
    plan = read_plan(path)
    assert plan is not None
    assert (plan.strategies, plan.reasons, plan.step_seconds) == ((), ("because",), None)
    path.write_text(PLAN)
    plan = read_plan(path)
    assert plan is not None
    assert plan.strategies[1][:2] == ("checkpointing", "layers 9, part layer")
    assert plan.reasons == ("peaks at 2.1 GiB",)


def test_what_is_not_a_number_is_not_drawn() -> None:
    history: list[dict[str, Any]] = [
        {"step": 1, "loss": float("nan")},
        {"step": 2, "loss": 0.5},
        {"step": 3, "eval_loss": 0.1, "eval_f1": 0.9, "eval_runtime": 1.0, "loss": None},
        {"step": 4, "loss": True},
        {"loss": 0.1},
    ]
    shown = RunView(summary=RunSummary(model="", task=""), history=history)
    assert shown.series("loss") == [(2, 0.5)]
    assert shown.metric_names == ["f1"]


def test_a_finished_run_is_what_its_summary_says(tmp_path: Path) -> None:
    add_samples(make_run(tmp_path)).ended("stopped", "once")
    told = view(tmp_path, live=True)
    assert (told.state, told.why, told.seconds) == ("finished", "", 200.0)


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "gone")
    log.write(step=1)
    (tmp_path / "gone").mkdir()
    log.write(step=2)
    assert not (tmp_path / "gone" / FILE).exists()


def test_no_token_gets_into_the_log(tmp_path: Path) -> None:
    RunLog(tmp_path).ended("failed", "401 for hf_" + "a" * 30)
    assert "a" * 30 not in (tmp_path / FILE).read_text()
    assert read_log(tmp_path).why.startswith("401 for hf_")
