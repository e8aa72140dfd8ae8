"""One view of a run: everything its folder tells, also of a run that trains, stopped or failed.

`read_view` reads the folder once. The page, the terminal, the notebook, the comparison and the
model card draw a `RunView` and ask no file themselves; figures that follow from the records
(the time of a step, the share of the budget, rows a second) are its properties.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from memfit.errors import OutputError
from memfit.memory.components import Component, MemoryPeak
from memfit.records.evaluation import Evaluation, Mistake
from memfit.records.export_results import Export, read_export
from memfit.records.results import (
    RunFolder,
    RunSummary,
    kept_reasons,
    read_evaluation,
    read_summary,
)
from memfit.records.run_log import Recorded, Sample, read_log
from memfit.report.formatting import UNUSED

Points = Sequence[tuple[float, float]]

FINISHED, RUNNING, STOPPED, FAILED, CUT = "finished", "running", "stopped", "failed", "cut"

STATES = (FINISHED, RUNNING, STOPPED, FAILED, CUT)

USELESS = ("one_class", "no_labels")
"""Warnings for which a model must not be used."""

# What the Trainer logs after an evaluation that is about the machine, not the model.
_NOT_METRICS = ("loss", "runtime", "samples_per_second", "steps_per_second")

MOST_METRICS = 4

_STRETCHES = 60
"""A curve of throughput has no more points."""


@dataclass(frozen=True, slots=True)
class Adjusted:
    """One change while the run trained."""

    step: int
    why: str
    before: str
    after: str
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanShown:
    """What plan.toml says, as far as it can be read."""

    fidelity: str = ""
    strategies: tuple[tuple[str, str, str], ...] = ()
    """Name, settings, why."""
    limits: str = ""
    reasons: tuple[str, ...] = ()
    """Decisions that are not about one strategy."""
    device_bytes: int | None = None
    host_bytes: int | None = None
    step_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PeakShown:
    """The predicted or the measured peak, beside the budget."""

    peak: MemoryPeak
    budget_bytes: int | None = None
    step: int | None = None
    """The step it was measured at; None if it is the highest of the whole run."""

    @property
    def device_bytes(self) -> int:
        """All that the device holds at the peak."""
        return self.peak.device_bytes

    @property
    def share(self) -> float | None:
        """The part of the budget it takes; None without a budget."""
        return self.device_bytes / self.budget_bytes if self.budget_bytes else None

    @property
    def over_bytes(self) -> int:
        """What exceeds the budget; negative or 0 inside it."""
        return self.device_bytes - self.budget_bytes if self.budget_bytes else 0

    @property
    def components(self) -> dict[str, int]:
        """Bytes by component and what is reserved beyond them: together the device's bytes."""
        return peak_components(self.peak)


