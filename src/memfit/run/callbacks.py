"""Trainer callbacks of a run: its log, its time, one measured step, and stopping when asked to."""

# ruff: noqa: ARG002 - the Trainer decides what its callbacks are given.

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memfit.engine.ranks import Ranks
from memfit.i18n import t
from memfit.memory.components import Component, MemoryPeak
from memfit.memory.device import is_cuda
from memfit.memory.measured import Measurement, measure
from memfit.records.results import RunFolder, RunSummary
from memfit.records.run_log import RunLog, now
from memfit.run.signals import Stopped, handled
from memfit.training.progress import MemoryMeter

SHORTEST_SECONDS = 0.5

MOST_LINES = 1000
"""The time between two lines grows with the run, so that a day of training is a few thousand."""

_FEW_STEPS = 20
"""The first steps are all written down: a short run has no others."""


class StopEarly(TrainerCallback):
    """Ends the training after `patience` evaluations in a row without a better metric.

    Counted in what was logged, which a resumed run has too.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.stopped_at: int | None = None
        """The step after which it stopped."""

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Called by the Trainer, which has logged the metrics by now."""
        key = f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}"
        found = [entry[key] for entry in state.log_history if key in entry]
        if not args.greater_is_better:
            found = [-value for value in found]
        if found and len(found) - 1 - found.index(max(found)) >= self.patience:
            control.should_training_stop = True
            self.stopped_at = state.global_step

    on_train_begin = on_evaluate  # a run that was killed after its last evaluation has stopped


class RecordRun(TrainerCallback):
    """Samples at most twice a second; an evaluation or an adjustment is always kept."""

    def __init__(
        self,
        folder: Path,
        *,
        earlier_seconds: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.log = RunLog(folder)
        self.earlier_seconds = earlier_seconds
        self.summary: RunSummary | None = None
        self._folder = folder
        self._clock = clock
        self._meter: MemoryMeter | None = None
        self._started = self._sampled = self._logged = 0.0
        self._first_step = self._seen_entries = 0

    def begin(self, summary: RunSummary) -> None:
        """What is known before the first step."""
        self.summary = summary

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The first line; a page about an earlier end is out of date from here on."""
        if not state.is_world_process_zero:
            return
        RunFolder(self._folder).report.unlink(missing_ok=True)
        self._started = self._clock()
        self._sampled = self._logged = -SHORTEST_SECONDS
        self._first_step, self._seen_entries = state.global_step, len(state.log_history)
        self._meter = MemoryMeter(args.device)
        self.log.write(
            begun=self.summary or {},
            step=state.global_step,
            max_steps=state.max_steps,
            seconds=self.earlier_seconds,
            at=now(),
        )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A sample, where one is due."""
        if self._meter is None:
            return
        seconds = self._clock() - self._started
        early = state.global_step - self._first_step <= _FEW_STEPS
        last = state.global_step >= state.max_steps
        if early or last or seconds - self._sampled >= self._pause_seconds(seconds):
            self._sampled = seconds
            use = self._meter.read()
            self.log.write(
                step=state.global_step,
                seconds=round(self.earlier_seconds + seconds, 3),
                now_bytes=use.now_bytes,
                peak_bytes=use.peak_bytes,
            )
            self._new_entries(state, seconds)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """What was logged; of losses every few seconds one."""
        if self._meter is not None:
            self._new_entries(state, self._clock() - self._started)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """What follows is evaluation, and no part of the curve."""
        if self._meter is not None:
            self._new_entries(state, self._clock() - self._started)
        self._meter = None

    def _new_entries(self, state: TrainerState, seconds: float) -> None:
        """Adjustments reach the history without an event: whatever is new in it counts."""
        if len(state.log_history) < self._seen_entries:
            self._seen_entries = 0
        fresh = state.log_history[self._seen_entries :]
        self._seen_entries = len(state.log_history)
        for entry in fresh:
            if "loss" in entry and state.global_step - self._first_step > _FEW_STEPS:
                if seconds - self._logged < self._pause_seconds(seconds):
                    continue
                self._logged = seconds
            self.log.write(logged=entry)

    def _pause_seconds(self, seconds: float) -> float:
        return max(SHORTEST_SECONDS, seconds / MOST_LINES)


class TimeSteps(TrainerCallback):
    """Adds up the seconds between the begin and the end of steps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Called by the Trainer before the first micro-batch."""
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the Trainer after the update."""
        self.seconds += time.perf_counter() - self._began


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
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        """Opens the measurement."""
        self._begun_steps += 1
        # A compiled step would be traced again with the hooks in it.
        if self.step is not None or self._begun_steps < 2 or args.torch_compile:
            return
        step = state.global_step + 1
        batches: Any = parts.get("train_dataloader")
        try:
            an_epoch = math.ceil(len(batches) / max(args.gradient_accumulation_steps, 1))
        except TypeError:  # a stream has no length, and no end to meet
            an_epoch = 0
        # The last step of an epoch takes what the full ones left, unless it is the only one.
        if step == state.max_steps or an_epoch <= 1 or step % an_epoch:
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
        if not is_cuda(device):
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


_SAME_SECONDS = 5.0
"""A scheduler signals the launcher and the ranks, and the launcher the ranks once more."""


class StopAfterStep(TrainerCallback):
    """Saves at the end of the step in which it was asked to stop, then stops.

    Stopping the Trainer by its own switch would evaluate an epoch that is not over and might
    keep that as the best; raising after the save leaves a checkpoint like any other. Where the
    step ends an epoch, its evaluation still belongs to it: it is saved before and after that.
    """

    def __init__(self, say: Callable[[str], None], group: Ranks | None = None) -> None:
        self.say = say
        self.group = group or Ranks()
        self.asked: int | None = None
        self._asked_at = 0.0
        self._epoch_ends = False

    def ask(self, signal_number: int = signal.SIGINT, *_: Any) -> None:
        """What the signal calls."""
        now = time.monotonic()
        if self.asked is None:
            self.asked, self._asked_at = signal_number, now
            self.say(t("stopping after this step; press Ctrl-C again to stop at once"))
        elif self.group.is_alone or now - self._asked_at > _SAME_SECONDS:
            raise Stopped(signal_number)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The Trainer saves after this when told to."""
        if self._stops():
            control.should_save = True
            by_epoch = "epoch" in (args.eval_strategy, args.save_strategy)
            self._epoch_ends = by_epoch and float(state.epoch or 0.5).is_integer()

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """The evaluation comes between this and the save."""
        if self._stops():
            control.should_save = True
            self._epoch_ends = False

    def on_save(self, *_: Any, **__: Any) -> None:
        """The checkpoint is complete."""
        if (stopped_by := self._stops()) and not self._epoch_ends:
            raise Stopped(stopped_by)

    def _stops(self) -> int:
        """The signal by which all ranks stop; 0 while none has reached any of them."""
        return int(self.group.largest(self.asked or 0)[0])

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Takes the signals for as long as it lasts."""
        return handled(self.ask)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observers:
    """The callbacks of one training, for what is read from them afterwards."""

    record: RecordRun
    stop: StopAfterStep
    stop_early: StopEarly | None
    bar: TrainerCallback | None
    timed: TimeSteps = dataclasses.field(default_factory=TimeSteps)
    probe: MeasureOneStep = dataclasses.field(default_factory=MeasureOneStep)

    def in_order(self) -> list[TrainerCallback]:
        """Steps are timed before other callbacks wait, and logged before a stop ends the run."""
        every = (self.bar, self.timed, self.record, self.stop, self.probe, self.stop_early)
        return [callback for callback in every if callback is not None]
