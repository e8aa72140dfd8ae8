"""Ctrl-C during training: finish the step, save a checkpoint, stop. A second one stops at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StopAfterStep(TrainerCallback):
    """Saves at the end of the step in which it was asked to stop, then interrupts.

    Stopping the Trainer by its own switch would evaluate an epoch that is not over and might
    keep that as the best; raising after the save leaves a checkpoint like any other.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.asked = False

    def ask(self, *_: Any) -> None:
        """What the signal calls."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.say("stopping after this step; press Ctrl-C again to stop at once")

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """The Trainer saves after this when told to."""
        if self.asked:
            control.should_save = True

    def on_save(self, *_: Any, **__: Any) -> None:
        """The checkpoint is complete."""
        if self.asked:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes Ctrl-C for as long as it lasts; only the main thread may."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self.ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
