"""Optimizers with a small state: Adafactor keeps sums over rows and columns, not two moments.

AdamW keeps 8 bytes a parameter. Adafactor (https://arxiv.org/abs/1804.04235) keeps of a matrix
[n, m] the n + m sums its second moments are made from, and no first moment: a few thousandths.
It is another update rule, clipped by its own rule, so the fidelity is `optimizer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from memfit.errors import ConfigError, nearest
from memfit.i18n import N_, Message, pt
from memfit.strategies.base import (
    Fidelity,
    PlanFigures,
    Setup,
    Strategy,
    change_arguments,
    is_users,
    plain_value,
)

RULES = ("adafactor",)


@dataclass(frozen=True, slots=True)
class SmallStateOptimizer(Strategy):
    """transformers' Adafactor at the learning rate and schedule of the arguments.

    The Trainer itself turns off the two settings that would overrule these
    (`scale_parameter`, `relative_step`).
    """

    name = "small_state_optimizer"
    title = N_("a small-state optimizer")
    reason = "the optimizer's state shrinks from 8 bytes a parameter to nearly nothing"
    shrinks = ("optimizer",)

    rule: Literal["adafactor"] = "adafactor"

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ConfigError(
                "there is no small-state optimizer {rule}.{hint}",
                rule=repr(self.rule),
                hint=nearest(self.rule, RULES),
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.OPTIMIZER

    def in_words(self) -> str:
        return pt("settings", "{rule}", rule=self.rule)

    def explain(self, plan: PlanFigures) -> str:  # noqa: ARG002
        return Message(
            "{rule} instead of AdamW, as you allowed: its state is nearly nothing", rule=self.rule
        )

    def stock_arguments(self) -> dict[str, Any]:
        return {"optim": self.rule}

    def unavailable(self, setup: Setup) -> str:
        if plain_value(setup, "optim") == self.rule:
            return Message("optim={rule} is set already", rule=repr(self.rule))
        if is_users(setup, "optim"):
            return Message("you chose optim={optim}", optim=repr(plain_value(setup, "optim")))
        if setup.args.optim_args:
            return Message(
                "optim_args={optim_args} is meant for another optimizer",
                optim_args=repr(setup.args.optim_args),
            )
        if setup.make_optimizer is not None:
            return Message("another strategy brings its own optimizer")
        return ""

    def change(self, setup: Setup) -> None:
        change_arguments(setup, optim=self.rule)
