"""Several runs beside each other: settings that differ, metrics, memory, time, and their curves."""

from __future__ import annotations

import itertools
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from memfit.config.files import atomic_writer
from memfit.errors import ConfigError, OutputError
from memfit.i18n import N_, pt, t
from memfit.printing import clean
from memfit.records.results import RunFolder
from memfit.report import curves, sections, terminal
from memfit.report.formatting import PageTable, metric, named, number, setting_name
from memfit.report.view import FINISHED, RunView, read_view
from memfit.units import format_both, format_bytes, format_seconds, percent

_TITLES = {
    "settings": N_("Settings that differ"),
    "metrics": N_("Metrics on the validation rows"),
    "memory": N_("Memory"),
    "time": N_("Time"),
}

_LOWER_IS_BETTER = ("mse", "mae", "loss")

_MADE_BY_MEMFIT = '<meta name="generator" content="memfit">'

_SAME_ROWS = ("data.path", "data.validation_file", "data.validation_split", "data.seed")
"""Settings that decide which rows a run is evaluated on."""

_CAUTIONS = {
    "rows": N_("The runs were not evaluated on the same rows: compare their metrics with care."),
    "positive": N_("The metrics are not of the same positive class."),
    "device": N_("The runs were trained on different devices: their times differ by that."),
}

_LIBRARIES = ("memfit", "torch", "transformers")


_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Row:
    """One line: what it is, a cell a run, and which cells are the best."""

    name: str
    cells: tuple[str, ...]
    best: frozenset[int] = _NONE


@dataclass(frozen=True)
class Comparison:
    """Runs by their names, in the order they were given."""

    runs: Mapping[str, RunView]

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.runs)})"

    def __str__(self) -> str:
        console = terminal.console()
        with console.capture() as captured:
            console.print(self.__rich__())
        return captured.get().rstrip()

    def __rich__(self) -> RenderableType:
        """A table a section, the best figures in bold."""
        parts: list[RenderableType] = []
        for name, rows in self.sections().items():
            made = terminal.table(self._title(name), *(clean(one) for one in self.runs))
            for row in rows:
                cells = (
                    Text(cell, style="bold" if index in row.best else "")
                    for index, cell in enumerate(row.cells)
                )
                made.add_row(Text(row.name), *cells)
            parts.append(Padding(made, (0, 0, 1, 0)))
        parts += [Text(sentence, style="yellow") for sentence in self.cautions()]
        return Group(*parts)

    def sections(self) -> dict[str, list[Row]]:
        """The lines under each heading; headings without a line are left out."""
        found = {
            "settings": list(_settings(self.views)),
            "metrics": list(_metrics(self.views, comparable={"rows", "positive"} <= self.same)),
            "memory": list(_memory(self.views)),
            "time": list(_time(self.views, comparable="device" in self.same)),
        }
        return {name: rows for name, rows in found.items() if rows}

    def _title(self, section: str) -> str:
        if section == "memory" and not any(view.on_cpu for view in self.views):
            return pt("of a GPU", "Memory")
        return t(_TITLES[section])

    @property
    def views(self) -> tuple[RunView, ...]:
        """The runs without their names."""
        return tuple(self.runs.values())

    def cautions(self) -> list[str]:
        """Why figures may not be comparable."""
        return [t(sentence) for what, sentence in _CAUTIONS.items() if what not in self.same]

    @cached_property
    def same(self) -> set[str]:
        """What all runs share: the `rows` they were evaluated on, `positive` class, `device`."""
        configs = [_flat(view.config) for view in self.views]
        summaries = [view.summary for view in self.views]
        found: dict[str, list[Any]] = {
            "rows": [
                (one.data.get("validation_rows"), *(config.get(key) for key in _SAME_ROWS))
                for one, config in zip(summaries, configs, strict=True)
            ],
            "positive": [one.positive for one in summaries if one.metrics],
            "device": [one.device for one in summaries],
        }
        return {what for what, values in found.items() if not _differs(values)}

    def to_dict(self) -> dict[str, Any]:
        """For JSON: figures as numbers, and the settings that differ."""
        differing = _differing(self.views)
        return {
            "runs": [
                {
                    "name": name,
                    "path": view.folder.path,
                    "state": view.state,
                    "settings": {key: values[index] for key, values in differing.items()},
                    "metrics": view.summary.metrics,
                    "memory": {
                        "budget_bytes": view.summary.memory.budget_bytes,
                        "predicted_bytes": view.peak_bytes("predicted"),
                        "measured_bytes": view.peak_bytes("measured"),
                    },
                    "seconds": view.summary.seconds,
                    "rows_a_second": view.median_rows_a_second,
                    "warnings": [one.kind for one in view.summary.warnings],
                }
                for index, (name, view) in enumerate(self.runs.items())
            ],
            "cautions": self.cautions(),
        }

    def write_page(self, path: str | os.PathLike[str]) -> Path:
        """Writes the comparison as one self-contained page, and returns where it is."""
        target = Path(path).expanduser().absolute()
        if target.is_dir():
            target = target / "comparison.html"
        if target.is_file():
            with target.open(encoding="utf-8", errors="replace") as file:
                if _MADE_BY_MEMFIT not in file.read(5000):
                    raise OutputError(
                        "{path} is not a page of memfit; name another with --output", path=target
                    )
        html = self.page(target.parent)
        try:
            with atomic_writer(target) as file:
                file.write(html)
        except OSError as error:
            raise OutputError(
                "cannot write {path}: {reason}", path=target, reason=error.strerror
            ) from None
        return target

    def page(self, folder: Path | None = None) -> str:
        """The page as text; links to reports are relative to the `folder` it will lie in."""
        from memfit.report.page import filled

        return filled(
            "comparison.html",
            title=t("{count} runs compared", count=len(self.runs)),
            runs=[
                (clean(name), view, _link(view.folder.report, folder))
                for name, view in self.runs.items()
            ],
            state=sections.state,
            verdict=sections.verdict,
            names=[clean(name) for name in self.runs],
            cautions=self.cautions(),
            sections=[(name, self._title(name), rows) for name, rows in self.sections().items()],
            short=PageTable(t("In short"), [_in_short(*one) for one in self.runs.items()]),
            curves=curves.overlaid(self.runs),
        )

    def _repr_html_(self) -> str:
        from memfit.report.notebook import notebook_html

        return notebook_html(self)


