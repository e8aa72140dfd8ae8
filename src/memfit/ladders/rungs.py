"""The rungs: the tutorials' recipe step by step, memfit's plans, and what each rung measured.

To add a classic rung, add it to `classic_rungs`, its label to show.py and its name to the help of
cli/ladder.py. A rung that would change nothing, because the user set it already, is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memfit.config import RunConfig
from memfit.config.files import plain
from memfit.config.training_fields import DEFAULTS, HEAD_LEARNING_RATE
from memfit.memory.components import MemoryPeak
from memfit.records.results import stored_peak
from memfit.units import GIB, format_bytes

STOCK, PLAN = "stock", "plan"

BASELINE = "baseline"

NAMES = (
    BASELINE, "accumulation", "checkpointing", "adafactor", "frozen", "tuned", "shorter", PLAN,
)  # fmt: skip

FIDELITIES = ("exact", "rounding", "optimizer", "capacity", "data")
"""What a rung does to the result, best first: the names of strategies.Fidelity."""

HARMLESS = FIDELITIES[:2]

AUTO, HALF = "auto", "half"

OK, DOES_NOT_FIT, FAILED, NOT_RUN = "ok", "does_not_fit", "failed", "not_run"

LOSS_POINTS = 0.5
"""A rung costs quality from this many points of F1 on average, if every seed is worse."""

LOSS_SHARE = 0.05
"""The same limit for an error such as mse: this share of the baseline's value."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One complete configuration; it can be run without knowing the rungs before it."""

    name: str
    kind: str = STOCK
    targets: tuple[str, ...] = ()
    """The components it is meant to shrink, beyond the rungs before it."""
    fidelity: str = "exact"
    """Fidelity of this rung and all before it; a plan's is known after planning."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """TrainingArguments' fields, over the user's."""
    freeze: str | None = None
    max_length: int | None = None
    budget: str = AUTO
    """The budget of a plan."""
    words: Mapping[str, Any] = field(default_factory=dict)
    """The fields of its label."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Rung:
        """Reads what dataclasses.asdict wrote, after a trip through JSON."""
        return cls(**{**values, "targets": tuple(values["targets"])})

    def applied_to(self, config: RunConfig) -> RunConfig:
        """Returns the user's run with this rung's changes."""
        data, model = config.data, config.model
        return replace(
            config,
            data=replace(data, max_length=self.max_length or data.max_length),
            model=replace(model, freeze=self.freeze or model.freeze),
            training={**config.training, **self.training},
            budget=self.budget if self.kind == PLAN else config.budget,
        )