def peak_components(peak: MemoryPeak) -> dict[str, int]:
    """A peak's components and what the allocator holds beyond them: together the device's bytes."""
    parts = {str(name): size for name, size in peak.components.items() if size > 0}
    unused = peak.device_bytes - sum(parts.values())
    return {**parts, UNUSED: unused} if unused > 0 else parts


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run as far as it got."""

    summary: RunSummary
    folder: RunFolder = RunFolder(Path())  # noqa: RUF009 - it is frozen
    state: str = ""
    why: str = ""
    step: int = 0
    max_steps: int | None = None
    seconds: float | None = None
    history: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[Sample] = ()
    adjustments: Sequence[Adjusted] = ()
    plan: PlanShown | None = None
    evaluation: Evaluation | None = None
    mistakes: Sequence[Mistake] = ()
    config: str = ""
    best_step: int | None = None
    """Where the best checkpoint so far was written."""
    export: Export | None = None
    """What `memfit export` measured afterwards."""

    # ---- memory ----

    @cached_property
    def peaks(self) -> dict[str, PeakShown]:
        """The `predicted` and the `measured` peak, as far as they are known."""
        memory = self.summary.memory
        found = {
            "predicted": (memory.predicted, None),
            "measured": (memory.measured, memory.measured_step),
        }
        return {
            name: PeakShown(peak, memory.budget_bytes, step)
            for name, (peak, step) in found.items()
            if peak is not None
        }

    def peak_bytes(self, which: str) -> int | None:
        """All that the device holds at the `predicted` or the `measured` peak."""
        return self.peaks[which].device_bytes if which in self.peaks else None

    @cached_property
    def context_bytes(self) -> int:
        """The CUDA context: device memory outside the allocator, which no sample contains."""
        sizes = [one.peak.components.get(Component.CONTEXT, 0) for one in self.peaks.values()]
        return next((size for size in reversed(sizes) if size), 0)

    @property
    def on_cpu(self) -> bool:
        """Whether the samples are the whole process, which no budget is about."""
        return not self.context_bytes

    # ---- time ----

    @cached_property
    def step_times(self) -> list[tuple[int, float]]:
        """(step, seconds a step) between samples, the slow ones with an evaluation in them too."""
        return [
            (end.step, (end.seconds - begin.seconds) / (end.step - begin.step))
            for begin, end in itertools.pairwise(self.samples)
            if end.step > begin.step and end.seconds > begin.seconds
        ]

    @property
    def step_seconds(self) -> float | None:
        """The median between two samples: evaluations and checkpoints do not count."""
        times = [seconds for _, seconds in self.step_times]
        return statistics.median(times) if times else None

    @property
    def rows_a_step(self) -> float | None:
        """The effective batch, if the records name it."""
        rows = _number(self.summary.training.get("effective_batch"))
        return rows if rows and rows > 0 else None

    @cached_property
    def rows_a_second(self) -> Points:
        """(step, rows a second): medians of stretches, without evaluations and checkpoints."""
        times, rows = self.step_times, self.rows_a_step
        if rows is None:
            return []
        stride = max(-(-len(times) // _STRETCHES), min(3, len(times)), 1)
        stretches = (times[begin : begin + stride] for begin in range(0, len(times), stride))
        return [
            (float(part[-1][0]), rows / statistics.median(seconds for _, seconds in part))
            for part in stretches
        ]

    @property
    def median_rows_a_second(self) -> float | None:
        """The throughput of the whole run."""
        values = [value for _, value in self.rows_a_second]
        return statistics.median(values) if values else None

    @property
    def seconds_left(self) -> float | None:
        """By the later half of what was sampled, since the first steps warm up."""
        if self.state != RUNNING or not self.max_steps or len(self.samples) < 4:
            return None
        begin, end = self.samples[len(self.samples) // 2], self.samples[-1]
        if end.step <= begin.step:
            return None
        return (end.seconds - begin.seconds) / (end.step - begin.step) * (self.max_steps - end.step)

    # ---- what was logged ----

    def series(self, key: str) -> list[tuple[float, float]]:
        """(step, value) for each time a value was logged and is a number."""
        return [
            (float(entry["step"]), float(entry[key]))
            for entry in self.history
            if _number(entry.get(key)) is not None and _number(entry.get("step")) is not None
        ]

    @property
    def steps_per_epoch(self) -> float | None:
        """By the last entry that names both; None where none does."""
        for entry in reversed(self.history):
            step, epoch = _number(entry.get("step")), _number(entry.get("epoch"))
            if step and epoch and step > 0 and epoch > 0:
                return step / epoch
        return None

    @property
    def metric_names(self) -> list[str]:
        """The metrics that were logged, in the order of their first appearance, four at most."""
        keys = (key for entry in self.history for key in entry if key.startswith("eval_"))
        names = dict.fromkeys(key.removeprefix("eval_") for key in keys)
        return [name for name in names if name not in _NOT_METRICS][:MOST_METRICS]

    @property
    def useless(self) -> str:
        """The warning for which the model must not be used; empty without one."""
        return next((one.kind for one in self.summary.warnings if one.kind in USELESS), "")


# ---- reading a folder ----


def read_view(folder: RunFolder, *, live: bool = False) -> RunView:
    """Reads everything; OutputError where the folder holds no run."""
    recorded = read_log(folder.path)
    finished = folder.summary.is_file()
    summary = read_summary(folder.path) if finished else _unfinished(folder, recorded)
    try:
        trainer_state = folder.trainer_state()
    except OutputError:  # cut off while it was written
        trainer_state = {}
    history = [one for one in trainer_state.get("log_history") or () if isinstance(one, dict)]
    if not (finished and history):
        last = _last_step(history)
        # An evaluation is logged at the step of its checkpoint, which may not hold it yet.
        history += [
            entry
            for entry in recorded.logged
            if (step := _int(entry.get("step"))) > last or (step == last and entry not in history)
        ]
    best = str(summary.best_checkpoint or trainer_state.get("best_model_checkpoint") or "")
    best = best.rpartition("checkpoint-")[2]
    evaluation, mistakes = read_evaluation(folder.path) or (None, ())
    return RunView(
        folder=folder,
        summary=summary,
        state=summary.status if finished else recorded.ended or (RUNNING if live else CUT),
        why="" if finished else recorded.why,
        step=_int(summary.training.get("steps")) or max(recorded.step, _last_step(history)),
        max_steps=recorded.max_steps if isinstance(recorded.max_steps, int) else None,
        seconds=(summary.seconds.get("train") if finished else recorded.seconds) or None,
        history=history,
        samples=recorded.samples,
        adjustments=adjustments(folder.path, history),
        plan=read_plan(folder.plan, kept_reasons(summary)),
        evaluation=evaluation,
        mistakes=mistakes,
        config=_text(folder.config),
        best_step=int(best) if best.isdecimal() else None,
        export=read_export(folder.path) if finished else None,
    )


def _unfinished(folder: RunFolder, recorded: Recorded) -> RunSummary:
    """What the run knew when it began, or at least the configuration it began with."""
    if recorded.begun:
        try:
            begun = RunSummary.from_dict({"model": "", "task": "", **recorded.begun})
        except (TypeError, ValueError, KeyError, AttributeError):
            begun = RunSummary(model="", task="")
        # Where it stands, in place of where it began.
        training = {**begun.training, "steps": recorded.step}
        training.pop("epochs", None)
        return replace(
            begun,
            training=training,
            seconds={**begun.seconds, "train": recorded.seconds},
            finished_at=recorded.ended_at,
        )
    if not folder.config.is_file():
        return read_summary(folder.path)  # says what is missing
    try:
        tables = tomllib.loads(_text(folder.config))
    except tomllib.TOMLDecodeError as error:
        raise OutputError(
            "cannot read {path}: {reason}", path=folder.config, reason=error
        ) from None
    model = _mapping(tables.get("model")).get("model", "")
    return RunSummary(model=str(model), task=str(_mapping(tables.get("data")).get("task", "")))


def adjustments(folder: Path, history: Sequence[Mapping[str, Any]]) -> list[Adjusted]:
    """Every change there is word of, in the log history or in adjustments.jsonl."""
    raw = [_mapping(entry.get("adjustment")) for entry in history if "adjustment" in entry]
    for line in _text(folder / "adjustments.jsonl").splitlines():
        try:
            raw.append(_mapping(json.loads(line)))
        except ValueError:
            continue
    made = [
        Adjusted(
            step=_int(item.get("step")),
            why=str(item.get("why") or ""),
            before=_words(item.get("before", item.get("from"))),
            after=_words(item.get("after", item.get("to"))),
            seconds=_number(item.get("seconds")),
        )
        for item in raw
        if item
    ]
    return sorted(dict.fromkeys(made), key=lambda item: item.step)


def read_plan(path: Path, reasons: Mapping[str, str] | None = None) -> PlanShown | None:
    """The plan in the folder; None where there is none, or nothing that can be shown.

    The file tells its reasons in the language of the run; `reasons` are those of the page.
    """
    try:
        tables = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError:
        return None
    if not tables:
        return None
    return plan_from_tables({**tables, "reasons": reasons} if reasons else tables)


def plan_from_tables(tables: Mapping[str, Any]) -> PlanShown:
    """Reads a plan from tables that are already parsed; a `Message` stays untranslated."""
    strategies, given = _mapping(tables.get("strategies")), tables.get("reasons")
    reasons = given if isinstance(given, Mapping) else dict(enumerate(given or ()))
    reasons = {name: why if isinstance(why, str) else str(why) for name, why in reasons.items()}
    predicted = _mapping(tables.get("predicted"))
    return PlanShown(
        fidelity=str(tables.get("fidelity") or ""),
        strategies=tuple(
            (str(name), _words(settings), reasons.get(name, ""))
            for name, settings in strategies.items()
        ),
        limits=_words(tables.get("micro_batching")),
        reasons=tuple(why for name, why in reasons.items() if name not in strategies),
        device_bytes=_int(predicted.get("device_peak_bytes")) or None,
        host_bytes=_int(predicted.get("host_bytes")) or None,
        step_seconds=_number(predicted.get("step_seconds")),
    )


# ---- values that may be anything ----


def _last_step(history: Sequence[Mapping[str, Any]]) -> int:
    return max([_int(entry.get("step")) for entry in history[-3:]] + [0])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _int(value: Any) -> int:
    number = _number(value)
    return int(number) if number is not None else 0


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _words(value: Any) -> str:
    """layers 9, part layer: settings as a reader takes them."""
    if isinstance(value, Mapping):
        known = {name: item for name, item in value.items() if item is not None}
        return ", ".join(f"{name} {_words(item)}" for name, item in known.items())
    if isinstance(value, list | tuple):
        return ", ".join(_words(item) for item in value)
    return "" if value is None else str(value)
