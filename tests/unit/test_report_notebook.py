"""Results, summaries, plans and trainers in a notebook: whole, escaped, and kept to themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_fixtures import ACTING, EVIL, PEAK, Page, add_samples, make_run

from memfit.evaluation import Evaluation
from memfit.messages import speaking
from memfit.report.notebook import notebook_html
from memfit.results import RunSummary, read_evaluation, read_summary
from memfit.workflow import RunResult


def result_of(folder: Path) -> RunResult:
    evaluated = read_evaluation(folder)
    assert evaluated is not None
    evaluation: Evaluation = evaluated[0]
    return RunResult(output_dir=folder, summary=read_summary(folder), evaluation=evaluation)


def test_a_result_shows_metrics_memory_curves_and_where_the_report_is(tmp_path: Path) -> None:
    add_samples(make_run(tmp_path))
    html = result_of(tmp_path)._repr_html_()
    found = Page(html)
    for words in (
        "Finished",
        "F1 (of 正評)",
        "58 % of the budget",
        "Confusion matrix",
        str(tmp_path / "report.html"),
    ):
        assert words in found.words
    assert len(found.values("svg", "role")) == 5
    assert len(html) < 200_000


def test_it_changes_nothing_of_the_page_around_it(tmp_path: Path) -> None:
    html = notebook_html(read_summary(make_run(tmp_path)))
    assert "<script" not in html
    css = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
    assert css is not None
    plain = re.sub(r"/\*.*?\*/", "", css[1], flags=re.DOTALL)
    for selectors in re.findall(r"([^{}]+)\{", plain):
        for selector in selectors.split(","):
            assert ".memfit-view" in selector


def test_text_from_data_never_becomes_markup(tmp_path: Path) -> None:
    make_run(tmp_path, names=(EVIL, "b"), model=EVIL, device=EVIL)
    html = result_of(tmp_path)._repr_html_()
    assert "script" not in Page(html).tags
    assert not ACTING & set(html)


@dataclass(frozen=True)
class Checkpointing:
    """A strategy as the planner's plans hold them."""

    layers: int = 9
    part: str | None = None
    name = "checkpointing"


@dataclass(frozen=True)
class Plan:
    """What notebook_html asks of a plan."""

    price: Any = None
    strategies = (Checkpointing(),)
    fidelity = "exact"
    decisions = (SimpleNamespace(strategy="checkpointing"), SimpleNamespace(message="memory"))
    digest = SimpleNamespace(budget_bytes=4 * 10**9)

    def sentences(self, spoken: str) -> list[str]:
        return [f"{spoken}: recomputes <9> layers", f"{spoken}: peaks"]


def test_a_plan_shows_its_strategies_reasons_and_predicted_peak() -> None:
    with speaking("zh"):
        found = Page(notebook_html(Plan(SimpleNamespace(peak=PEAK, step_seconds=0.063))))
    assert "checkpointing layers 9 zh: recomputes <9> layers" in found.words
    assert "zh: peaks" in found.words
    assert "每步用时（预测） 63 ms" in found.words
    assert found.tags.count("svg") == 1
    assert "svg" not in Page(notebook_html(Plan())).tags  # read from a file, not priced


def test_a_trainer_shows_where_it_stands() -> None:
    state = SimpleNamespace(
        global_step=40,
        max_steps=438,
        log_history=[{"step": step, "loss": 1 / step} for step in range(1, 41)],
    )
    limits = SimpleNamespace(max_rows=None, max_tokens=2048)
    model = SimpleNamespace(name_or_path="hfl/rbt3")
    trainer = SimpleNamespace(state=state, micro_batching=limits, model=model, effective_rows=32)
    found = Page(notebook_html(trainer))
    for words in ("BudgetTrainer: rbt3", "40 / 438", "32", "2,048 tokens"):
        assert words in found.words
    assert found.tags.count("svg") == 1


def test_a_summary_alone_and_things_that_are_none_of_these() -> None:
    summary = RunSummary(model="m", task="regression", metrics={"mse": 0.25})
    assert "MSE" in Page(notebook_html(summary)).words
    with pytest.raises(TypeError, match="a int"):
        notebook_html(3)
