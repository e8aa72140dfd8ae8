"""What each section of the report says, as plain values; the template only places them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from memfit.evaluation import ClassRow, Evaluation, Mistake
from memfit.memory.components import Component, MemoryPeak
from memfit.report.terminal import METRIC_NAMES, metric, peak_components, percent
from memfit.results import RunSummary
from memfit.safe_text import clean
from memfit.units import format_both, format_bytes, format_seconds

LARGEST_MATRIX = 20
MOST_CLASSES = 100
MOST_CONFUSIONS = 20
LONGEST_TEXT = 300
_WORK_NAMES = {
    "data": "reading the data",
    "load": "loading",
    "train": "training",
    "evaluate": "evaluating",
    "save": "saving",
    "total": "in all",
}
_COUNT_NAMES = {
    "rows_read": "read",
    "train_rows": "trained on",
    "validation_rows": "validated on",
    "dropped_no_text": "left out, no text",
    "dropped_no_label": "left out, no label",
    "duplicates_across_split": "validation texts also trained on",
    "text_column": "text column",
    "text_pair_column": "second text column",
    "label_column": "label column",
    "encoding": "encoding",
}


def number(value: object) -> str:
    """A value for a table: thousands separated, floats short, nothing as a dash."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else clean(value)


def lead(summary: RunSummary) -> str:
    """One sentence on what ran, how it ended, where and when."""
    words = clean(summary.status).capitalize()
    if seconds := summary.seconds.get("train"):
        words += f" after {format_seconds(seconds)} of training"
    if summary.device:
        words += f" on {clean(summary.device)}"
    if summary.finished_at:
        try:
            when = datetime.fromisoformat(summary.finished_at)
            words += f", {when:%Y-%m-%d %H:%M}"
        except ValueError:
            words += f", {clean(summary.finished_at)}"
    return words + "."


def figures(summary: RunSummary) -> list[dict[str, str]]:
    """The metrics as big numbers, each with what it is."""
    which = summary.averaging
    if which == "binary" and summary.positive:
        which = f"of {clean(summary.positive)}"
    shown = []
    for name, value in summary.metrics.items():
        label = METRIC_NAMES.get(name, clean(name))
        if which and name in ("f1", "precision", "recall"):
            label += f" ({which})"
        shown.append({"name": label, "value": metric(value)})
    return shown


def memory(summary: RunSummary) -> dict[str, Any] | None:
    """Bars and a table of the predicted and the measured peak; None where there is neither."""
    peaks = {
        name: peak
        for name, peak in (
            ("predicted", summary.memory.predicted),
            ("measured", summary.memory.measured),
        )
        if peak is not None
    }
    if not peaks:
        return None
    budget = summary.memory.budget_bytes
    scale = max([peak.device_bytes for peak in peaks.values()] + [budget or 0, 1])
    split = {name: peak_components(peak) for name, peak in peaks.items()}
    order = [*Component, *(name for parts in split.values() for name in parts)]
    rows = [
        {
            "name": name,
            "css": _css(name),
            "cells": [
                format_bytes(parts[name]) if name in parts else "–" for parts in split.values()
            ],
        }
        for name in dict.fromkeys(str(item) for item in order)
        if any(name in parts for parts in split.values())
    ]
    for title, field in (("allocated", "allocated_bytes"), ("on the device", "device_bytes")):
        cells = [format_bytes(getattr(peak, field)) for peak in peaks.values()]
        rows.append({"name": title, "css": "", "cells": cells})
    return {
        "bars": [_bar(name, peak, budget, scale) for name, peak in peaks.items()],
        "columns": list(peaks),
        "rows": rows,
        "module": clean(next((peak.module for peak in peaks.values() if peak.module), "")),
    }


def _bar(name: str, peak: MemoryPeak, budget: int | None, scale: int) -> dict[str, Any]:
    verdict, over = "", False
    if budget:
        over = peak.device_bytes > budget
        share = percent(peak.device_bytes / budget)
        beyond = format_bytes(peak.device_bytes - budget)
        verdict = f"{share} of the budget of {format_both(budget)}"
        verdict = f"{beyond} over the budget of {format_both(budget)}" if over else verdict
    return {
        "name": name.capitalize(),
        "total": format_bytes(peak.device_bytes),
        "verdict": verdict,
        "over": over,
        # The bar ends at the budget unless something is beyond it; then a line marks it.
        "mark_percent": round(100 * budget / scale, 2) if budget and budget < scale else None,
        "parts": [
            {
                "name": f"{part} {format_bytes(size)}",
                "css": _css(part),
                "percent": round(100 * size / scale, 2),
            }
            for part, size in peak_components(peak).items()
        ],
    }


def _css(component: str) -> str:
    return component if component in set(Component) else "unused"


def training(summary: RunSummary) -> list[tuple[str, str]]:
    """Facts about the training, in the order the run gave them."""
    rows = [("model", clean(summary.model)), ("task", summary.task.replace("_", "-"))]
    rows += [
        (clean(name).replace("_", " "), number(value)) for name, value in summary.training.items()
    ]
    rows += [
        (f"time {_WORK_NAMES.get(name, clean(name))}", format_seconds(seconds))
        for name, seconds in summary.seconds.items()
        if seconds is not None
    ]
    if summary.best_checkpoint:
        rows.append(("best checkpoint", clean(summary.best_checkpoint)))
    return rows


