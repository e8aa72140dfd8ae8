"""Whole runs on a CPU, by the benchmark that measures them on a card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CASE = "Qwen3 multi-label killed"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A decoder learns several labels, is killed half-way and resumed."""
    folder = tmp_path_factory.mktemp("whole")
    out = folder / "whole.json"
    words = ["--cpu", "--only", CASE, "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "whole_runs.py"), *words, "--work", str(folder)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert CASE in done.stdout  # the table printed last
    return found


@pytest.fixture(scope="module")
def run(result: dict[str, Any]) -> dict[str, Any]:
    (only,) = result["runs"]
    assert only["name"] == CASE
    found: dict[str, Any] = only
    return found


def test_none_is_lost_or_over_its_budget(result: dict[str, Any], run: dict[str, Any]) -> None:
    summary = result["summary"]
    told = (run["notes"], run.get("output_tail"))
    assert (summary["lost"], summary["over_budget"]) == ([], []), told
    assert 0 < run["held_bytes"] <= run["budget_bytes"]
    assert 0.85 < run["held_over_predicted"] < 1.15
    assert run["printed_bytes"] == pytest.approx(run["predicted_bytes"], rel=0.02)
    assert run["commit"]
    assert result["machine"]["versions"]["torch"]


def test_a_run_that_was_killed_is_resumed_to_its_last_step(run: dict[str, Any]) -> None:
    killed, resumed = run["processes"]
    assert killed["exit_code"] == -9
    at, of = killed["killed_at_step"]
    assert of / 2 <= at < of
    begun, ended, steps = resumed["steps"]
    assert 0 < begun <= at
    assert ended == steps == of
    assert (resumed["exit_code"], resumed["killed_at_step"]) == (0, None)
    assert run["steps"] == of


def test_what_is_left_is_loaded_by_transformers_and_asked(run: dict[str, Any]) -> None:
    assert run["loaded"]["class"] == "Qwen3ForSequenceClassification"
    assert len(run["loaded"]["logits"]) == 4
    (answer,) = run["predicted"]["answer"]
    assert sorted(answer["scores"]) == ["food", "price", "room", "staff"]


def test_times_and_silences_are_measured_from_outside(run: dict[str, Any]) -> None:
    said = run["time"]["said"][-1]
    assert 0 <= said["seconds"] < 600
    assert said["at"] <= run["processes"][0]["seconds"]["first_step"]
    for process in run["processes"]:
        seconds = process["seconds"]
        order = [seconds[name] for name in ("first_output", "first_step", "last_step", "end")]
        assert order == sorted(order)
        assert order[0] > 0
        assert seconds["first_output"] <= process["longest_silence_seconds"] + 0.05
        longest = process["longest_without_new_words_seconds"]
        assert process["longest_silence_seconds"] <= longest + 0.05 <= seconds["end"] + 1


def test_the_documents_tables_are_made_of_the_result(
    result: dict[str, Any], run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import _whole_document as document

    english, chinese = (document.runs_table(one, result) for one in ("en", "zh"))
    (killed,) = (line for line in english.splitlines() if "killed with -9 and resumed" in line)
    assert f"| {run['held_over_predicted']:.3f} |" in killed
    assert "多标签" in chinese
    assert len(english.splitlines()) == len(chinese.splitlines()) == 3
    assert "| lost | 0 |" in document.facts_table("en", result)


def test_a_card_that_acts_as_another_is_judged_by_what_torch_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import _whole_document as document
    import whole_runs
    from _whole_cases import ACTED_CASES
    from _whole_process import Ended, Progress, Said
    from memfit.memory.cards import find_card

    assert len({find_card(case.card).name for case in ACTED_CASES}) == len(ACTED_CASES) // 2 == 5
    predicted = {"reserved_bytes": 2_000, "components": {"context": 300}}
    (tmp_path / "summary.json").write_text(
        json.dumps({"memory": {"measured": {"reserved_bytes": 1_900}}})
    )
    noted = tmp_path / "noted"
    noted.write_text("100\n1980\n1500\n")  # before two resets of the counters, and at the end
    progress = Progress(tmp_path / "progress.jsonl")
    progress.begun = {"memory": {"budget_bytes": 2_500, "predicted": predicted}}
    ended = Ended(0, 1.0, Said(0.0), progress, None)
    run = whole_runs.reserved(tmp_path, ended, noted)
    assert (run["held_bytes"], run["held_over_predicted"]) == (1_980, 0.99)
    assert (run["budget_bytes"], run["held_over_budget"]) == (2_200, 0.9)
    row = {**run, "case": {"card": "T4", "model": "bert-base"}, "outcome": "finished"}
    (line,) = document.acted_table("en", {"acted": [row]}).splitlines()[2:]
    assert line.startswith("| T4 | BERT-Base |")
    assert line.endswith("| 0.990 |")


def test_ranks_are_judged_by_the_one_that_held_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import whole_runs
    from _whole_cases import RANK_CASES

    case = RANK_CASES[0]
    assert case.command("t", "m", "f")[-8:-6] == ["--gpus", "2"]
    summary = {"ranks": [{"peak_bytes": 2_000_000_000}, {"peak_bytes": 1_980_000_000}]}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    told = {"predicted_bytes": 2_020_000_000, "budget_bytes": 4_000_000_000}
    run = told | whole_runs.held_by_ranks(tmp_path, told)
    assert (run["held_over_predicted"], run["held_over_budget"]) == (0.9901, 0.5)
