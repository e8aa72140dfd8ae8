"""Several datasets in one command: a folder each, one table at the end, resumable as a whole.

runs/datasets.json   which dataset lies in which folder, and the options of all
runs/summary.json    how each of them ended, written anew after every one
runs/a, runs/b       a run each
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from memfit.config.files import read_json, write_json
from memfit.errors import DatasetsFailedError, MemfitError, OutputError
from memfit.i18n import t
from memfit.records.results import RunFolder
from memfit.report.formatting import named
from memfit.report.terminal import fact_line, metric, shorten, status_name, table
from memfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memfit.run.workflow import RunResult

LIST_FILE, SUMMARY_FILE = "datasets.json", "summary.json"

_NOT_IN_A_NAME = re.compile(r"[^\w.\-]+")

Train = Callable[[str, Path, bool, dict[str, Any]], "RunResult"]
"""Trains on one dataset into a folder with these options, or goes on with what is there."""


@dataclass(frozen=True, kw_only=True)
class DatasetOutcome:
    """How one dataset's run ended."""

    name: str
    data: str
    status: str = "waiting"
    """waiting, finished or failed."""
    error: str = ""
    rows: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None
    device_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ManyResult:
    """How all of them ended."""

    output_dir: Path
    outcomes: tuple[DatasetOutcome, ...]

    @property
    def failed(self) -> tuple[DatasetOutcome, ...]:
        """The datasets that failed."""
        return tuple(one for one in self.outcomes if one.status == "failed")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "output_dir": self.output_dir,
            "datasets": [
                {**vars(one), "output_dir": self.output_dir / one.name} for one in self.outcomes
            ],
        }


def is_many(output_dir: str | os.PathLike[str] | None) -> bool:
    """Whether a folder holds the runs of several datasets."""
    return output_dir is not None and (Path(output_dir) / LIST_FILE).is_file()