def compare_runs(folders: Sequence[str | os.PathLike[str]]) -> Comparison:
    """Reads the runs; a folder that holds runs stands for all of them."""
    found: dict[Path, None] = {}
    for given in folders:
        folder = Path(os.path.abspath(Path(given).expanduser()))
        inside = sorted(folder.iterdir()) if folder.is_dir() and not _is_run(folder) else []
        # Reading a folder without any run says what is missing.
        found |= dict.fromkeys([one for one in inside if _is_run(one)] or [folder])
    if len(found) < 2:
        raise ConfigError("give at least two runs to compare")
    names: dict[str, Path] = {}
    for depth in itertools.count(1):  # as many of their last parts as tell them apart
        names = {"/".join(folder.parts[-depth:]): folder for folder in found}
        if len(names) == len(found):
            break
    return Comparison({name: read_view(RunFolder(path)) for name, path in names.items()})


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("summary.json", "run.toml"))


def _link(report: Path, folder: Path | None) -> str:
    """Where a page in the folder finds the report; empty if there is none."""
    if folder is None or not report.is_file():
        return ""
    try:
        return quote(Path(os.path.relpath(report, folder)).as_posix())
    except ValueError:  # another drive of Windows
        return report.as_uri()


def _in_short(name: str, view: RunView) -> tuple[str, str]:
    """The leading metric, the time and the memory of a run."""
    metrics = view.summary.metrics.items()
    facts = [f"{named('metric', key)} {metric(value)}" for key, value in metrics][:1]
    if view.seconds:
        facts.append(format_seconds(view.seconds))
    if peak_bytes := view.peak_bytes("measured"):
        facts.append(format_bytes(peak_bytes))
    return clean(name), " · ".join(facts) or "–"


