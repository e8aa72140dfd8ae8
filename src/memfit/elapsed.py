"""Training time that is not lost when a run is interrupted: each checkpoint keeps its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from memfit.errors import OutputError
from memfit.files import read_json

_FILE = "trainer_state.json"


class KeepElapsed(TrainerCallback, ExportableState):
    """The seconds trained so far are part of the Trainer's state; `earlier` are other sessions'.

    The Trainer asks for the state while it writes a checkpoint, so they belong to what the
    checkpoint's manifest lists.
    """

    def __init__(self, earlier_seconds: float = 0.0) -> None:
        self.earlier_seconds = earlier_seconds
        self._started: float | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The clock of this session."""
        self._started = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """As the Trainer stores it, and makes a callback from again."""
        session = 0.0 if self._started is None else time.perf_counter() - self._started
        return {"args": {"earlier_seconds": self.earlier_seconds + session}, "attributes": {}}


def elapsed_seconds(checkpoint: Path | None) -> float:
    """What was trained up to a checkpoint; 0 where it does not say."""
    if checkpoint is None:
        return 0.0
    try:
        kept = read_json(checkpoint / _FILE)["stateful_callbacks"][KeepElapsed.__name__]
        return float(kept["args"]["earlier_seconds"])
    except (OutputError, KeyError, TypeError, ValueError):
        return 0.0
