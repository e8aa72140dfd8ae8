"""Everything a run's folder tells: also of one that still trains, was stopped or failed."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit.errors import OutputError
from memfit.i18n import Message, t
from memfit.memory.components import Component
from memfit.records.evaluation import Evaluation, Mistake
from memfit.records.results import (
    RunFolder,
    RunSummary,
    kept_reasons,
    read_evaluation,
    read_summary,
)
from memfit.records.run_log import Recorded, Sample, read_log

FINISHED, RUNNING, STOPPED, FAILED, CUT = "finished", "running", "stopped", "failed", "cut"

STATES = (FINISHED, RUNNING, STOPPED, FAILED, CUT)

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


@dataclass(frozen=True, kw_only=True)
class Story:
    """A run as far as it got."""

    folder: RunFolder
    summary: RunSummary
    state: str
    why: str = ""
    step: int = 0
    max_steps: int | None = None
    seconds: float | None = None
    history: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[Sample] = ()
    adjustments: Sequence[Adjusted] = ()
    plan: PlanShown | None = None
    evaluated: tuple[Evaluation, tuple[Mistake, ...]] | None = None
    config: str = ""
    best_step: int | None = None
    """Where the best checkpoint so far was written."""
    context_bytes: int = field(default=0)
    """The CUDA context: device memory outside the allocator, which the samples do not contain."""

    @property
    def on_cpu(self) -> bool:
        """There the samples are the whole process, which no budget is about."""
        return not self.context_bytes


def read_story(
    folder: RunFolder, *, live: bool = False, ending: Mapping[str, Any] | None = None
) -> Story:
    """All of it; OutputError where the folder holds no run.

    `ending` has the `summary` and the `trainer_state` of a run that is about to write them.
    """
    recorded = read_log(folder.path)
    finished = ending is not None or folder.summary.is_file()
    if ending is not None:
        summary, trainer_state = RunSummary.from_dict(ending["summary"]), ending["trainer_state"]
    else:
        summary = read_summary(folder.path) if finished else _unfinished(folder, recorded)
        try:
            trainer_state = folder.trainer_state()
        except OutputError:  # cut off while it was written
            trainer_state = {}
    state = summary.status if finished else recorded.ended or (RUNNING if live else CUT)
    history = _history(trainer_state, recorded, finished=finished)
    best = summary.best_checkpoint or trainer_state.get("best_model_checkpoint") or ""
    seconds = summary.seconds.get("train") if finished else recorded.seconds
    return Story(
        folder=folder,
        summary=summary,
        state=state,
        why="" if finished else recorded.why,
        step=_int(summary.training.get("steps")) or max(recorded.step, _last_step(history)),
        max_steps=recorded.max_steps if isinstance(recorded.max_steps, int) else None,
        seconds=seconds or None,
        history=history,
        samples=recorded.samples,
        adjustments=adjustments(folder.path, history),
        plan=read_plan(folder.path / "plan.toml", kept_reasons(summary)),
        evaluated=read_evaluation(folder.path),
        config=_text(folder.config),
        best_step=_step_of(str(best)),
        context_bytes=_context_bytes(summary),
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
            t("cannot read {path}: {reason}", path=folder.config, reason=error)
        ) from None
    model = _mapping(tables.get("model")).get("model", "")
    return RunSummary(model=str(model), task=str(_mapping(tables.get("data")).get("task", "")))


def _step_of(checkpoint: str) -> int | None:
    """The step in the name of a checkpoint."""
    number = checkpoint.rpartition("checkpoint-")[2]
    return int(number) if number.isdecimal() else None


def _history(
    trainer_state: Mapping[str, Any], recorded: Recorded, *, finished: bool
) -> list[dict[str, Any]]:
    """All that was logged: the Trainer's own list, and what came after its last checkpoint."""
    logged = trainer_state.get("log_history")
    saved = [entry for entry in logged or () if isinstance(entry, dict)]
    if finished and saved:
        return saved
    last = _last_step(saved)
    # An evaluation is logged at the step of its checkpoint, which may not hold it yet.
    return saved + [
        entry
        for entry in recorded.logged
        if _int(entry.get("step")) > last
        or (_int(entry.get("step")) == last and entry not in saved)
    ]


