"""A progress bar that says what people wait for, and memory among what the Trainer logs."""

# ruff: noqa: ARG002 - the Trainer decides what its callbacks are given.

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memfit import waiting
from memfit.i18n import N_, pt, t
from memfit.memory.device import held_bytes, is_cuda, kind_of
from memfit.printing import encodable
from memfit.units import GIB, Budget, format_bytes, format_seconds

_METRICS = ("f1", "accuracy", "mse", "mae", "loss")

# The first step also compiles, allocates and warms caches: it says nothing about the others.
_WARM_UP_STEPS = 1

_TIMED_STEPS = 3

_LINES_IN_A_PIPE = 20


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory in use now and at most so far."""

    now_bytes: int
    peak_bytes: int


class MemoryMeter:
    """What the device's allocator holds; on a CPU, what the process holds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peak_bytes = 0

    def read(self) -> MemoryUse:
        """Ask now. Costs no synchronisation."""
        now = held_bytes(self.device)
        if is_cuda(self.device):
            return MemoryUse(now, torch.cuda.max_memory_reserved(self.device))
        self._peak_bytes = max(self._peak_bytes, now)
        return MemoryUse(now, self._peak_bytes)


class _TwoLines(Progress):
    """The bar, and below it what 80 columns have no room for beside it."""

    status = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        # What goes on between steps: an evaluation, a checkpoint.
        yield Text(waiting.sentence() or self.status, no_wrap=True, overflow="ellipsis")


