"""What else could be done: other permissions, more budget, smaller models."""

from __future__ import annotations

import dataclasses
import re
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from planner_fixtures import BERT_LARGE, bert, h200, planned, pricer_of, task, to_plan

from memfit.planner.advice import (
    Alternatives,
    FoundBeside,
    alternatives,
    more_budget,
    other_ways,
)
from memfit.planner.pricing import shallow_traces
from memfit.planner.search import Planning, ask
from memfit.strategies import Fidelity

BUDGET = 2_600_000_000


@pytest.fixture(scope="module")
def planning() -> Planning:
    pricer = pricer_of(BERT_LARGE, h200())
    return planned(BERT_LARGE, BUDGET, h200(), pricer=pricer, host_bytes_free=10**12)


@pytest.fixture(scope="module")
def found(planning: Planning) -> Alternatives:
    return alternatives(planning)


def test_each_permission_is_shown_with_what_it_reaches(found: Alternatives) -> None:
    assert [one.name for one in found.allow] == ["optimizer", "lora", "freeze", "truncate"]
    for one in found.allow:
        assert one.smallest.candidate.fidelity > Fidelity.ROUNDING
        assert one.smallest.device_bytes > 0
        assert one.fastest is None or one.fastest.device_bytes <= BUDGET
    lora = next(one for one in found.allow if one.name == "lora")
    assert lora.smallest.candidate.get("lora") is not None


class _DeadProcess(Executor):
    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        broken: Future[Any] = Future()
        broken.set_exception(BrokenExecutor())
        return broken


def test_another_process_finds_the_same_is_helped_and_not_missed_when_it_dies() -> None:
    workload = task(bert(2, 64, 100), lengths=(16,) * 8, per_device_train_batch_size=4)
    asked = to_plan(workload, 10**9, None, allow=frozenset(("optimizer", "lora", "freeze")))
    wanted, pricer = ask(workload, None, None, exact=False, allow=asked.allow)
    given = (wanted, pricer, asked.budget_bytes)
    beside, busy, goes_on = ThreadPoolExecutor(1), ThreadPoolExecutor(1), Event()
    busy.submit(goes_on.wait)
    with beside:
        finders = [FoundBeside(one, asked) for one in (beside, _DeadProcess(), busy, beside)]
        for one in finders[:-1]:  # the last has nothing to begin with, as where planning fails
            one.begin(pricer.known)
        found = [one(*given) for one in finders]
    goes_on.set()
    busy.shutdown()
    assert [one.name for one in found[0].allow] == ["truncate"]
    assert all(one == found[0] for one in found)


class _OneAtATime(ThreadPoolExecutor):
    """Like a pool of processes, it does not give back what it has queued."""

    def __init__(self) -> None:
        super().__init__(1)
        self.unfinished: list[int] = []
        self._sent: list[Future[Any]] = []

    def submit(self, *what: Any, **named: Any) -> Future[Any]:
        self.unfinished.append(sum(not one.done() for one in self._sent))
        self._sent.append(super().submit(*what, **named))
        return self._sent[-1]


def test_another_process_knows_the_traces_and_has_no_queue() -> None:
    workload = task(bert(2, 64, 100), lengths=(16,) * 8, per_device_train_batch_size=4)
    asked = to_plan(workload, 10**9, None)
    wanted, pricer = ask(workload, None, None, exact=False, allow=frozenset())
    expected = other_ways(wanted, pricer, asked.budget_bytes)
    with _OneAtATime() as process:
        beside = FoundBeside(process, asked)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shallow_traces, "trace_step", None)  # nothing is traced again
            patch.setattr(shallow_traces, "unavailable_reason", None)
            beside.begin(pricer.known)
            assert beside(wanted, pricer, asked.budget_bytes) == expected
    assert process.unfinished
    assert not any(process.unfinished)


def test_permission_is_said_with_its_fidelity_and_speed(
    planning: Planning, found: Alternatives
) -> None:
    chosen = planning.chosen.price
    assert chosen is not None
    said = {one.name: one.decision(chosen).sentence() for one in found.allow}
    assert said["truncate"].startswith("--allow truncate (data): ")
    assert said["lora"].startswith("--allow lora (capacity): ")
    reach = found.allow[0]
    assert reach.fastest is not None
    quick = dataclasses.replace(reach.fastest, step_seconds=chosen.step_seconds / 2)
    assert "2x as fast" in dataclasses.replace(reach, fastest=quick).decision(chosen).sentence()


def test_permission_that_reaches_nothing_says_so(planning: Planning, found: Alternatives) -> None:
    chosen = planning.chosen.price
    assert chosen is not None
    reach = next(one for one in found.allow if one.name == "freeze")
    assert reach.fastest is not None
    slow = dataclasses.replace(reach.fastest, step_seconds=chosen.step_seconds)
    same = dataclasses.replace(reach, fastest=slow).decision(chosen).sentence()
    assert same == "--allow freeze (capacity): nothing faster than this plan"
    none = dataclasses.replace(reach, fastest=None).decision(chosen).sentence()
    assert re.fullmatch(r"--allow freeze \(capacity\): nothing that fits, [\d.]+ GB at least", none)


def test_permission_that_is_given_is_not_shown_again() -> None:
    made = planned(
        BERT_LARGE,
        BUDGET,
        h200(),
        pricer=pricer_of(BERT_LARGE, h200()),
        allow=frozenset({"lora"}),
        host_bytes_free=10**12,
    )
    assert "lora" not in [one.name for one in alternatives(made).allow]


def test_more_budget_is_the_least_that_makes_it_a_tenth_faster(
    planning: Planning, found: Alternatives
) -> None:
    chosen = planning.chosen.price
    assert chosen is not None
    assert found.more is not None
    assert found.more.budget_bytes > BUDGET
    assert found.more.price.step_seconds <= 0.9 * chosen.step_seconds
    workload, card = planning.asked.workload, planning.asked.card
    again = planned(
        workload,
        found.more.budget_bytes,
        card,
        pricer=planning.pricer,
        host_bytes_free=10**12,
    )
    assert again.chosen.price is not None
    assert again.chosen.price.step_seconds <= 0.9 * chosen.step_seconds


def test_fastest_plan_needs_no_more_budget(planning: Planning) -> None:
    fastest = min(planning.prices, key=lambda one: one.step_seconds)
    assert more_budget(planning.prices, fastest) is None


def test_smaller_models_are_smaller_and_faster(planning: Planning, found: Alternatives) -> None:
    chosen = planning.chosen.price
    assert chosen is not None
    assert [(one.layers, one.width) for one in found.smaller] == [(12, 768), (6, 768), (3, 768)]
    seconds = [one.price.step_seconds for one in found.smaller]
    assert seconds == sorted(seconds, reverse=True)
    assert all(one < chosen.step_seconds for one in seconds)
    assert "12 layers, 768 wide" in found.smaller[0].decision().sentence()
