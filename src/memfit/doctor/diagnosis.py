"""Everything `memfit doctor` tells, as one value and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from memfit.doctor.advice import Finding, findings
from memfit.doctor.environment import Environment, look_around
from memfit.doctor.reach import ROWS, TOKENS, Cell, Reach, reaches
from memfit.doctor.readiness import Readiness, readiness
from memfit.units import Budget

if TYPE_CHECKING:
    from memfit.memory.cards import DeviceProfile


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What there is, what is missing, what can be trained."""

    environment: Environment
    findings: tuple[Finding, ...]
    strategies: tuple[Readiness, ...] = ()
    """Empty where torch or transformers cannot be imported."""
    card: DeviceProfile | None = None
    """The card judged for: the one named, or this machine's."""
    budget_bytes: int = 0
    trains: tuple[Reach, ...] = ()

    @property
    def works(self) -> bool:
        """Whether anything can be trained at all."""
        return not any(one.fatal for one in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        found = asdict(self.environment)
        found["packages"] = {
            one.name: {
                "version": one.version,
                "wanted": one.wanted,
                "required": one.required,
                "lacking": one.lacking,
                "purpose": one.purpose,
                "command": one.command if one.lacking else "",
            }
            for one in self.environment.packages
        }
        return {
            "works": self.works,
            **found,
            "findings": [asdict(one) for one in self.findings],
            "strategies": {
                one.strategy: {"ready": one.ready, **asdict(one)} for one in self.strategies
            },
            "card": None if self.card is None else asdict(self.card),
            "budget_bytes": self.budget_bytes,
            "task": {"effective_rows": ROWS, "tokens_per_text": TOKENS},
            "trains": [_line(one) for one in self.trains],
        }


def diagnose(
    gpu: str | None = None, *, table: bool = True, say: Callable[[str], None] | None = None
) -> Diagnosis:
    """Look around; with `gpu`, judge strategies and models for a card that need not be here."""
    found = look_around()
    notes = tuple(findings(found))
    if any(one.fatal for one in notes):
        return Diagnosis(environment=found, findings=notes)
    named = _named(gpu)
    card, budget_bytes = _card(found, named)
    trains: tuple[Reach, ...] = ()
    if card is not None and table:
        trains = tuple(reaches(card, budget_bytes, say=say))
    return Diagnosis(
        environment=found,
        findings=notes,
        strategies=tuple(readiness(found, named)),
        card=card,
        budget_bytes=budget_bytes,
        trains=trains,
    )


def _named(gpu: str | None) -> DeviceProfile | None:
    from memfit.memory.cards import find_card

    return None if gpu is None else find_card(gpu)


def _card(found: Environment, named: DeviceProfile | None) -> tuple[DeviceProfile | None, int]:
    """The card to judge for, and what a run may use of it: as `--budget auto` takes it."""
    from memfit.memory.cards import this_card

    if named is not None:
        total = named.total_bytes
        return named, Budget().resolve(total_bytes=total, free_bytes=total)
    card = this_card() if found.torch.sees_gpu else None
    if card is None:
        return None, 0
    free_bytes = found.cards[0].free_bytes
    return card, Budget().resolve(total_bytes=card.total_bytes, free_bytes=free_bytes)


def _line(reach: Reach) -> dict[str, Any]:
    cells: dict[str, Cell | None] = {
        "exact": reach.exact,
        "rounding": reach.rounding,
        "allowed": reach.allowed,
    }
    return {
        "model": reach.model.name,
        "id": reach.model.id,
        "problem": reach.problem,
        **{name: None if one is None else asdict(one) for name, one in cells.items()},
    }