class MemfitProgress(TrainerCallback):
    """Takes the place of the Trainer's bar. In a pipe it prints plain lines instead.

    `step_seconds` is a prediction; without one the total time is said after the first step, and
    again once a few have shown what a step takes when everything is warm.
    `read_memory` says what counts against the budget; by default the allocator of the device. On a
    CPU it is the whole process, which is no part of any budget, and called so.
    `read_tokens` counts what was trained on since the start; a BudgetTrainer gives its own count.
    """

    def __init__(
        self,
        *,
        budget_bytes: int | None = None,
        step_seconds: float | None = None,
        read_memory: Callable[[], MemoryUse] | None = None,
        read_tokens: Callable[[], int] | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.step_seconds = step_seconds
        self.between_seconds = 0.0
        """Evaluations and checkpoints on the way to the last step, as predicted."""
        self.read_memory = read_memory
        self.read_tokens = read_tokens
        if console is None:
            encodable(sys.stderr)
        self.console = console or Console(file=sys.stderr)
        self.clock = clock
        self._bar: _TwoLines | None = None
        self._task = TaskID(0)
        self._read_memory: Callable[[], MemoryUse] | None = None
        self._shown: dict[str, str] = {}
        self._is_process = False
        self._first_step = self._first_tokens = 0
        self._started = self._paused = self._pause_began = 0.0

    # ---- what the Trainer calls ----

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        self._read_memory = self.read_memory or MemoryMeter(args.device).read
        self._is_process = self.read_memory is None and kind_of(args.device) == "cpu"
        self._first_step, self._started, self._paused = state.global_step, self.clock(), 0.0
        self._first_tokens = self._tokens()
        steps = state.max_steps - state.global_step
        kind = (
            N_("training: {steps} steps, about {time}")
            if self.step_seconds
            else N_("training: {steps} steps")
        )
        about = format_seconds(steps * (self.step_seconds or 0.0) + self.between_seconds)
        self.say(t(kind, steps=steps, time=about))
        # A dumb terminal cannot take a line back: it gets lines, like a pipe.
        if self.console.is_terminal and self.console.is_interactive:
            self._bar = _TwoLines(
                TextColumn(pt("progress bar", "training")),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[pace]}", markup=False),
                console=self.console,
                expand=True,
            )
            self._task = self._bar.add_task(
                "", total=state.max_steps, completed=state.global_step, pace=""
            )
            waiting.shown_by_bar(True)
            self._bar.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._read_memory is None:
            return
        done = state.global_step - self._first_step
        if done == _WARM_UP_STEPS:
            self._say_total(
                state,
                self.clock() - self._started,
                N_("training will take about {time} by the first step, evaluation aside"),
            )
            self._started, self._paused = self.clock(), 0.0
            self._first_tokens = self._tokens()
        if done == _WARM_UP_STEPS + _TIMED_STEPS:
            self._say_total(state, self.seconds_a_step(state))
        if self._bar is not None:
            self._bar.status = self._status()
            self._bar.update(self._task, completed=state.global_step, pace=self._pace(state))
        elif state.global_step % max(1, state.max_steps // _LINES_IN_A_PIPE) == 0 or (
            state.global_step == state.max_steps
        ):
            step = t("step {step}/{steps}", step=state.global_step, steps=state.max_steps)
            shown = [one for one in (step, self._status(), self._pace(state)) if one]
            self.say("  ".join(shown))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs and "loss" in logs:
            self._shown["loss"] = _figure("loss", float(logs["loss"]))

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # Evaluation is not a training step: its time is left out of the time a step takes.
        self._pause_began = self._pause_began or self.clock()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if self._pause_began:
            self._paused += self.clock() - self._pause_began
            self._pause_began = 0.0
        if self._read_memory is None or not metrics:
            return
        # The metric that chooses the best model, or the first of those people look at.
        for name in ((args.metric_for_best_model or "").removeprefix("eval_"), *_METRICS):
            if isinstance(value := metrics.get(f"eval_{name}"), int | float):
                self._shown[name] = figure = _figure(name, float(value))
                self.say(t("epoch {epoch:.2f}: {metric}", epoch=state.epoch or 0.0, metric=figure))
                break

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.close()

    def expect(self, step_seconds: float, between_seconds: float) -> None:
        """Takes what the rehearsal measured, unless a prediction was given."""
        if self.step_seconds is None:
            self.step_seconds, self.between_seconds = step_seconds, between_seconds

    def say(self, line: str) -> None:
        """One line above the bar."""
        if self._bar is not None:
            self._bar.refresh()
        else:
            waiting.make_way()
        # A log file gets lines whole, however long.
        self.console.print(Text(line), soft_wrap=not self.console.is_terminal)

    def close(self) -> None:
        """Give the terminal back; also after a training that was interrupted."""
        if self._bar is not None:
            self._bar.stop()
            waiting.shown_by_bar(False)
        self._bar = self._read_memory = None

    # ---- what is shown ----

    def seconds_a_step(self, state: TrainerState) -> float | None:
        """Measured after the warm-up, evaluation left out; the prediction until then."""
        timed = state.global_step - self._first_step - _WARM_UP_STEPS
        if timed < 1:
            return self.step_seconds
        return self._timed_seconds() / timed

    def _say_total(
        self,
        state: TrainerState,
        seconds: float | None,
        message: str = N_("training will take about {time}, evaluation aside"),
    ) -> None:
        """Not where it was said before the start, nor where nothing is left to wait for."""
        left = state.global_step < state.max_steps
        if self.step_seconds is None and seconds is not None and left:
            total = format_seconds(seconds * (state.max_steps - self._first_step))
            self.say(t(message, time=total))

    def _status(self) -> str:
        """What was learnt and what it holds: loss, metric, memory."""
        shown = list(self._shown.values())
        if self._read_memory is not None:
            use = self._read_memory()
            kind = (
                N_("memory {now} (peak {peak} of {budget})")
                if self.budget_bytes
                else N_("memory {now} (peak {peak})")
            )
            sizes = {
                "now": format_bytes(use.now_bytes),
                "peak": format_bytes(use.peak_bytes),
                "budget": format_bytes(self.budget_bytes or 0),
            }
            shown.append(t(N_("process {now}") if self._is_process else kind, **sizes))
        return "  ".join(shown)

    def _pace(self, state: TrainerState) -> str:
        """How fast it goes, and how long it takes still."""
        shown = []
        tokens, seconds = self._tokens() - self._first_tokens, self._timed_seconds()
        warm = state.global_step - self._first_step > _WARM_UP_STEPS
        if warm and tokens > 0 and seconds > 0:
            shown.append(t("{tokens:,.0f} tokens/s", tokens=tokens / seconds))
        step_seconds = self.seconds_a_step(state)
        if step_seconds is not None and state.global_step < state.max_steps:
            left = (state.max_steps - state.global_step) * step_seconds
            shown.append(t("{time} left", time=format_seconds(left)))
        return "  ".join(shown)

    def _tokens(self) -> int:
        return self.read_tokens() if self.read_tokens is not None else 0

    def _timed_seconds(self) -> float:
        return self.clock() - self._started - self._paused


_METRIC_NAMES = {
    "loss": N_("loss"),
    "accuracy": N_("accuracy"),
    "mse": N_("mse"),
    "mae": N_("mae"),
}


def _figure(name: str, value: float) -> str:
    """Under what a person calls it, where there is a word for it."""
    called = t(_METRIC_NAMES[name]) if name in _METRIC_NAMES else name
    return t("{name} {value}", name=called, value=f"{value:.4f}")


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


def register_memory_logging(trainer: Trainer, budget: Budget | None = None) -> None:
    """Put it before every callback that reports; once."""
    callbacks = trainer.callback_handler.callbacks
    if not any(isinstance(one, MemoryLogging) for one in callbacks):
        callbacks.insert(0, MemoryLogging(None if budget is None else budget.bytes))
