"""The plan a run trains by: made for the budget, given as a file, or that of the run resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.announce import line
from memfit.config import RunConfig
from memfit.errors import DoesNotFitError, TraceError
from memfit.messages import language, t
from memfit.results import RunFolder
from memfit.units import Budget, format_bytes, parse_budget

if TYPE_CHECKING:
    import torch

    from memfit.planner.plan import Checked, Plan
    from memfit.planner.values import Pricer, Workload
    from memfit.runtime.batching import MicroBatching

Say = Callable[[Any], None]


_PLANS_AGAIN = 3
"""After so many plans that missed their budget the last one is adjusted as it runs."""


@dataclasses.dataclass(kw_only=True)
class Choosing:
    """What a plan is chosen for, and where it will be kept."""

    config: RunConfig
    workload: Workload
    device: torch.device
    folder: RunFolder
    say: Say
    checkpoint: Path | None = None
    """The checkpoint a resumed run goes on from."""
    reserve_bytes: int = 0
    """Left free by the next plan: rehearsals of those before ran out of memory."""
    kept: bool = False
    """Whether the plan is that of an earlier run of the same task."""
    _missed: int = 0
    _pricer: Pricer | None = None

    @property
    def may_plan_again(self) -> bool:
        """Whether there is another plan to make when this one misses its budget.

        A resumed run goes on with the optimizer's state as its plan stored it.
        """
        return self.checkpoint is None and self._missed < _PLANS_AGAIN

    def leave_free(self, short_bytes: int) -> None:
        """The last plan needed about so much more than it was allowed."""
        self.reserve_bytes += short_bytes
        self._missed += 1

    def choose(self, given: Plan | None = None) -> Plan | None:
        """The plan; None where memory cannot be predicted and no budget was promised."""
        try:
            if self.checkpoint is not None and self.folder.plan.is_file():
                return self._resumed()
            if given is not None:
                return self._fitting(given, t("the plan given"))
            if self.config.plan is not None:
                from memfit.planner.plan import Plan

                return self._fitting(Plan.read(Path(self.config.plan)), self.config.plan)
            return self._made()
        except TraceError as error:
            if self._budget != Budget():
                raise  # a promise that cannot be checked is not made
            self.say(line("note", t("memory cannot be predicted: {error}", error=error)))
            return None

    @property
    def _budget(self) -> Budget:
        return parse_budget(self.config.budget)

    def _made(self) -> Plan:
        from memfit.planner.here import chosen_here

        found = chosen_here(
            self.workload,
            self._budget,
            self.device,
            exact=self.config.exact,
            allow=self.config.allowed,
            folder=self.folder.path,
            reserve_bytes=self.reserve_bytes,
            pricer=self._pricer,
        )
        self._pricer, self.kept = found.pricer, found.kept
        for note in found.notes:
            self.say(line("note", note.sentence(language())))
        return found.plan

    def _fitting(self, plan: Plan, name: str) -> Plan:
        checked = self._checked(plan)
        if not checked.fits:
            raise DoesNotFitError(does_not_fit_sentence(checked, name))
        return checked.plan

    def _checked(self, plan: Plan) -> Checked:
        from memfit.planner.here import check_here

        return check_here(plan, self.workload, self._budget, self.device)

    def _resumed(self) -> Plan:
        """The plan it was begun by; where it no longer fits, with smaller micro-batches."""
        from memfit.planner.here import fit_here
        from memfit.planner.plan import Plan

        plan = Plan.read(self.folder.plan)
        recorded = self._recorded()
        if recorded is not None:
            candidate = dataclasses.replace(plan.candidate, micro_batching=recorded)
            plan = dataclasses.replace(plan, candidate=candidate)
        checked = self._checked(plan)
        if checked.fits:
            return checked.plan
        return fit_here(self.workload, plan.strategies, self._budget, self.device)

    def _recorded(self) -> MicroBatching | None:
        """The micro-batches of the checkpoint, unless there is another budget now."""
        from memfit.runtime.checkpoint import recorded_micro_batching

        if self.checkpoint is None or not self.folder.config.is_file():
            return None
        if RunConfig.from_toml(self.folder.config).budget != self.config.budget:
            return None
        return recorded_micro_batching(self.checkpoint)


def does_not_fit_sentence(checked: Checked, name: str) -> str:
    """By how much a plan misses the budget, and what has changed since it was made."""
    price = checked.plan.price
    assert price is not None
    sentence = t(
        "{name} does not fit: it needs {needs} and the budget is {budget}, so "
        "{missing} are missing; make a new one with memfit plan",
        name=name,
        needs=format_bytes(price.device_bytes),
        budget=format_bytes(checked.plan.digest.budget_bytes),
        missing=format_bytes(checked.missing_bytes),
    )
    return f"{sentence} ({'; '.join(checked.changed)})" if checked.changed else sentence
