"""The same task is planned once; a plan is planned anew as soon as anything about it changes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from planner_fixtures import FormulaPricer, bert, h200, task

from memfit.config import files
from memfit.memory.cards import Speeds
from memfit.planner import step_time, this_machine
from memfit.planner.candidates import PlanTask
from memfit.planner.plans import Plan
from memfit.planner.search import make_plan
from memfit.planner.this_machine import (
    cache_file,
    keep_plan,
    kept_plan,
    task_for,
)
from memfit.units import Budget

BUDGET = 4 * 10**9


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, that is used."""
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    used = files._used.set(True)
    yield tmp_path / "cache"
    files._used.reset(used)


def asked(budget: Budget | None = None, now_bytes: int = BUDGET, **changes: Any) -> PlanTask:
    given = {"workload": task(), "card": h200(), **changes}
    return PlanTask(budget=budget or Budget(bytes=BUDGET), budget_bytes=now_bytes, **given)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The plan of `asked()`."""
    one = asked()
    pricer = FormulaPricer(one.workload, one.card)
    return make_plan(one, pricer=pricer, host_bytes_free=10**12).chosen


def test_a_kept_plan_is_the_plan_that_was_made(plan: Plan) -> None:
    assert plan.price is not None
    assert plan.decisions
    keep_plan(asked(), plan)
    kept = kept_plan(asked())
    assert kept is not None
    assert kept.candidate == plan.candidate
    assert kept.price == plan.price
    assert kept.sentences("zh") == plan.sentences("zh")
    assert kept.to_toml() == plan.to_toml()


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": task(num_train_epochs=7)},
        {"workload": task(lengths=(9, 8, 7))},
        {"workload": task(bert(layers=23))},
        {"workload": task(user_set=frozenset({"optim"}))},
        {"card": dataclasses.replace(h200(), reached=None)},
        {"card": dataclasses.replace(h200(), context_bytes=h200().context_bytes + (33 << 20))},
        {"card": None},
        {"exact": True},
        {"allow": frozenset({"lora"})},
        {"reserve_bytes": 1},
        {"now_bytes": BUDGET - 1},
    ],
)
def test_another_task_has_another_plan(changes: dict[str, Any], plan: Plan) -> None:
    keep_plan(asked(), plan)
    assert kept_plan(asked()) is not None
    assert kept_plan(asked(**changes)) is None


def test_the_name_of_the_output_folder_makes_no_difference(plan: Plan) -> None:
    keep_plan(asked(), plan)
    other = task()
    other.args.output_dir = "elsewhere"
    assert kept_plan(asked(workload=other)) is not None


def test_what_is_free_may_be_a_little_more_or_less_as_long_as_the_plan_fits(plan: Plan) -> None:
    assert plan.price is not None
    keep_plan(asked(Budget()), plan)
    needs = plan.price.device_bytes
    assert kept_plan(asked(Budget(), now_bytes=needs)) is not None
    assert kept_plan(asked(Budget(), now_bytes=needs - 1)) is None
    assert kept_plan(asked(Budget(), now_bytes=int(1.09 * BUDGET))) is not None
    assert kept_plan(asked(Budget(), now_bytes=int(1.2 * BUDGET))) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda values: values.clear(),
        lambda values: values.update(version=0),
        lambda values: values["plan"].update(strategies={"no such": {}}),
        lambda values: values["price"].update(peak=None),
        lambda values: values["price"]["counts"].update(unknown=1),
        lambda values: values.update(decisions=[{}]),
        lambda values: values["plan"].update(micro_batching=[]),
    ],
)
def test_a_damaged_file_is_as_good_as_none(damage: Any, folder: Path, plan: Plan) -> None:
    one = asked()
    keep_plan(one, plan)
    assert kept_plan(one) is not None
    file = folder / cache_file(one)
    values = json.loads(file.read_text(encoding="utf-8"))
    damage(values)
    file.write_text(json.dumps(values), encoding="utf-8")
    assert kept_plan(one) is None


def test_a_folder_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "file"))
    one = asked()
    keep_plan(one, plan)
    assert kept_plan(one) is None


def test_nothing_is_taken_where_that_was_asked_for(plan: Plan) -> None:
    one = asked()
    keep_plan(one, plan)
    with files.cache_unused():
        assert kept_plan(one) is None
    with files.cache_unused(False):
        assert kept_plan(one) is not None


def test_the_oldest_of_too_many_are_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    monkeypatch.setattr(files, "_MOST_FILES", 2)
    for epochs in range(1, 5):
        keep_plan(asked(workload=task(num_train_epochs=epochs)), plan)
    assert len(list(folder.glob("plan-*.json"))) == 2


def test_a_second_run_neither_plans_nor_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    step_time._of_cpu.cache_clear()  # a test before may have measured
    work = task(bert(layers=2, width=64, vocabulary=100), lengths=(9, 12, 16, 20))
    to_plan = task_for(work, Budget(bytes=10**9), torch.device("cpu"))
    found = this_machine.choose(to_plan)
    assert not found.kept
    step_time._of_cpu.cache_clear()

    def never(*_: object, **__: object) -> Any:
        raise AssertionError("nothing is left to find out")

    monkeypatch.setattr(this_machine, "make_plan", never)
    again = this_machine.choose(to_plan)
    assert again.kept
    assert again.plan.to_toml() == found.plan.to_toml()
    monkeypatch.setattr(step_time, "_measure_cpu", never)
    assert step_time.calibrate("cpu").reached is not None


def test_a_machine_is_measured_again_for_another_torch_and_not_for_another_memfit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[float] = []

    def measure(**_: object) -> Speeds:
        measured.append(1e12 + len(measured))
        return Speeds(**{one.name: measured[-1] for one in dataclasses.fields(Speeds)})

    def known() -> float:
        step_time._of_cpu.cache_clear()
        speeds = step_time.calibrate("cpu").reached
        assert speeds is not None
        return speeds.fp32_flops

    monkeypatch.setattr(step_time, "_measure_cpu", measure)
    first = known()
    monkeypatch.setattr(files, "installed_versions", lambda: {"memfit": "another"})
    assert known() == first
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert known() != first
    assert len(measured) == 2
    step_time._of_cpu.cache_clear()
