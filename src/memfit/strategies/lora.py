"""LoRA: small adapters learn beside weights that stay as they are
(https://arxiv.org/abs/2106.09685).

A product with W becomes one with W + (alpha / rank) B A, where only A [rank, in] and B [out, rank]
learn. Gradients and optimizer state shrink to the adapters'; activations hardly do. The head was
never pre-trained and learns in full.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from memfit.errors import ConfigError
from memfit.i18n import N_, Message, t
from memfit.models.layers import add_lora, lora_targets
from memfit.strategies.base import Fidelity, PlanFigures, Setup, Strategy


@dataclass(frozen=True, slots=True)
class Lora(Strategy):
    """Adapters of peft on the attention's query and value projections.

    `alpha` is twice the rank if not given. `fresh` names weights that were initialised at random
    (a pooler the checkpoint lacks): they learn in full, as the head does. The set-up's model
    becomes the adapter model; undoing it throws the adapters away, so merge or save them first.
    """

    name = "lora"
    title = N_("LoRA")
    reason = "only small adapters and the head learn: gradients and optimizer state are theirs"
    shrinks = ("gradients", "optimizer")
    conflicts = frozenset({"freezing", "frozen_features"})

    rank: int = 8
    alpha: int | None = None
    dropout: float = 0.0
    fresh: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError("the rank of LoRA adapters is at least 1, not {rank}", rank=self.rank)
        if self.alpha is not None and self.alpha < 1:
            raise ConfigError("alpha of LoRA adapters is at least 1, not {alpha}", alpha=self.alpha)
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                "dropout of LoRA adapters is from 0 to below 1, not {dropout}",
                dropout=self.dropout,
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.CAPACITY

    def in_words(self) -> str:
        return t("LoRA of rank {rank}", rank=self.rank)

    def explain(self, plan: PlanFigures) -> str:  # noqa: ARG002
        return Message(
            "only LoRA adapters of rank {rank} and the head learn, as you allowed",
            rank=str(self.rank),
        )

    def unavailable(self, setup: Setup) -> str:
        if importlib.util.find_spec("peft") is None:
            return Message("peft is not installed; install it with: pip install memfit[lora]")
        if hasattr(setup.model, "peft_config"):
            return Message("the model has adapters already")
        if not isinstance(setup.model, PreTrainedModel):
            return Message("{name} is no transformers model", name=type(setup.model).__name__)
        try:
            lora_targets(setup.model)
        except ConfigError as error:
            return str(error)
        return ""

    def change(self, setup: Setup) -> None:
        assert isinstance(setup.model, PreTrainedModel)
        plain, put_back = setup.model, _restorer(setup.model)

        def undo() -> None:
            put_back()
            setup.model = plain

        setup.undo.append(undo)
        on_meta = any(one.is_meta for one in plain.parameters())
        setup.model = add_lora(
            plain,
            self.rank,
            alpha=self.alpha,
            dropout=self.dropout,
            fresh=self.fresh,
            on_meta=on_meta,
        )


def _restorer(model: nn.Module) -> Callable[[], None]:
    """Puts every module back in its place, and what learned before.

    peft's own `unload` would leave its trained copy of the head in the model.
    """
    children = [(module, dict(module._modules)) for module in model.modules()]
    learning = [(one, one.requires_grad) for one in model.parameters()]

    def put_back() -> None:
        for module, before in children:
            module._modules = before
        for parameter, learned in learning:
            parameter.requires_grad = learned
        held: Any = model
        if hasattr(held, "peft_config"):
            del held.peft_config

    return put_back
