"""One look for every command: consoles, bars, tables and progress.

Nothing here reads rich's markup, so that a text like "[red]" or a label full of
control characters prints as what it is and never acts on the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.i18n import N_, NP_, language, nt, pt, t
from memfit.printing import clean, encodable
from memfit.report.formatting import averaging_sentence, metric, named, together
from memfit.report.view import RunView
from memfit.units import format_bytes, format_seconds, percent

if TYPE_CHECKING:
    from memfit.data import DataCounts, LengthSummary
    from memfit.records.evaluation import Evaluation
    from memfit.records.results import RunSummary
    from memfit.records.run_warnings import RunWarning

MAX_WIDTH = 100

SMALL_MATRIX = 10

MOST_CLASSES = 20

_GAP = 2

_NAMES = {
    "result": N_("result"),
    "training": N_("training"),
    "predicted": N_("predicted"),
    "measured": N_("measured"),
    "model": N_("model"),
    "report": N_("report"),
    "summary": N_("summary"),
}

_STATUSES = {
    "finished": N_("finished"),
    "running": N_("running"),
    "stopped": N_("stopped"),
    "failed": N_("failed"),
}

_TASKS = {
    "single_label": N_("single-label"),
    "multi_label": N_("multi-label"),
    "regression": N_("regression"),
}


def console(*, stderr: bool = False) -> Console:
    """A console that leaves data alone; rich itself honours NO_COLOR, pipes and 80 columns."""
    # A pipe in a Western Windows cannot hold 好评; a question mark beats a traceback.
    encodable(sys.stderr if stderr else sys.stdout)
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def shorten(text: object, cells: int) -> str:
    """Clean, on one line and at most this wide; a Chinese character is two cells."""
    line = Text(" ".join(clean(text).split()))
    line.truncate(cells, overflow="ellipsis")
    return line.plain


def table(*columns: str, title: str = "") -> Table:
    """A table in the one style; the first column holds names, the others numbers."""
    made = Table(title=title or None, title_justify="left", title_style="bold", box=None)
    made.pad_edge = False
    for index, name in enumerate(columns):
        made.add_column(
            Text(name, style="dim"), justify="left" if index == 0 else "right", overflow="fold"
        )
    return made


def metrics_line(metrics: Mapping[str, float], averaging: str = "", positive: str = "") -> Text:
    """F1 0.934 (好评)   accuracy 0.913   precision …: the headline of an evaluation."""
    of = {"binary": shorten(positive, 20), "macro": t("macro"), "micro": t("micro")}
    what = of.get(averaging, averaging)
    in_brackets = "（{}）" if language() == "zh" else " ({})"
    line = Text()
    for name, value in metrics.items():
        line.append("   " if line else "")
        line.append(f"{named('metric', name)} ")
        line.append(metric(value), style="bold")
        if name == "f1" and what:
            line.append(in_brackets.format(what))
    return line


def metrics_table(evaluation: Evaluation) -> RenderableType:
    """The headline, one row a class, and the confusion matrix where it fits a screen."""
    no_text, no_label = (evaluation.dropped.get(key, 0) for key in ("no_text", "no_label"))
    parts: list[RenderableType] = [
        metrics_line(evaluation.metrics, evaluation.averaging, evaluation.positive),
        Text(_left_out(t("on {rows} rows", rows=f"{evaluation.rows:,}"), no_text, no_label), "dim"),
    ]
    said = averaging_sentence(evaluation.averaging, evaluation.positive, evaluation.why)
    if said:
        parts.append(Text(said, "dim"))
    if evaluation.threshold is not None:
        parts.append(Text(t("threshold {value:.3g}", value=evaluation.threshold), "dim"))
    if evaluation.classes:
        scores = (named("metric", name) for name in ("precision", "recall", "f1"))
        each = table(t("class"), *scores, t("rows"))
        for row in evaluation.classes:
            numbers = (f"{value:.4f}" for value in (row.precision, row.recall, row.f1))
            each.add_row(Text(shorten(row.name, 32)), *numbers, f"{row.rows:,}")
        parts.append(Padding(each, (1, 0, 0, 0)))
    if 0 < len(evaluation.confusion) <= SMALL_MATRIX:
        names = [shorten(row.name, 12) for row in evaluation.classes]
        matrix = table(t("true ↓ predicted →"), *names)
        for index, (name, counts) in enumerate(zip(names, evaluation.confusion, strict=True)):
            cells = (
                Text(f"{count:,}", style="bold" if column == index else "" if count else "dim")
                for column, count in enumerate(counts)
            )
            matrix.add_row(Text(name), *cells)
        parts.append(Padding(matrix, (1, 0, 0, 0)))
    return Group(*parts)


def training_result(summary: RunSummary, folder: Path | None = None) -> RenderableType:
    """How a run ended: metrics, time, memory predicted and measured, and where it lies."""
    facts, training = _facts(), summary.training
    if summary.metrics:
        line = metrics_line(summary.metrics, summary.averaging, summary.positive)
        facts.add_row(_padded("result"), line)
    words = [t(_STATUSES[summary.status]) if summary.status in _STATUSES else summary.status]
    if training.get("stopped_early"):
        words.append(t("stopped early"))
    if (steps := training.get("steps")) is not None:
        words.append(t("{steps:,} steps", steps=steps))
    if (epochs := training.get("epochs")) is not None:
        number = 1 if epochs == 1 else 2
        words.append(nt("{epochs:g} epoch", "{epochs:g} epochs", number, epochs=round(epochs, 2)))
    if (seconds := summary.seconds.get("train")) is not None:
        words.append(format_seconds(seconds))
    facts.add_row(_padded("training"), Text(listed(words)))
    for name, peak in RunView(summary=summary).peaks.items():
        one_step = peak.step is not None
        kind = N_("{bytes} at the peak of step {step}") if one_step else N_("{bytes} at the peak")
        said = t(kind, bytes=format_bytes(peak.device_bytes), step=f"{peak.step or 0:,}")
        if peak.share is not None:
            said = t("{peak}, {share} of the budget", peak=said, share=percent(peak.share))
        facts.add_row(_padded(name), Text(said))
    if folder is not None:
        facts.add_row(_padded("model"), Text(str(folder)))
        facts.add_row(_padded("report"), Text(str(folder / "report.html")))
    return facts


def listed(words: Iterable[str], mark: str = ", ") -> str:
    """Chinese has a comma and a semicolon of its own, with no space behind."""
    return (pt("clauses", ", ") if mark == ", " else t("; ")).join(words)


def data_summary(
    counts: DataCounts, lengths: LengthSummary | None = None, task: str = ""
) -> RenderableType:
    """What was found, where every row went, how the classes are spread, what `max_length` cuts."""
    facts = _facts()
    if counts.text_column:
        # text review, label label; single-label; gb18030
        columns = {
            N_("text {name}"): counts.text_column,
            N_("pair {name}"): counts.text_pair_column,
            N_("label {name}"): counts.label_column,
            N_("group {name}"): counts.group_column,
        }
        words = listed(t(role, name=shorten(name, 60)) for role, name in columns.items() if name)
        kind = t(_TASKS[task]) if task in _TASKS else task.replace("_", "-")
        said = listed([part for part in (words, kind, counts.encoding) if part], "; ")
        facts.add_row(t("columns"), Text(said))
    train, validation = f"{counts.train_rows:,}", f"{counts.validation_rows:,}"
    rows = t("{train} to train on, {validation} to validate", train=train, validation=validation)
    left_out = _left_out(rows, counts.dropped_no_text, counts.dropped_no_label)
    facts.add_row(t("rows"), Text(left_out))
    for index, (name, count) in enumerate(list(counts.train_class_counts.items())[:MOST_CLASSES]):
        # Of the rows, which may have several labels each.
        share = percent(count / counts.train_rows if counts.train_rows else 0.0)
        line = f"{count:>7,}  {share:>5}  {shorten(name, 40)}"
        facts.add_row("" if index else t("classes"), Text(line))
    if (more := len(counts.train_class_counts) - MOST_CLASSES) > 0:
        facts.add_row("", Text(t("and {count} more", count=f"{more:,}")))
    if lengths is not None:
        facts.add_row(t("tokens"), Text(_lengths_sentence(lengths)))
    return facts


def warnings_list(warnings: Sequence[RunWarning]) -> RenderableType:
    """One warning a row: what is the matter, and what to do."""
    facts = _facts()
    for one in warnings:
        line = Text(together([one.sentence, one.advice]))
        line.stylize("yellow", 0, len(one.sentence))
        facts.add_row(Text(t("warning"), style="yellow"), line)
    return facts


def _left_out(rows: str, no_text: int, no_label: int) -> str:
    kinds = {
        (True, True): N_("{rows}; left out {no_text} without text and {no_label} without label"),
        (True, False): N_("{rows}; left out {no_text} without text"),
        (False, True): N_("{rows}; left out {no_label} without label"),
    }
    kind = kinds.get((bool(no_text), bool(no_label)))
    if kind is None:
        return rows
    return t(kind, rows=rows, no_text=f"{no_text:,}", no_label=f"{no_label:,}")


def _lengths_sentence(lengths: LengthSummary) -> str:
    return t(
        N_(
            "median {median}, 90 % up to {most}, longest {longest}; max_length {length} "
            "cuts {rows} rows ({share})"
        )
        if lengths.cut_rows
        else N_(
            "median {median}, 90 % up to {most}, longest {longest}; max_length {length} cuts none"
        ),
        median=f"{lengths.p50:,}",
        most=f"{lengths.p90:,}",
        longest=f"{lengths.max:,}",
        length=f"{lengths.max_length:,}",
        rows=f"{lengths.cut_rows:,}",
        share=percent(lengths.cut_fraction),
    )


def _facts() -> Table:
    """Lines of a name and what is to be said about it."""
    facts = Table.grid(padding=(0, _GAP))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    return facts


def fact(name: str, value: object) -> str:
    """A line of `training_result` as plain text: a path in it is whole, however long."""
    return _padded(name) + " " * _GAP + str(value)


def _padded(name: str) -> str:
    """A name of `training_result` with blanks to the width of the widest."""
    title = t(_NAMES[name])
    widest = max(cell_len(t(one)) for one in _NAMES.values())
    return title + " " * (widest - cell_len(title))


_FACT_NAMES = {
    "dataset": N_("dataset"),
    "failed": N_("failed"),
    "watch": N_("watch"),
    "model": N_("model"),
    "budget": N_("budget"),
    "plan": N_("plan"),
    "batch": N_("batch"),
    "metric": N_("metric"),
    "weights": N_("weights"),
    "memory": N_("memory"),
    "gpu_memory": NP_("of a GPU", "memory"),
    "note": N_("note"),
}


def fact_line(name: str, text: str) -> str:
    """One fact of a run, its name as wide as those of the data's summary above it."""
    title = t(_FACT_NAMES[name])
    cells = max(cell_len(t("columns")), cell_len(t("classes"))) + 2
    return title + " " * max(cells - cell_len(title), 1) + text
