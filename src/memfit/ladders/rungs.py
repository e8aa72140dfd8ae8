"""The rungs: what tutorials do one after the other, memfit's plans, and how each turned out.

A classic rung is a line of `CLASSIC`: a name (its sentences are in show.py), what it is meant to
shrink, what it does to the result, and what it changes on top of the rung before. To add one, add a
line here, its label in show.py and its name in the help of cli/ladder.py. A rung that would change
nothing, since the user asked for it anyway, is left out.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from memfit.config import RunConfig
from memfit.config.files import plain
from memfit.config.training_fields import DEFAULTS, HEAD_LEARNING_RATE
from memfit.errors import ConfigError, nearest
from memfit.i18n import t
from memfit.memory.components import MemoryPeak
from memfit.records.results import stored_peak
from memfit.units import GIB, format_bytes, parse_budget

STOCK, PLAN = "stock", "plan"

BASELINE = "baseline"

FIDELITIES = ("exact", "rounding", "optimizer", "capacity", "data")
"""What a rung does to the result, best first: the names of strategies.Fidelity."""

HARMLESS = FIDELITIES[:2]

AUTO, HALF = "auto", "half"

SMALL_CARD = "4GB"

_SHORTER = 4

_SHORTEST_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One way of training, whole: nothing of the rungs before it has to be known to run it."""

    name: str
    kind: str = STOCK
    targets: tuple[str, ...] = ()
    """The components it is meant to shrink, beyond the rungs before it."""
    fidelity: str = "exact"
    """Fidelity of this rung and all before it; that of a plan is known once it is made."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """TrainingArguments' fields, over the user's."""
    freeze: str | None = None
    max_length: int | None = None
    budget: str = AUTO
    """What a plan is made for."""
    words: Mapping[str, Any] = field(default_factory=dict)
    """The fields of its name's sentence."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Rung:
        """The inverse of dataclasses.asdict, after a trip through JSON."""
        return cls(**{**values, "targets": tuple(values["targets"])})

    def applied_to(self, config: RunConfig) -> RunConfig:
        """The user's run with this rung's changes."""
        data, model = config.data, config.model
        if self.max_length is not None:
            data = dataclasses.replace(data, max_length=self.max_length)
        if self.freeze is not None:
            model = dataclasses.replace(model, freeze=self.freeze)
        training = {**config.training, **self.training}
        budget = self.budget if self.kind == PLAN else config.budget
        return dataclasses.replace(config, data=data, model=model, training=training, budget=budget)


Change = Callable[[Rung, RunConfig], Mapping[str, Any] | None]
"""From the rung before and the user's run to what is new; None where nothing would be."""


@dataclass(frozen=True)
class Classic:
    """One line of the recipe."""

    name: str
    targets: tuple[str, ...]
    fidelity: str
    change: Change


def effective_rows(config: RunConfig) -> int:
    """Rows one optimizer step learns from."""
    rows = config.training.get("per_device_train_batch_size")
    rows = DEFAULTS["per_device_train_batch_size"] if rows is None else rows
    return int(rows) * int(config.training.get("gradient_accumulation_steps") or 1)


def _baseline(_: Rung, config: RunConfig) -> Mapping[str, Any]:
    rows = effective_rows(config)
    training = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
    return {"training": training, "words": {"rows": rows}}


def _accumulation(_: Rung, config: RunConfig) -> Mapping[str, Any] | None:
    rows = effective_rows(config)
    if rows == 1:
        return None
    training = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": rows}
    return {"training": training, "words": {"rows": rows}}


def _checkpointing(_: Rung, config: RunConfig) -> Mapping[str, Any] | None:
    if config.training.get("gradient_checkpointing"):
        return None
    return {"training": {"gradient_checkpointing": True}}


def _adafactor(_: Rung, config: RunConfig) -> Mapping[str, Any] | None:
    if str(config.training.get("optim")) == "adafactor":
        return None
    return {"training": {"optim": "adafactor"}}


def _frozen(_: Rung, config: RunConfig) -> Mapping[str, Any] | None:
    """Written out, since memfit's own default for a head would not be the user's rate."""
    if config.model.lora is not None or config.model.freeze == "encoder":
        return None
    rate = _learning_rate(config)
    words = {"rate": f"{rate:g}"}
    return {"freeze": "encoder", "training": {"learning_rate": rate}, "words": words}


def _tuned(before: Rung, config: RunConfig) -> Mapping[str, Any] | None:
    if before.freeze != "encoder" or _learning_rate(config) >= HEAD_LEARNING_RATE:
        return None
    words = {"rate": f"{HEAD_LEARNING_RATE:g}"}
    return {"training": {"learning_rate": HEAD_LEARNING_RATE}, "words": words}


