"""Results, summaries, plans and trainers in a notebook: whole, escaped, and kept to themselves."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_fixtures import ACTING, EVIL, PEAK, Page, add_samples, make_run

from memfit.engine.micro_batches import MicroBatching
from memfit.i18n import Message, speaking
from memfit.memory.tracing.counting import StepCounts
from memfit.planner.plan import Decision, Digest, Plan
from memfit.planner.price import Price
from memfit.records.evaluation import Evaluation
from memfit.records.results import RunSummary, kept_messages, read_evaluation, read_summary
from memfit.report.notebook import notebook_html
from memfit.report.page import write_report
from memfit.report.view import read_plan
from memfit.run.train import RunResult
from memfit.strategies import Checkpointing, Packing


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
    assert len(found.values("svg", "role")) == 7
    assert len(html) < 200_000


def test_a_printed_result_is_one_line(tmp_path: Path) -> None:
    said = str(result_of(make_run(tmp_path, metrics={"f1": 0.93456, "mse": 12.0})))
    assert said == f"RunResult(f1 0.9346, mse 12, {tmp_path})"


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


def a_plan(price: Price | None) -> Plan:
    """As the planner makes them."""
    strategies, limits = (Packing(), Checkpointing(9)), MicroBatching(max_tokens=2048)
    digest = Digest(
        model="bert", rows=9600, effective_rows=32, longest_tokens=128, worst_tokens=4096,
        total_tokens=600_000, budget_bytes=4 * 10**9, card="RTX 3060",
    )  # fmt: skip
    saved = {"count": "9", "depth": "24", "saved": "<1.1> GiB", "cost": "12 %"}
    decisions = (
        Decision(
            "packing",
            Message(
                "texts are packed without padding, which would be {share} of every batch",
                share="41 %",
            ),
            "packing",
        ),
        Decision(
            "checkpointing",
            Message(
                "recomputes {count} of {depth} layers: saves {saved}, costs {cost} of the step",
                **saved,
            ),
            "checkpointing",
        ),
        Decision(
            "unused.exact",
            Message("not used: {name}, because --exact forbids rounding", name="half precision"),
        ),
    )
    return Plan(
        strategies=strategies,
        micro_batching=limits,
        digest=digest,
        price=price,
        decisions=decisions,
    )


def priced() -> Price:
    plan = a_plan(None)
    return Price(
        strategies=plan.strategies,
        micro_batching=plan.micro_batching,
        peak=PEAK,
        counts=StepCounts(),
        step_seconds=0.063,
    )


def test_a_plan_shows_its_strategies_reasons_and_predicted_peak() -> None:
    with speaking("zh"):
        found = Page(notebook_html(a_plan(priced())))
    assert "重计算 24 层中的 9 层：省 <1.1> GiB，使每步慢 12 %" in found.words
    assert "未使用：half precision" in found.words
    assert "每步用时（预测） 63 ms" in found.words
    assert "一致：数值相同" in found.words
    assert found.tags.count("svg") == 1
    assert "svg" not in Page(notebook_html(a_plan(None))).tags  # read from a file, not priced


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("of_run", ["zh", "en"])
def test_a_plans_reasons_are_told_in_the_language_of_the_page(of_run: str, tmp_path: Path) -> None:
    plan, told = a_plan(priced()), {"zh": "重计算 24 层中的 9 层", "en": "recomputes 9 of 24"}
    make_run(tmp_path, plan={**plan.as_json(), "messages": kept_messages(plan.messages())})
    plan.write(tmp_path / "plan.toml", of_run)
    for lang, other in (("zh", "en"), ("en", "zh")):
        page = Page(write_report(tmp_path, lang=lang).read_text(encoding="utf-8")).words
        assert told[lang] in page
        assert told[other] not in page


def test_a_plans_file_says_in_the_report_what_the_plan_says_itself(tmp_path: Path) -> None:
    a_plan(priced()).write(tmp_path / "plan.toml")
    plan = read_plan(tmp_path / "plan.toml")
    assert plan is not None
    assert [name for name, _, _ in plan.strategies] == ["packing", "checkpointing"]
    assert plan.strategies[1][1].startswith("layers 9")
    assert plan.strategies[0][2].startswith("texts are packed without padding")
    assert plan.reasons == ("not used: half precision, because --exact forbids rounding",)
    assert (plan.fidelity, plan.limits) == ("exact", "max_tokens 2048")
    assert (plan.device_bytes, plan.step_seconds) == (PEAK.device_bytes, 0.063)


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


def test_a_trainer_that_has_not_started_counts_no_steps() -> None:
    state = SimpleNamespace(global_step=0, max_steps=0, log_history=[])
    limits = SimpleNamespace(max_rows=None, max_tokens=None)
    trainer = SimpleNamespace(state=state, micro_batching=limits, model=None, effective_rows=8)
    assert "not started yet" in notebook_html(trainer)
    with speaking("zh"):
        assert "还没有开始" in notebook_html(trainer)
    assert "0 / 0" not in notebook_html(trainer)