def train_many(
    datasets: Sequence[str],
    output_dir: Path,
    options: dict[str, Any],
    train: Train,
    say: Callable[[str], None],
    *,
    resume: bool,
) -> ManyResult:
    """One after the other; a failed one stops none of the others."""
    named, options = _claim(datasets, output_dir, options, resume)
    result = ManyResult(
        output_dir=output_dir,
        outcomes=tuple(DatasetOutcome(name=name, data=data) for name, data in named.items()),
    )
    for index, outcome in enumerate(result.outcomes):
        folder = output_dir / outcome.name
        which = t(
            "{number} of {count}: {data} -> {folder}",
            number=index + 1,
            count=len(named),
            data=outcome.data,
            folder=folder,
        )
        say(fact_line("dataset", which))
        try:
            begun = RunFolder(folder).config.is_file()
            ended = _outcome(outcome, train(outcome.data, folder, begun, options))
        except KeyboardInterrupt:
            say(_stopped(outcome, index, len(named), output_dir))
            raise
        except Exception as error:
            known = isinstance(error, MemfitError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            say(fact_line("failed", f"{outcome.name}: {text}"))
            ended = replace(outcome, status="failed", error=text)
        outcomes = (*result.outcomes[:index], ended, *result.outcomes[index + 1 :])
        result = replace(result, outcomes=outcomes)
        write_json(output_dir / SUMMARY_FILE, result.to_dict())
    return result


def failure(result: ManyResult) -> DatasetsFailedError:
    """Which failed, and how to go on with them."""
    names = ", ".join(f"{one.name} ({one.error})" for one in result.failed)
    return DatasetsFailedError(
        t(
            "{count} of {total} datasets failed: {names}; go on with: {command}",
            count=len(result.failed),
            total=len(result.outcomes),
            names=names,
            command=_again(result.output_dir),
        )
    )


def folder_names(datasets: Sequence[str]) -> dict[str, str]:
    """A folder name for each dataset, after its file; a second of the same name gets a number."""
    named: dict[str, str] = {}
    for data in datasets:
        stem = Path(data).stem if Path(data).suffix else Path(data).name
        base = _NOT_IN_A_NAME.sub("-", stem).strip("-.") or "data"
        name, number = base, 2
        taken = {known.casefold() for known in named}  # some disks do not tell a from A
        while name.casefold() in taken:
            name, number = f"{base}-{number}", number + 1
        named[name] = data
    return named


def _claim(
    datasets: Sequence[str], output_dir: Path, options: dict[str, Any], resume: bool
) -> tuple[dict[str, str], dict[str, Any]]:
    """The folders and options to use: those of the list that is there, or new ones."""
    known = output_dir / LIST_FILE
    absolute = [os.path.abspath(one) if Path(one).exists() else one for one in datasets]
    if repeated := sorted({one for one in absolute if absolute.count(one) > 1}):
        raise OutputError(t("{path} is given twice", path=repeated[0]))
    if resume:
        if not known.is_file():
            raise OutputError(
                t("there are no runs to resume in {folder}; leave --resume out", folder=output_dir)
            )
        stored = read_json(known)
        listed: dict[str, str] = stored["datasets"]
        if absolute and sorted(absolute) != sorted(listed.values()):
            raise OutputError(
                t(
                    "--resume goes on with the datasets of {folder}, which are "
                    "{datasets}; leave them out, or name another --output-dir",
                    folder=output_dir,
                    datasets=", ".join(listed.values()),
                )
            )
        return listed, {**stored["options"], **options}
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        hint = t(", or go on with --resume") if known.is_file() else ""
        raise OutputError(
            t(
                "the output folder {folder} is not empty; name another --output-dir{hint}",
                folder=output_dir,
                hint=hint,
            )
        )
    named = folder_names(absolute)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        write_json(known, {"datasets": named, "options": options})
    except OSError as error:
        raise OutputError(
            t(
                "cannot write to the output folder {folder}: {reason}",
                folder=output_dir,
                reason=error.strerror or error,
            )
        ) from None
    return named, options


def _outcome(outcome: DatasetOutcome, result: RunResult) -> DatasetOutcome:
    summary = result.summary
    peak = summary.memory.measured or summary.memory.predicted
    return replace(
        outcome,
        status="finished",
        rows=summary.data.get("train_rows"),
        metrics=dict(summary.metrics),
        seconds=summary.seconds.get("total"),
        device_peak_bytes=None if peak is None else peak.device_bytes,
    )


def _stopped(outcome: DatasetOutcome, done: int, total: int, output_dir: Path) -> str:
    command = _again(output_dir)
    return t(
        "stopped at {name}; {done} of {total} datasets are done; go on with: {command}",
        name=outcome.name,
        done=done,
        total=total,
        command=command,
    )


def _again(output_dir: Path) -> str:
    return f"memfit train --resume --output-dir {shlex.quote(str(output_dir))}"


_MOST_METRICS = 2


def datasets_table(result: ManyResult) -> RenderableType:
    """One row a dataset; the metrics are those most of them have."""
    names = _metrics(result)
    heads = [t("dataset"), t("rows"), t("time"), t("memory"), t("status")]
    shown = table(*heads[:2], *(named("metric", one) for one in names), *heads[2:])
    for one in result.outcomes:
        shown.add_row(
            Text(shorten(one.name, 24)),
            "–" if one.rows is None else f"{one.rows:,}",
            *(metric(one.metrics.get(name)) for name in names),
            "–" if one.seconds is None else format_seconds(one.seconds),
            "–" if one.device_peak_bytes is None else format_bytes(one.device_peak_bytes),
            _status(one),
        )
    return shown


def _metrics(result: ManyResult) -> list[str]:
    counts: dict[str, int] = {}
    for one in result.outcomes:
        for name in one.metrics:
            counts[name] = counts.get(name, 0) + 1
    return sorted(counts, key=lambda name: -counts[name])[:_MOST_METRICS]


def _status(outcome: DatasetOutcome) -> Text:
    said = status_name(outcome.status)
    return Text(said, style="red" if outcome.status == "failed" else "")