def evaluation(result: Evaluation, mistakes: Sequence[Mistake]) -> dict[str, Any]:
    """The per-class table, the confusion matrix or its largest entries, and the mistakes."""
    worst = sorted(result.classes, key=lambda row: row.f1)[:MOST_CLASSES]
    many = len(result.classes) > MOST_CLASSES
    small = 0 < len(result.confusion) <= LARGEST_MATRIX
    return {
        "sentence": _sentence(result),
        "classes": [_class_cells(row) for row in (worst if many else result.classes)],
        "classes_caption": f"The {MOST_CLASSES} weakest of {len(result.classes):,} classes"
        if many
        else "Each class",
        "matrix": _matrix(result) if small else None,
        "confusions": _confusions(result) if result.confusion and not small else [],
        "mistakes": [_mistake(item) for item in mistakes],
        "score_name": "value" if result.task == "regression" else "score",
    }


def _sentence(result: Evaluation) -> str:
    words = f"Measured on {result.rows:,} rows that were not trained on."
    return words + {
        "binary": f" F1, precision and recall are those of {clean(result.positive)}.",
        "macro": " F1, precision and recall are means over the classes.",
        "micro": " F1, precision and recall count every label of every row; "
        "accuracy counts the rows with all labels right.",
    }.get(result.averaging, "")


def _class_cells(row: ClassRow) -> list[str]:
    numbers = (f"{value:.3f}" for value in (row.precision, row.recall, row.f1))
    return [clean(row.name), *numbers, f"{row.rows:,}"]


def _matrix(result: Evaluation) -> dict[str, Any]:
    names = [clean(row.name) for row in result.classes]
    return {
        "names": names,
        "rows": [
            {
                "name": name,
                "cells": [
                    {
                        "count": f"{count:,}",
                        "share": round(count / max(sum(counts), 1), 3),
                        "right": column == index,
                    }
                    for column, count in enumerate(counts)
                ],
            }
            for index, (name, counts) in enumerate(zip(names, result.confusion, strict=True))
        ],
    }


def _confusions(result: Evaluation) -> list[list[str]]:
    """The largest entries off the diagonal, for a matrix too large to print."""
    names = [clean(row.name) for row in result.classes]
    found = [
        (count, row, column)
        for row, counts in enumerate(result.confusion)
        for column, count in enumerate(counts)
        if count and row != column
    ]
    found.sort(key=lambda item: -item[0])
    return [
        [names[row], names[column], f"{count:,}"] for count, row, column in found[:MOST_CONFUSIONS]
    ]


def _mistake(item: Mistake) -> dict[str, str]:
    text = clean(item.text)
    return {
        "text": text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "…",
        "expected": clean(item.expected),
        "predicted": clean(item.predicted),
        "score": number(item.score),
    }


def data(summary: RunSummary) -> dict[str, Any]:
    """Where the rows went, how the classes are spread, what `max_length` cuts."""
    counts, lengths = summary.data, summary.lengths
    train: Mapping[str, int] = counts.get("train_class_counts") or {}
    held: Mapping[str, int] = counts.get("validation_class_counts") or {}
    names = list(dict.fromkeys([*train, *held]))
    sentence = ""
    if lengths.get("count"):
        cut = lengths["cut_rows"]
        sentence = (
            f"Half of the texts have up to {lengths['p50']:,} tokens, nine in ten up to "
            f"{lengths['p90']:,}, the longest {lengths['max']:,}. A max_length of "
            f"{lengths['max_length']:,} cuts "
            + (f"{cut:,} of them ({percent(cut / lengths['count'])})." if cut else "none of them.")
        )
    return {
        "rows": [
            (_COUNT_NAMES.get(name, clean(name)), number(value))
            for name, value in counts.items()
            if not isinstance(value, Mapping) and value not in (None, "")
        ],
        "classes": [
            [clean(name), number(train.get(name, 0)), number(held.get(name, 0))]
            for name in names[:MOST_CLASSES]
        ],
        "classes_caption": f"The first {MOST_CLASSES} of {len(names):,} classes"
        if len(names) > MOST_CLASSES
        else "Rows of each class",
        "lengths": sentence,
    }


def usage(folder: Path) -> str:
    """Three ways to use the model, ready to copy."""
    return "\n".join(
        [
            f'memfit predict {shlex.quote(str(folder))} "…"',
            f'memfit.load({str(folder)!r}).predict(["…"])',
            f'transformers.pipeline("text-classification", {str(folder)!r})("…")',
        ]
    )


def made_with(summary: RunSummary) -> list[tuple[str, str]]:
    """Versions, the machine and the configuration's digest."""
    rows = [(clean(name), clean(version)) for name, version in summary.versions.items()]
    if summary.device:
        rows.append(("device", clean(summary.device)))
    if summary.config_digest:
        rows.append(("configuration", clean(summary.config_digest)))
    return rows
