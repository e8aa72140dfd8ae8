"""What the parts of the planner hand each other: the task, one way of doing it, its price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from memfit.strategies import Combination, Effects, Fidelity, Strategy, Tier

if TYPE_CHECKING:
    from memfit.engine.micro_batches import MicroBatching
    from memfit.memory.cards import DeviceProfile
    from memfit.memory.components import MemoryPeak
    from memfit.memory.tracing.counting import StepCounts
    from memfit.planner.pricing.shallow_traces import Known
    from memfit.planner.ranks import RankCost
    from memfit.planner.workload import Workload
    from memfit.units import Budget


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    """What a plan is made for: a workload on one device, inside a budget.

    `this_machine.task_for` makes it for every command and for BudgetTrainer alike.
    """

    workload: Workload
    card: DeviceProfile | None
    """None is this machine's CPU, whose budget counts the bytes of live tensors."""
    budget: Budget
    """As it was asked for."""
    budget_bytes: int
    """What the process may hold on the device; `reserve_bytes` are taken off already."""
    exact: bool = False
    allow: frozenset[str] = frozenset()
    reserve_bytes: int = 0
    """Left free, because earlier plans needed more than was predicted."""

    def leaving(self, free_bytes: int) -> PlanTask:
        """The same task with so many bytes less to plan with."""
        return replace(
            self,
            budget_bytes=max(self.budget_bytes - free_bytes, 0),
            reserve_bytes=self.reserve_bytes + free_bytes,
        )


@dataclass(frozen=True)
class Candidate:
    """One way of training: strategies with their settings, and what is on the device at once."""

    strategies: tuple[Strategy, ...]
    micro_batching: MicroBatching

    @property
    def fidelity(self) -> Fidelity:
        """That of its least faithful strategy."""
        return max((one.fidelity for one in self.strategies), default=Fidelity.EXACT)

    @cached_property
    def _together(self) -> Combination:
        return Combination(self.strategies)

    @property
    def effects(self) -> Effects:
        """What its strategies do to a step."""
        return self._together.effects

    @property
    def tier(self) -> Tier:
        """The slowest tier one of its strategies belongs to."""
        tiers = (one.tier(self._together) for one in self.strategies)
        return max(tiers, default=Tier.USUAL)

    def get(self, name: str) -> Any:
        """The strategy of that name, or None."""
        return self._together.get(name)


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a candidate costs on one card."""

    candidate: Candidate
    peak: MemoryPeak
    """The highest moment of all phases."""
    phases: Mapping[str, MemoryPeak] = field(default_factory=dict)
    """By name: training, evaluation, saving, resuming."""
    counts: StepCounts
    """What an average step does."""
    step_seconds: float
    """An average step, by the time model."""
    host_bytes: int = 0
    """What the strategies keep in the computer's own memory, above the process itself."""
    traced: bool = False
    """Whether the whole step was traced; otherwise it is composed from traced layers."""

    @property
    def device_bytes(self) -> int:
        """What must fit into the budget."""
        return self.peak.device_bytes


@dataclass(frozen=True, slots=True)
class Timed:
    """A candidate whose memory nobody has asked for yet."""

    candidate: Candidate
    step_seconds: float


class Pricer(Protocol):
    """What candidates cost: composed in microseconds, or traced in about a second."""

    @property
    def known(self) -> Known:
        """What was traced and judged so far; grows while candidates are priced."""

    def timed(self, candidate: Candidate) -> Timed:
        """The seconds of its quick price alone, which need fewer traces and no allocator."""

    def quick(self, candidate: Candidate) -> Price:
        """Composed from traced layers."""

    def full(self, candidate: Candidate, budget_bytes: int | None = None) -> Price:
        """The whole step traced; its seconds are those of the quick price.

        A price above `budget_bytes` may be that of one large batch, and not of the largest.
        """

    def problem(self, strategies: tuple[Strategy, ...]) -> str:
        """Why these cannot be used for the task on the card; empty where they can."""

    def exchange(self, candidate: Candidate) -> RankCost:
        """What the other ranks take of one rank's memory and time."""

    def learning_parameters(self, candidate: Candidate) -> int:
        """How many parameters learn."""

    def least_seconds(self, tier: Tier, prices: Sequence[Price | Timed]) -> float:
        """What a step of a slow tier takes at least, known from the prices of the others."""

    def of(self, workload: Workload) -> Pricer:
        """The same for another task on the same card."""
