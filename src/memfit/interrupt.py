"""Ctrl-C and SIGTERM in training: finish the step, save, stop. A second one stops at once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memfit.messages import t
from memfit.signals import Stopped, handled


class StopAfterStep(TrainerCallback):
    """Saves at the end of the step in which it was asked to stop, then stops.

    Stopping the Trainer by its own switch would evaluate an epoch that is not over and might
    keep that as the best; raising after the save leaves a checkpoint like any other. Where the
    step ends an epoch, its evaluation still belongs to it: it is saved before and after that.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.asked: int | None = None
        self._epoch_ends = False

    def ask(self, signal_number: int = signal.SIGINT, *_: Any) -> None:
        """What the signal calls."""
        if self.asked is not None:
            raise Stopped(signal_number)
        self.asked = signal_number
        self.say(t("stopping after this step; press Ctrl-C again to stop at once"))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The Trainer saves after this when told to."""
        if self.asked is not None:
            control.should_save = True
            by_epoch = "epoch" in (args.eval_strategy, args.save_strategy)
            self._epoch_ends = by_epoch and float(state.epoch or 0.5).is_integer()

    def on_epoch_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """The evaluation comes between this and the save."""
        if self.asked is not None:
            control.should_save = True
            self._epoch_ends = False

    def on_save(self, *_: Any, **__: Any) -> None:
        """The checkpoint is complete."""
        if self.asked is not None and not self._epoch_ends:
            raise Stopped(self.asked)

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Takes the signals for as long as it lasts."""
        return handled(self.ask)
