"""What BudgetTrainer's collaborators see of it."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import PreTrainedModel, TrainerState, TrainingArguments

from memfit.strategies import Setup


class TrainerParts(Protocol):
    """The Trainer's own parts, and what the strategies have changed."""

    args: TrainingArguments
    state: TrainerState
    model: PreTrainedModel
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    callback_handler: Any

    @property
    def setup(self) -> Setup:
        """How the strategies want the steps to be run."""


def unwrapped(optimizer: Any) -> Any:
    """The optimizer itself; accelerate wraps it for the training."""
    return getattr(optimizer, "optimizer", optimizer)