def _differs(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


# ---- settings ----


def _settings(views: Sequence[RunView]) -> Iterator[Row]:
    for key, values in _differing(views).items():
        name = key.rpartition(".")[2]
        words = [number(value) for value in values]
        if name == "strategies":
            words = [t(", ").join(named("strategy", s) for s in one or ()) or "–" for one in values]
        elif name == "fidelity":
            words = [named("fidelity", one) if one else "–" for one in values]
        shown = tuple(terminal.shorten(one, 60) for one in words)
        yield Row(name if name in _LIBRARIES else setting_name(name), shown)


def _differing(views: Sequence[RunView]) -> dict[str, list[Any]]:
    """Settings that are not the same in all runs; what a run used, before what it was told."""
    found: dict[str, list[Any]] = {}
    for group in ([_used(view) for view in views], [_flat(view.config) for view in views]):
        for key in dict.fromkeys(key for one in group for key in one):
            values = [one.get(key) for one in group]
            if key.rpartition(".")[2] not in found and key != "output_dir" and _differs(values):
                found[key] = values
    return found


def _used(view: RunView) -> dict[str, Any]:
    summary, plan = view.summary, view.plan
    return {
        "model": summary.model,
        **summary.training,
        "steps": view.step,
        "max_length": summary.lengths.get("max_length"),
        "strategies": [one[0] for one in plan.strategies] if plan else None,
        "fidelity": plan.fidelity if plan else None,
        "device": summary.device,
        **{name: summary.versions.get(name) for name in _LIBRARIES},
    }


def _flat(config: str) -> dict[str, Any]:
    """run.toml as `table.name`: value; without [plan], which the strategies tell."""
    try:
        tables = tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        return {}
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        if not isinstance(value, Mapping):
            flat[name] = _plain(value)
        elif name != "plan":
            flat |= {f"{name}.{key}": _plain(one) for key, one in value.items()}
    return flat


def _plain(value: Any) -> Any:
    """A number as it is, all else as a reader writes it: `0=bad, 1=good`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={one}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(str(one) for one in value)
    return value if isinstance(value, int | float) else str(value)


# ---- figures ----


def _metrics(views: Sequence[RunView], *, comparable: bool) -> Iterator[Row]:
    for name in dict.fromkeys(name for view in views for name in view.summary.metrics):
        values = [view.summary.metrics.get(name) for view in views]
        best = _best(views, values, lowest=name in _LOWER_IS_BETTER) if comparable else _NONE
        yield Row(named("metric", name), tuple(metric(value) for value in values), best)
    if any(view.summary.warnings for view in views):
        yield Row(t("warnings"), tuple(str(len(view.summary.warnings)) for view in views))


def _memory(views: Sequence[RunView]) -> Iterator[Row]:
    budgets = [view.summary.memory.budget_bytes for view in views]
    yield from _row(t("budget"), budgets, format_both)
    for which, title in (("predicted", N_("peak, predicted")), ("measured", N_("peak, measured"))):
        peaks = [view.peak_bytes(which) for view in views]
        yield from _row(t(title), peaks, format_bytes, _best(views, peaks, lowest=True))
    measured = [view.peaks.get("measured") for view in views]
    yield from _row(t("of the budget"), [peak and peak.share for peak in measured], percent)


def _time(views: Sequence[RunView], *, comparable: bool) -> Iterator[Row]:
    for which in ("train", "total"):
        seconds = [view.summary.seconds.get(which) for view in views]
        # A run that did not come to its end was not quicker.
        ended = zip(seconds, views, strict=True)
        done = [one if view.state == FINISHED else None for one, view in ended]
        best = _best(views, done, lowest=True) if comparable else _NONE
        yield from _row(named("work", which), seconds, format_seconds, best)
    speeds = [view.median_rows_a_second for view in views]
    best = _best(views, speeds, lowest=False) if comparable else _NONE
    yield from _row(t("rows a second"), speeds, "{:,.3g}".format, best)


def _row(
    name: str,
    values: Sequence[Any],
    words: Callable[[Any], str],
    best: frozenset[int] = _NONE,
) -> Iterator[Row]:
    """A line of figures; none if no run has the figure."""
    if any(values):
        yield Row(name, tuple(words(value) if value else "–" for value in values), best)


def _best(
    views: Sequence[RunView], values: Sequence[float | None], *, lowest: bool
) -> frozenset[int]:
    """Where the best value of a usable model stands; nowhere, if all are the same."""
    known = {
        index: value
        for index, (view, value) in enumerate(zip(views, values, strict=True))
        if value is not None and not view.useless
    }
    if len(set(known.values())) < 2:
        return _NONE
    best = min(known.values()) if lowest else max(known.values())
    return frozenset(index for index, value in known.items() if value == best)