def adjustments(folder: Path, history: Sequence[Mapping[str, Any]]) -> list[Adjusted]:
    """Every change there is word of, in the log history or in adjustments.jsonl."""
    raw = [_mapping(entry.get("adjustment")) for entry in history if "adjustment" in entry]
    raw += _lines(folder / "adjustments.jsonl")
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
    """The plan in the folder; None where there is none, or nothing one could show.

    The file tells its reasons in the language of the run; `reasons` are those of the page.
    """
    try:
        tables = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError:
        return None
    if not tables:
        return None
    return plan_from_tables({**tables, "reasons": reasons} if reasons else tables)


def _sentence(given: Any) -> str:
    """Keeps a message untranslated until the page is drawn."""
    return given if isinstance(given, Message) else str(given)


def plan_from_tables(tables: Mapping[str, Any]) -> PlanShown:
    """Reads a plan from tables that are already parsed."""
    strategies, given = _mapping(tables.get("strategies")), tables.get("reasons")
    reasons = given if isinstance(given, Mapping) else dict(enumerate(given or ()))
    predicted = _mapping(tables.get("predicted"))
    return PlanShown(
        fidelity=str(tables.get("fidelity") or ""),
        strategies=tuple(
            (str(name), _words(settings), _sentence(reasons.get(name, "")))
            for name, settings in strategies.items()
        ),
        limits=_words(tables.get("micro_batching")),
        reasons=tuple(_sentence(why) for name, why in reasons.items() if name not in strategies),
        device_bytes=_int(predicted.get("device_peak_bytes")) or None,
        host_bytes=_int(predicted.get("host_bytes")) or None,
        step_seconds=_number(predicted.get("step_seconds")),
    )


def series(history: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value) for each time a value was logged and is a number."""
    return [
        (float(entry["step"]), float(entry[key]))
        for entry in history
        if _number(entry.get(key)) is not None and _number(entry.get("step")) is not None
    ]


def steps_per_epoch(history: Sequence[Mapping[str, Any]]) -> float | None:
    """By the last entry that names both; None where none does."""
    for entry in reversed(history):
        step, epoch = _number(entry.get("step")), _number(entry.get("epoch"))
        if step and epoch and step > 0 and epoch > 0:
            return step / epoch
    return None


def step_seconds(samples: Sequence[Sample]) -> list[tuple[int, float]]:
    """(step, seconds a step) between samples, the slow ones with an evaluation in them too."""
    return [
        (end.step, (end.seconds - begin.seconds) / (end.step - begin.step))
        for begin, end in itertools.pairwise(samples)
        if end.step > begin.step and end.seconds > begin.seconds
    ]


def throughput(samples: Sequence[Sample], rows_a_step: float) -> list[tuple[float, float]]:
    """(step, rows a second): medians of stretches, so that evaluations and checkpoints drop out."""
    times = step_seconds(samples)
    stride = max(-(-len(times) // _STRETCHES), min(3, len(times)), 1)
    stretches = (times[begin : begin + stride] for begin in range(0, len(times), stride))
    return [
        (float(part[-1][0]), rows_a_step / statistics.median(seconds for _, seconds in part))
        for part in stretches
    ]


def metric_names(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics among what was logged, in the order of their first appearance, four at most."""
    names = (
        key.removeprefix("eval_") for entry in history for key in entry if key.startswith("eval_")
    )
    return [name for name in dict.fromkeys(names) if name not in _NOT_METRICS][:MOST_METRICS]


# ---- values that may be anything ----


def _context_bytes(summary: RunSummary) -> int:
    peaks = (summary.memory.measured, summary.memory.predicted)
    return next(
        (size for peak in peaks if peak and (size := peak.components.get(Component.CONTEXT, 0))), 0
    )


def _last_step(history: Sequence[Mapping[str, Any]]) -> int:
    return max([_int(entry.get("step")) for entry in history[-3:]] + [0])


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for line in _text(path).splitlines():
        try:
            yield _mapping(json.loads(line))
        except ValueError:
            continue


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
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_words(item) for item in value)
    return "" if value is None else str(value)
