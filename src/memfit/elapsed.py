"""Training time that is not lost when a run is interrupted: each checkpoint keeps its own."""

# ruff: noqa: ARG002 - the Trainer decides what its callbacks are given.
from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memfit.errors import OutputError
from memfit.files import read_json, write_json

_FILE = "elapsed.json"


class KeepElapsed(TrainerCallback):
    """Writes the seconds trained so far beside each checkpoint; `earlier` are other sessions'."""

    def __init__(self, earlier_seconds: float = 0.0) -> None:
        self.earlier_seconds = earlier_seconds
        self._started = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The clock of this session."""
        self._started = time.perf_counter()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The checkpoint is complete and in its place."""
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            seconds = self.earlier_seconds + time.perf_counter() - self._started
            write_json(folder / _FILE, {"train_seconds": seconds})


def elapsed_seconds(checkpoint: Path | None) -> float:
    """What was trained up to a checkpoint; 0 where it does not say."""
    if checkpoint is None:
        return 0.0
    try:
        seconds = read_json(checkpoint / _FILE).get("train_seconds")
    except OutputError:
        return 0.0
    return float(seconds) if isinstance(seconds, int | float) else 0.0
