"""Traces of strategies for tests: their memory, their parts, and why they cannot be used."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from memfit.engine.micro_batches import MicroBatching
from memfit.errors import ConfigError
from memfit.memory.cards import DeviceProfile
from memfit.memory.components import MemoryPeak
from memfit.planner.memory_price import phase_peaks
from memfit.planner.plan import Plan
from memfit.planner.price import Price, Pricer
from memfit.planner.task import Task
from memfit.planner.trace import StepTrace, Tracer
from memfit.strategies import Strategy, ordered


class Candidate(NamedTuple):
    """Strategies at one limit of the micro-batches."""

    strategies: tuple[Strategy, ...]
    micro_batching: MicroBatching = MicroBatching()


_pricers: dict[tuple[int, DeviceProfile | None], tuple[Task, Pricer]] = {}


def pricer_of(task: Task, card: DeviceProfile | None) -> Pricer:
    """One a task and card, with the traces it has made; the task is held, so that its id is."""
    key = (id(task), card)
    if key not in _pricers:
        _pricers[key] = (task, Pricer(dataclasses.replace(task, card=card)))
    return _pricers[key][1]


def price_memory(
    task: Task, candidate: Candidate, card: DeviceProfile | None, *, tokens: int | None = None
) -> tuple[MemoryPeak, Mapping[str, MemoryPeak], StepTrace]:
    """The highest peak of all phases, each phase's own, and the trace they come from.

    `tokens` are those of a micro-batch, instead of the most there can be.
    """
    pricer = pricer_of(task, card)
    if tokens is not None:
        trace = pricer.tracer.step(*candidate, tokens=tokens)
        phases = phase_peaks(pricer.priced(trace, *candidate), card)
        return max(phases.values(), key=lambda one: one.device_bytes), phases, trace
    found = pricer.memory(*candidate)
    return found.peak, found.phases, found.trace


def trace_step(
    task: Task,
    candidate: Candidate,
    card: DeviceProfile | None,
    *,
    tokens: int | None = None,
    layers: int | None = None,
    whole: bool = False,
) -> StepTrace:
    """The step at full depth, or of a model of only so many layers."""
    tracer = pricer_of(task, card).tracer
    return tracer.step(*candidate, tokens=tokens, layers=layers, whole=whole)


def unavailable_reason(
    strategies: Strategy | Sequence[Strategy], task: Task, card: DeviceProfile | None
) -> str:
    """Why these cannot be used together for this task on this card; empty where they can."""
    chosen = [strategies] if isinstance(strategies, Strategy) else list(strategies)
    try:
        chosen = ordered(chosen)
    except ConfigError as error:
        return error.reason
    found = Tracer(dataclasses.replace(task, card=card)).objections(chosen)
    return next(iter(found.values()), "")


def used(plan: Plan | Price, name: str) -> Any:
    """The plan's strategy of that name; None where it has none."""
    return next((one for one in plan.strategies if one.name == name), None)