def classic_rungs(config: RunConfig) -> list[Rung]:
    """The tutorials' recipe, each rung on top of the one before."""
    made = [Rung(name="")]

    def add(name: str, fidelity: str, *targets: str, **changes: Any) -> None:
        before = made[-1]
        made.append(
            replace(
                before,
                name=name,
                targets=targets,
                fidelity=max(before.fidelity, fidelity, key=FIDELITIES.index),
                **{
                    "words": {},
                    **changes,
                    "training": {**before.training, **changes.get("training", {})},
                },
            )
        )

    given = config.training
    rows = int(given.get("per_device_train_batch_size") or DEFAULTS["per_device_train_batch_size"])
    rows *= int(given.get("gradient_accumulation_steps") or 1)
    words = {"rows": rows}

    def batch(size: int) -> dict[str, Any]:
        return {"per_device_train_batch_size": size, "gradient_accumulation_steps": rows // size}

    add(BASELINE, "exact", training=batch(rows), words=words)
    if rows > 1:
        add("accumulation", "exact", "activations", training=batch(1), words=words)
    if not given.get("gradient_checkpointing"):
        add("checkpointing", "exact", "activations", training={"gradient_checkpointing": True})
    if str(given.get("optim")) != "adafactor":
        add("adafactor", "optimizer", "optimizer", training={"optim": "adafactor"})
    if config.model.lora is None and config.model.freeze != "encoder":
        # The user's rate is written out: memfit's default for a head alone is another.
        rate = given.get("learning_rate")
        rates = [float(DEFAULTS["learning_rate"] if rate is None else rate), HEAD_LEARNING_RATE]
        used, tuned = ({"training": {"learning_rate": r}, "words": {"rate": f"{r:g}"}}
                       for r in rates)  # fmt: skip
        shrunk = ("gradients", "optimizer", "activations")
        add("frozen", "capacity", *shrunk, freeze="encoder", **used)
        if rates[0] < rates[1]:
            add("tuned", "capacity", **tuned)
    tokens = max(config.data.max_length // 4, 8)  # the tutorials go from 128 to 32
    if tokens < config.data.max_length:
        add("shorter", "data", "activations", max_length=tokens, words={"tokens": tokens})
    return made[1:]


def plan_rungs(
    budgets: Sequence[str], *, baseline_bytes: int | None, card_bytes: int | None
) -> list[Rung]:
    """memfit's own plans, one for each budget; `half` is half of what the baseline needs.

    Without budgets: what is free, a 4 GB card where this one is larger, and half of the baseline.
    """
    larger = card_bytes is not None and card_bytes > 4 * GIB
    made: list[Rung] = []
    for asked in dict.fromkeys(budgets or [AUTO, *(["4GB"] if larger else []), HALF]):
        budget, label = asked, format_bytes(int(asked)) if asked.isdecimal() else asked
        if asked == HALF:
            if baseline_bytes is None:
                continue
            budget, label = f"{baseline_bytes // 2}B", format_bytes(baseline_bytes // 2)
        name = f"{PLAN}-{asked}"
        made.append(Rung(name=name, kind=PLAN, fidelity="", budget=budget, words={"budget": label}))
    return made


@dataclass(frozen=True, kw_only=True)
class RungOutcome:
    """The memory, time and quality that were measured on one rung."""

    rung: Rung
    status: str = NOT_RUN
    why: str = ""
    fidelity: str = ""
    strategies: tuple[str, ...] = ()
    """The strategies of a plan."""
    predicted: MemoryPeak | None = None
    measured: MemoryPeak | None = None
    step_seconds: tuple[float, ...] = ()
    """The timed steps, after the warm-up."""
    steps_per_epoch: int = 0
    scores: Mapping[int, float] = field(default_factory=dict)
    """The metric by seed."""

    @property
    def epoch_seconds(self) -> float | None:
        """The median of the timed steps times the steps of an epoch."""
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

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RungOutcome:
        """Reads an outcome of ladder.json, or `rung` with the result of its process."""
        rung = Rung.from_json(values["rung"])
        return cls(
            rung=replace(rung, targets=tuple(values.get("targets", rung.targets))),
            status=str(values["status"]),
            why=str(values.get("why", "")),
            fidelity=str(values.get("fidelity", rung.fidelity)),
            strategies=tuple(values.get("strategies", ())),
            predicted=stored_peak(values, "predicted"),
            measured=stored_peak(values, "measured"),
            step_seconds=tuple(values.get("step_seconds", ())),
            steps_per_epoch=int(values.get("steps_per_epoch", 0)),
            scores={int(seed): float(score) for seed, score in values.get("scores", {}).items()},
        )


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Every rung's outcome, and the machine, data and settings they were measured with."""

    model: str
    data: str
    outcomes: tuple[RungOutcome, ...]
    steps: int
    """Timed steps of each rung."""
    seeds: int = 0
    """0: quality was not asked for."""
    metric: str = "f1"
    epochs: float | None = None
    """Trained for the metric."""
    device: Mapping[str, Any] = field(default_factory=dict)
    """Its type, name and bytes."""
    budget_bytes: int | None = None
    """The limit of every rung; None: the whole device."""
    rows: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""

    @property
    def baseline(self) -> RungOutcome | None:
        """The outcome that the others are compared with."""
        return next((one for one in self.outcomes if one.rung.name == BASELINE), None)

    @property
    def is_error(self) -> bool:
        """Whether a smaller metric is better."""
        return self.metric == "mse"

    def slowdown(self, outcome: RungOutcome) -> float | None:
        """How many times as long as the baseline's an epoch takes."""
        base = self.baseline.epoch_seconds if self.baseline is not None else None
        own = outcome.epoch_seconds
        return own / base if own is not None and base else None

    def change(self, outcome: RungOutcome) -> float | None:
        """The metric against the baseline's on the same seeds: points of F1, or a share."""
        changes = self._changes(outcome)
        return statistics.fmean(changes) if changes else None

    def loses(self, outcome: RungOutcome) -> bool:
        """Whether a loss of quality was measured."""
        changes = self._changes(outcome)
        floor = LOSS_SHARE if self.is_error else LOSS_POINTS
        return bool(changes) and max(changes) < 0 and statistics.fmean(changes) <= -floor

    def may_lose(self, outcome: RungOutcome) -> bool:
        """Whether the rung changes what is learnt, and its quality was not measured."""
        known = outcome.fidelity or outcome.rung.fidelity
        return bool(known) and known not in HARMLESS and not self._changes(outcome)

    def _changes(self, outcome: RungOutcome) -> list[float]:
        base = self.baseline
        if base is None or outcome.rung.name == BASELINE:
            return []
        both = [(score, outcome.scores[seed]) for seed, score in base.scores.items()
                if seed in outcome.scores]  # fmt: skip
        if self.is_error:
            return [(theirs - own) / theirs for theirs, own in both if theirs]
        return [100 * (own - theirs) for theirs, own in both]

    def as_json(self) -> dict[str, Any]:
        """ladder.json: all fields, and the figures derived from them."""
        own: dict[str, Any] = plain(self)
        change = "share_from_baseline" if self.is_error else "points_from_baseline"
        for values, one in zip(own["outcomes"], self.outcomes, strict=True):
            unknown = one.status != OK or self.may_lose(one)
            values |= {
                "epoch_seconds": one.epoch_seconds,
                "score": one.score,
                "spread": one.spread,
                "times_baseline": self.slowdown(one),
                change: self.change(one),
                "costs_quality": None if unknown else self.loses(one),
            }
        return own
