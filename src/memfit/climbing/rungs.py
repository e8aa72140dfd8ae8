"""The rungs: what the tutorials do one after the other, and memfit's own plans beside them.

A classic rung is a line of `CLASSIC`: a name (its sentences are in show.py), what it is meant
to shrink, what it does to the result, and what it changes on top of the rung before. To add one,
add a line. A rung that would change nothing, since the user asked for it anyway, is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memfit.config import RunConfig
from memfit.errors import ConfigError, nearest
from memfit.messages import t
from memfit.settings import DEFAULTS, HEAD_LEARNING_RATE
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
    """With all the rungs before it; of a plan it is known when it is made."""
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
        return dataclasses.replace(config, data=data, model=model, training=training)


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
        budget = str(baseline_bytes // 2) if one == HALF and baseline_bytes is not None else one
        shown = format_bytes(int(budget)) if budget.isdecimal() else budget
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
