"""Memory among what the Trainer logs, so that TensorBoard, W&B and MLflow draw it by themselves."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from memfit.runtime.progress import MemoryMeter
from memfit.units import GIB, Budget


class MemoryLogging(TrainerCallback):
    """Adds `memory_gib`, `memory_peak_gib` and, where there is one, `memory_budget_gib`.

    On a GPU it is what PyTorch's allocator has reserved, without the CUDA context; on a CPU what
    the process holds. Only what is reported gets them: the Trainer's own history stays as it is.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._meter: MemoryMeter | None = None

    def on_log(self, args: Any, *_: Any, **parts: Any) -> None:
        """Called by the Trainer, before what reports: see `register`."""
        logs: dict[str, Any] | None = parts.get("logs")
        if logs is None or "loss" not in logs:
            return  # evaluations and the summary at the end are not steps
        if self._meter is None:
            self._meter = MemoryMeter(args.device)
        use = self._meter.read()
        logs["memory_gib"] = round(use.now_bytes / GIB, 3)
        logs["memory_peak_gib"] = round(use.peak_bytes / GIB, 3)
        if self.budget_bytes is not None:
            logs["memory_budget_gib"] = round(self.budget_bytes / GIB, 3)


def register(trainer: Trainer, budget: Budget | None = None) -> None:
    """Put it before every callback that reports; once."""
    callbacks = trainer.callback_handler.callbacks
    if not any(isinstance(one, MemoryLogging) for one in callbacks):
        callbacks.insert(0, MemoryLogging(None if budget is None else budget.bytes))
