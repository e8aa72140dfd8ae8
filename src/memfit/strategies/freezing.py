"""Freezing: some weights do not learn, and so need no gradient and no optimizer state.

Below the lowest weight that learns nothing is kept for backward either. With the whole encoder
frozen only the head learns, and a fresh head at the 2e-5 that suits an encoder learns nothing:
F1 0.799 on ChnSentiCorp, which is what the majority class gives. At 1e-3 it is 0.915 with
m3e-small, 0.900 with a BERT-Base and 0.829 with an ALBERT-tiny, where training everything gives
0.916, 0.935 and 0.914.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from memfit.config.training_fields import HEAD_LEARNING_RATE
from memfit.errors import ConfigError
from memfit.i18n import N_, Message, t
from memfit.models.layers import freeze
from memfit.strategies.base import (
    Fidelity,
    PlanFigures,
    Setup,
    Strategy,
    change_arguments,
    is_users,
)

_TOO_LOW_FOR_A_HEAD = 1e-4


@dataclass(frozen=True, slots=True)
class Freezing(Strategy):
    """Freezes the `embeddings`, the whole `encoder`, or N layers with the embeddings under them.

    `head_learning_rate` goes with the whole encoder; without one, a learning rate the user did
    not choose becomes 1e-3.
    """

    name = "freezing"
    title = N_("freezing")
    reason = "frozen weights need no gradient, no optimizer state and no activations"
    shrinks = ("gradients", "optimizer", "activations", "time")
    conflicts = frozenset({"lora"})

    what: Literal["embeddings", "encoder"] | int = "encoder"
    head_learning_rate: float | None = None

    def __post_init__(self) -> None:
        is_part = self.what in ("embeddings", "encoder")
        is_count = isinstance(self.what, int) and not isinstance(self.what, bool) and self.what > 0
        if not is_part and not is_count:
            raise ConfigError(
                "cannot freeze {what}; write encoder, embeddings or a number of layers",
                what=repr(self.what),
            )
        if self.head_learning_rate is not None and self.what != "encoder":
            raise ConfigError("head_learning_rate goes with the whole encoder frozen")

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.CAPACITY

    def in_words(self) -> str:
        return t("{what} frozen", what=self.what)

    def explain(self, plan: PlanFigures) -> str:  # noqa: ARG002
        return Message("frozen, as you allowed: {what}", what=str(self.what))

    def stock_arguments(self) -> dict[str, Any]:
        rate = self.head_learning_rate
        return {} if rate is None else {"learning_rate": rate}

    def unavailable(self, setup: Setup) -> str:
        if hasattr(setup.model, "peft_config"):
            return Message("an adapter model has its base frozen already")
        if not isinstance(setup.model, PreTrainedModel):
            return Message(
                "{name} is no transformers model: its parts are unknown",
                name=type(setup.model).__name__,
            )
        return ""

    def change(self, setup: Setup) -> None:
        assert isinstance(setup.model, PreTrainedModel)
        learning = [one for one in setup.model.parameters() if one.requires_grad]
        freeze(setup.model, str(self.what))
        setup.undo.append(lambda: _let_learn(learning))
        if not any(one.requires_grad for one in setup.model.parameters()):
            _let_learn(learning)
            raise ConfigError("with the {what} frozen no trainable weight is left", what=self.what)
        if self.what == "encoder":
            self._set_learning_rate(setup)

    def _set_learning_rate(self, setup: Setup) -> None:
        """Only the head is left to learn, so the one learning rate there is becomes the head's."""
        given = setup.args.learning_rate
        if self.head_learning_rate is not None:
            change_arguments(setup, learning_rate=self.head_learning_rate)
        elif not is_users(setup, "learning_rate"):
            change_arguments(setup, learning_rate=HEAD_LEARNING_RATE)
            _say(
                t(
                    "only the classification head is trainable: learning_rate is {rate:g} instead "
                    "of {given:g}, at which it would learn nothing",
                    rate=HEAD_LEARNING_RATE,
                    given=given,
                )
            )
        elif given < _TOO_LOW_FOR_A_HEAD:
            _say(
                t(
                    "only the classification head is trainable, and at learning_rate={given:g} it "
                    "learns next to nothing; {rate:g} suits a head",
                    rate=HEAD_LEARNING_RATE,
                    given=given,
                )
            )


def _let_learn(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.requires_grad = True


def _say(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=5)
