"""Writes down how a run goes, while it goes: memory, losses, adjustments."""

# ruff: noqa: ARG002 - the Trainer decides what its callbacks are given.
from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memfit.results import RunFolder, RunSummary
from memfit.runlog import RunLog, now
from memfit.runtime.progress import MemoryMeter

if TYPE_CHECKING:
    from pathlib import Path

SHORTEST_SECONDS = 0.5
MOST_LINES = 1000
"""The time between two lines grows with the run, so that a day of training is a few thousand."""
_FEW_STEPS = 20
"""The first steps are all written down: a short run has no others."""


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
