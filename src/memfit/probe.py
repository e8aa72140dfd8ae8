"""The memory of one training step, measured while the run goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memfit.memory.components import Component, MemoryPeak
from memfit.memory.measured import Measurement, measure


class MeasureOneStep(TrainerCallback):
    """Measures the second step, or the next whose batch is full.

    By then the optimizer's state exists and the caches are warm. The last step of an epoch may
    have a few rows only; it is measured where the run has no other.

    Reading the allocator after every module of every step would slow a small model down, so
    what the peak is made of comes from this step; on CUDA the height is that of the whole run.
    """

    def __init__(self) -> None:
        self._begun_steps = 0
        self.step: int | None = None
        """The step that was measured, counted from the run's first as 1."""
        self._open = contextlib.ExitStack()
        self._measurement: Measurement | None = None

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **parts: Any,
    ) -> None:
        """Opens the measurement."""
        self._begun_steps += 1
        # A compiled step would be traced again with the hooks in it.
        if self.step is not None or self._begun_steps < 2 or args.torch_compile:
            return
        step = state.global_step + 1
        if step == state.max_steps or not _ends_epoch(step, args, parts.get("train_dataloader")):
            self.step = step
            measuring = measure(parts["model"], parts.get("optimizer"))
            self._measurement = self._open.enter_context(measuring)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Closes it, after the update."""
        self.close()

    def close(self) -> None:
        """Ends a measurement that is still open, as after a step that failed."""
        self._open.close()

    def peak(self, device: torch.device) -> MemoryPeak | None:
        """What was measured; None where the run had no second step."""
        if self._measurement is None:
            return None
        peak = self._measurement.peak
        if device.type != "cuda":
            return peak
        allocated_bytes = max(torch.cuda.max_memory_allocated(device), peak.allocated_bytes)
        reserved_bytes = max(torch.cuda.max_memory_reserved(device), peak.reserved_bytes)
        # Other steps have longer texts, not more weights.
        longer_bytes = allocated_bytes - peak.allocated_bytes
        activation_bytes = peak.components.get(Component.ACTIVATIONS, 0) + longer_bytes
        return dataclasses.replace(
            peak,
            components={**peak.components, Component.ACTIVATIONS: activation_bytes},
            allocated_bytes=allocated_bytes,
            reserved_bytes=reserved_bytes,
            device_bytes=peak.device_bytes + reserved_bytes - peak.reserved_bytes,
        )


def _ends_epoch(step: int, args: TrainingArguments, batches: Any) -> bool:
    """Whether the step takes what the full ones left; where one step is an epoch, all are alike."""
    try:
        an_epoch = math.ceil(len(batches) / max(args.gradient_accumulation_steps, 1))
    except TypeError:  # a stream has no length, and no end to meet
        return False
    return an_epoch > 1 and step % an_epoch == 0
