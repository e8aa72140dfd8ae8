"""What climbing finds: the outcome of each rung, and the ladder they make."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from memfit.climbing.rungs import BASELINE, HARMLESS, Rung
from memfit.files import plain
from memfit.memory.components import Component, MemoryPeak

OK, DOES_NOT_FIT, FAILED, NOT_RUN = "ok", "does_not_fit", "failed", "not_run"
LOSS_POINTS = 0.5
"""Points of F1 on average, and worse in every seed: from there a rung costs quality."""
LOSS_SHARE = 0.05
"""The same for an error such as mse: by this share of the baseline's."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rung needs, takes and ends in."""

    rung: Rung
    status: str = NOT_RUN
    why: str = ""
    fidelity: str = ""
    strategies: tuple[str, ...] = ()
    """Of a plan."""
    predicted: MemoryPeak | None = None
    measured: MemoryPeak | None = None
    step_seconds: tuple[float, ...] = ()
    """The timed steps, warm."""
    steps_per_epoch: int = 0
    scores: Mapping[int, float] = field(default_factory=dict)
    """The metric by seed."""

    @property
    def epoch_seconds(self) -> float | None:
        """Extrapolated: a warm step's median times the steps of an epoch."""
        if not self.step_seconds:
            return None
        return statistics.median(self.step_seconds) * self.steps_per_epoch

    @property
    def score(self) -> float | None:
        """The mean over seeds."""
        return statistics.fmean(self.scores.values()) if self.scores else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds."""
        return statistics.stdev(self.scores.values()) if len(self.scores) > 1 else None

    def as_json(self) -> dict[str, Any]:
        """All of it, and what follows from it."""
        values: dict[str, Any] = plain(self)
        values["rung"] = plain(asdict(self.rung))
        derived = {"epoch_seconds": self.epoch_seconds, "score": self.score, "spread": self.spread}
        return {**values, **derived}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outcome:
        """The inverse of `as_json`."""
        return cls(
            rung=Rung.from_json(values["rung"]),
            status=str(values["status"]),
            why=str(values["why"]),
            fidelity=str(values["fidelity"]),
            strategies=tuple(values["strategies"]),
            predicted=peak_from_json(values["predicted"]),
            measured=peak_from_json(values["measured"]),
            step_seconds=tuple(values["step_seconds"]),
            steps_per_epoch=int(values["steps_per_epoch"]),
            scores={int(seed): float(score) for seed, score in values["scores"].items()},
        )


def peak_from_json(values: Mapping[str, Any] | None) -> MemoryPeak | None:
    """A peak as `plain` writes it."""
    if values is None:
        return None
    parts = {Component(name): int(size) for name, size in values["components"].items()}
    return MemoryPeak(**{**values, "components": parts})


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Every rung, and what they were climbed with."""

    model: str
    data: str
    outcomes: tuple[Outcome, ...]
    steps: int
    """Timed steps a rung."""
    seeds: int = 0
    """0: quality was not asked for."""
    metric: str = "f1"
    epochs: float | None = None
    """Trained for the metric."""
    device: Mapping[str, Any] = field(default_factory=dict)
    """Its type, name and bytes."""
    budget_bytes: int | None = None
    """What every rung was held to; None: the whole device."""
    rows: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""

    @property
    def baseline(self) -> Outcome | None:
        """What the others are compared with."""
        return next((one for one in self.outcomes if one.rung.name == BASELINE), None)

    @property
    def on_cuda(self) -> bool:
        """Whether it ran on a card; otherwise bytes are those of live tensors."""
        return self.device.get("type") == "cuda"

    def slowdown(self, outcome: Outcome) -> float | None:
        """How many times as long as the baseline's an epoch takes."""
        base = self.baseline.epoch_seconds if self.baseline is not None else None
        own = outcome.epoch_seconds
        return own / base if own is not None and base else None

    def change(self, outcome: Outcome) -> float | None:
        """The metric against the baseline's on the same seeds: points of F1, or a share."""
        pairs = self._pairs(outcome)
        return statistics.fmean(pairs) if pairs else None

    def loses(self, outcome: Outcome) -> bool:
        """Whether quality was measured to be lost."""
        pairs = self._pairs(outcome)
        floor = LOSS_POINTS if self._greater_is_better else LOSS_SHARE
        return bool(pairs) and max(pairs) < 0 and statistics.fmean(pairs) <= -floor

    def may_lose(self, outcome: Outcome) -> bool:
        """Whether the way of training changes what is learnt, and nobody has measured how much."""
        known = outcome.fidelity or outcome.rung.fidelity
        return bool(known) and known not in HARMLESS and not self._pairs(outcome)

    @property
    def _greater_is_better(self) -> bool:
        return self.metric != "mse"

    def _pairs(self, outcome: Outcome) -> list[float]:
        base = self.baseline
        if base is None or outcome.rung.name == BASELINE:
            return []
        both = [(base.scores[seed], outcome.scores[seed]) for seed in base.scores
                if seed in outcome.scores]  # fmt: skip
        if self._greater_is_better:
            return [100 * (own - theirs) for theirs, own in both]
        return [(theirs - own) / theirs for theirs, own in both if theirs]

    def as_json(self) -> dict[str, Any]:
        """ladder.json."""
        own: dict[str, Any] = plain({**self.__dict__, "outcomes": []})
        own["outcomes"] = [
            {
                **one.as_json(),
                "times_baseline": self.slowdown(one),
                "points_from_baseline" if self._greater_is_better else "share_from_baseline":
                    self.change(one),
                "costs_quality": self._costs(one),
            }
            for one in self.outcomes
        ]  # fmt: skip
        return own

    def _costs(self, outcome: Outcome) -> bool | None:
        """None where it may and was not measured."""
        if outcome.status != OK or self.may_lose(outcome):
            return None
        return self.loses(outcome)
