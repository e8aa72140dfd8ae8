"""The same task is planned once; a plan is planned anew as soon as anything about it changes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from planner_fixtures import SMALL, bert, h200, planned, task, within

from memfit.config import files
from memfit.memory.cards import Speeds
from memfit.planner import search, step_time
from memfit.planner.cache import cache_file, cached_plan, write_plan
from memfit.planner.plan import Plan
from memfit.planner.search import plan_for
from memfit.planner.task import Task
from memfit.units import Budget

BUDGET = 4 * 10**9


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, that is used."""
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    used = files._used.set(True)
    yield tmp_path / "cache"
    files._used.reset(used)


def asked(
    budget: Budget | None = None, now_bytes: int = BUDGET, given: Task = SMALL, **changes: Any
) -> Task:
    placed = within(given, now_bytes, changes.pop("card", h200()), **changes)
    return dataclasses.replace(placed, budget=budget or Budget(bytes=BUDGET))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The plan of `asked()`."""
    return planned(SMALL, BUDGET, h200()).chosen


def test_a_cached_plan_is_the_plan_that_was_made(plan: Plan) -> None:
    assert plan.price is not None
    assert plan.decisions
    write_plan(asked(), plan)
    cached = cached_plan(asked())
    assert cached is not None
    assert (cached.strategies, cached.micro_batching) == (plan.strategies, plan.micro_batching)
    assert (cached.price, cached.line) == (plan.price, plan.line)
    assert cached.sentences("zh") == plan.sentences("zh")
    assert cached.to_toml() == plan.to_toml()


def small(**changes: Any) -> Task:
    return task(bert(6, 128, 500), **{"lengths": SMALL.lengths, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"given": small(num_train_epochs=7)},
        {"given": small(lengths=(9, 8, 7))},
        {"given": task(bert(5, 128, 500), lengths=SMALL.lengths)},
        {"given": small(user_set=frozenset({"optim"}))},
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
    write_plan(asked(), plan)
    assert cached_plan(asked()) is not None
    assert cached_plan(asked(**changes)) is None


def test_the_name_of_the_output_folder_makes_no_difference(plan: Plan) -> None:
    write_plan(asked(), plan)
    other = small()
    other.args.output_dir = "elsewhere"
    assert cached_plan(asked(given=other)) is not None


def test_what_is_free_may_be_a_little_more_or_less_as_long_as_the_plan_fits(plan: Plan) -> None:
    assert plan.price is not None
    write_plan(asked(Budget()), plan)
    needs = plan.price.device_bytes
    assert cached_plan(asked(Budget(), now_bytes=needs)) is not None
    assert cached_plan(asked(Budget(), now_bytes=needs - 1)) is None
    assert cached_plan(asked(Budget(), now_bytes=int(1.09 * BUDGET))) is not None
    assert cached_plan(asked(Budget(), now_bytes=int(1.2 * BUDGET))) is None


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
    write_plan(one, plan)
    assert cached_plan(one) is not None
    file = folder / cache_file(one)
    values = json.loads(file.read_text(encoding="utf-8"))
    damage(values)
    file.write_text(json.dumps(values), encoding="utf-8")
    assert cached_plan(one) is None


def test_a_folder_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "file"))
    one = asked()
    write_plan(one, plan)
    assert cached_plan(one) is None


def test_nothing_is_taken_where_that_was_asked_for(plan: Plan) -> None:
    one = asked()
    write_plan(one, plan)
    with files.cache_unused():
        assert cached_plan(one) is None
    with files.cache_unused(False):
        assert cached_plan(one) is not None


def test_the_oldest_of_too_many_are_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    monkeypatch.setattr(files, "_MOST_FILES", 2)
    for epochs in range(1, 5):
        write_plan(asked(given=small(num_train_epochs=epochs)), plan)
    assert len(list(folder.glob("plan-*.json"))) == 2


def test_a_second_run_neither_plans_nor_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    step_time._of_cpu.cache_clear()  # a test before may have measured
    work = task(bert(2, 64, 100), lengths=(9, 12, 16, 20))
    to_plan = work.placed(Budget(bytes=10**9), torch.device("cpu"))
    found = plan_for(to_plan)
    assert not found.cached
    step_time._of_cpu.cache_clear()

    def never(*_: object, **__: object) -> Any:
        raise AssertionError("nothing is left to find out")

    monkeypatch.setattr(search, "Search", never)
    again = plan_for(to_plan)
    assert again.cached
    assert again.chosen.to_toml() == found.chosen.to_toml()
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