def _shorter(_: Rung, config: RunConfig) -> Mapping[str, Any] | None:
    """The tutorials go from 128 to 32."""
    tokens = max(config.data.max_length // _SHORTER, _SHORTEST_TOKENS)
    if tokens >= config.data.max_length:
        return None
    return {"max_length": tokens, "words": {"tokens": tokens}}


def _learning_rate(config: RunConfig) -> float:
    rate = config.training.get("learning_rate")
    return float(DEFAULTS["learning_rate"] if rate is None else rate)


_ALL_BUT_WEIGHTS = ("gradients", "optimizer", "activations")

CLASSIC: tuple[Classic, ...] = (
    Classic(BASELINE, (), "exact", _baseline),
    Classic("accumulation", ("activations",), "exact", _accumulation),
    Classic("checkpointing", ("activations",), "exact", _checkpointing),
    Classic("adafactor", ("optimizer",), "optimizer", _adafactor),
    Classic("frozen", _ALL_BUT_WEIGHTS, "capacity", _frozen),
    Classic("tuned", (), "capacity", _tuned),
    Classic("shorter", ("activations",), "data", _shorter),
)


def classic_rungs(config: RunConfig) -> list[Rung]:
    """Each on top of the one before."""
    made: list[Rung] = []
    before = Rung(name="")
    for line in CLASSIC:
        new = line.change(before, config)
        if new is None:
            continue
        before = dataclasses.replace(
            before,
            name=line.name,
            targets=line.targets,
            fidelity=max(before.fidelity, line.fidelity, key=FIDELITIES.index),
            training={**before.training, **new.get("training", {})},
            freeze=new.get("freeze", before.freeze),
            max_length=new.get("max_length", before.max_length),
            words=new.get("words", {}),
        )
        made.append(before)
    return made


def plan_rungs(
    budgets: Sequence[str], *, baseline_bytes: int | None, card_bytes: int | None
) -> list[Rung]:
    """memfit's own plans: one a budget; `half` is half of what the baseline needs.

    Without budgets: what is free, a 4 GB card where this one is larger, and half of the baseline.
    """
    larger = card_bytes is not None and card_bytes > 4 * GIB
    asked = budgets or [AUTO, *([SMALL_CARD] if larger else []), HALF]
    made: dict[str, Rung] = {}
    for one in asked:
        if one == HALF and baseline_bytes is None:
            continue
        name = f"{PLAN}-{one}"
        budget, shown = one, format_bytes(int(one)) if one.isdecimal() else one
        if one == HALF and baseline_bytes is not None:
            budget, shown = f"{baseline_bytes // 2}B", format_bytes(baseline_bytes // 2)
        made[name] = Rung(name=name, kind=PLAN, fidelity="", budget=budget, words={"budget": shown})
    return list(made.values())


def check_choice(wanted: Iterable[str], budgets: Iterable[str]) -> None:
    """Names of rungs that are, budgets that parse."""
    known = [*(line.name for line in CLASSIC), PLAN]
    for name in wanted:
        if name not in known:
            said = {"name": repr(name), "known": ", ".join(known), "hint": nearest(name, known)}
            raise ConfigError(t("there is no rung {name}; they are {known}.{hint}", **said))
    for budget in budgets:
        if budget != HALF:
            parse_budget(budget)


OK, DOES_NOT_FIT, FAILED, NOT_RUN = "ok", "does_not_fit", "failed", "not_run"

LOSS_POINTS = 0.5
"""Points of F1 on average, and worse in every seed: from there a rung costs quality."""

LOSS_SHARE = 0.05
"""The same limit for an error such as mse: this share of the baseline's value."""


@dataclass(frozen=True, kw_only=True)
class RungOutcome:
    """What one rung needs, takes and ends in."""

    rung: Rung
    status: str = NOT_RUN
    why: str = ""
    fidelity: str = ""
    strategies: tuple[str, ...] = ()
    """The strategies of a plan."""
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
        """All fields, and the figures derived from them."""
        values: dict[str, Any] = plain(self)
        values["rung"] = plain(asdict(self.rung))
        derived = {"epoch_seconds": self.epoch_seconds, "score": self.score, "spread": self.spread}
        return {**values, **derived}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RungOutcome:
        """The inverse of `as_json`."""
        return cls(
            rung=Rung.from_json(values["rung"]),
            status=str(values["status"]),
            why=str(values["why"]),
            fidelity=str(values["fidelity"]),
            strategies=tuple(values["strategies"]),
            predicted=stored_peak(values, "predicted"),
            measured=stored_peak(values, "measured"),
            step_seconds=tuple(values["step_seconds"]),
            steps_per_epoch=int(values["steps_per_epoch"]),
            scores={int(seed): float(score) for seed, score in values["scores"].items()},
        )


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Every rung, and what they were climbed with."""

    model: str
    data: str
    outcomes: tuple[RungOutcome, ...]
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
    def baseline(self) -> RungOutcome | None:
        """What the others are compared with."""
        return next((one for one in self.outcomes if one.rung.name == BASELINE), None)

    @property
    def on_cuda(self) -> bool:
        """Whether it ran on a card; otherwise bytes are those of live tensors."""
        return self.device.get("type") == "cuda"

    def slowdown(self, outcome: RungOutcome) -> float | None:
        """How many times as long as the baseline's an epoch takes."""
        base = self.baseline.epoch_seconds if self.baseline is not None else None
        own = outcome.epoch_seconds
        return own / base if own is not None and base else None

    def change(self, outcome: RungOutcome) -> float | None:
        """The metric against the baseline's on the same seeds: points of F1, or a share."""
        pairs = self._pairs(outcome)
        return statistics.fmean(pairs) if pairs else None

    def loses(self, outcome: RungOutcome) -> bool:
        """Whether quality was measured to be lost."""
        pairs = self._pairs(outcome)
        floor = LOSS_POINTS if self._greater_is_better else LOSS_SHARE
        return bool(pairs) and max(pairs) < 0 and statistics.fmean(pairs) <= -floor

    def may_lose(self, outcome: RungOutcome) -> bool:
        """Whether the way of training changes what is learnt, and nobody has measured how much."""
        known = outcome.fidelity or outcome.rung.fidelity
        return bool(known) and known not in HARMLESS and not self._pairs(outcome)

    @property
    def _greater_is_better(self) -> bool:
        return self.metric != "mse"

    def _pairs(self, outcome: RungOutcome) -> list[float]:
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

    def _costs(self, outcome: RungOutcome) -> bool | None:
        """None where it may and was not measured."""
        if outcome.status != OK or self.may_lose(outcome):
            return None
        return self.loses(outcome)
