"""The report on how good the model is: each class, the confusion matrix, the worst mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memfit.evaluation import ClassRow, Evaluation, Mistake
from memfit.messages import N_, pt, t
from memfit.report.terminal import percent
from memfit.report.values import Table, named, number, together
from memfit.safe_text import clean

LARGEST_MATRIX = 20
SHARES_UP_TO = 8
"""So many columns have room for a share under each count."""
MOST_CLASSES = 100
MOST_CONFUSIONS = 20
LONGEST_TEXT = 300
_AVERAGED = {
    "binary": N_("F1, precision and recall are those of {positive}."),
    "macro": N_("F1, precision and recall are means over the classes."),
    "micro": N_(
        "F1, precision and recall count every label of every row; accuracy counts the rows "
        "with all labels right."
    ),
}


def section(result: Evaluation, mistakes: Sequence[Mistake]) -> dict[str, Any]:
    """The per-class table, the confusion matrix or its largest entries, and the mistakes."""
    small = 0 < len(result.confusion) <= LARGEST_MATRIX
    return {
        "sentence": sentence(result),
        "classes": _classes(result),
        "matrix": _matrix(result) if small else None,
        "confusions": _confusions(result) if result.confusion and not small else None,
        "mistakes": [_mistake(item) for item in mistakes],
        "score_name": pt("score", "value") if result.task == "regression" else t("score"),
    }


def sentence(result: Evaluation) -> str:
    """What was measured, on what."""
    said = [t("Measured on {rows:,} rows that were not trained on.", rows=result.rows)]
    if result.averaging in ("binary", "macro", "micro"):
        said.append(t(_AVERAGED[result.averaging], positive=clean(result.positive)))
    return together(said)


def _classes(result: Evaluation) -> Table | None:
    if not result.classes:
        return None
    many = len(result.classes) > MOST_CLASSES
    worst = sorted(result.classes, key=lambda row: row.f1)[:MOST_CLASSES]
    caption = (
        t("The {shown} weakest of {count:,} classes", shown=MOST_CLASSES, count=len(result.classes))
        if many
        else t("Each class")
    )
    head = [
        t("class"),
        *(named("metric", name) for name in ("precision", "recall", "f1")),
        t("rows"),
    ]
    return Table(caption, [_class_cells(row) for row in (worst if many else result.classes)], head)


def _class_cells(row: ClassRow) -> list[str]:
    numbers = (f"{value:.3f}" for value in (row.precision, row.recall, row.f1))
    return [clean(row.name), *numbers, f"{row.rows:,}"]


def _matrix(result: Evaluation) -> dict[str, Any]:
    names = [clean(row.name) for row in result.classes]
    shares = len(names) <= SHARES_UP_TO
    return {
        "names": names,
        "rows": [
            {
                "name": name,
                "cells": [
                    {
                        "count": f"{count:,}",
                        "share": round(count / max(sum(counts), 1), 3),
                        "percent": percent(count / max(sum(counts), 1)) if shares else "",
                        "right": column == index,
                    }
                    for column, count in enumerate(counts)
                ],
            }
            for index, (name, counts) in enumerate(zip(names, result.confusion, strict=True))
        ],
    }


def _confusions(result: Evaluation) -> Table | None:
    """The largest entries off the diagonal, for a matrix too large to print."""
    names = [clean(row.name) for row in result.classes]
    found = [
        (count, row, column)
        for row, counts in enumerate(result.confusion)
        for column, count in enumerate(counts)
        if count and row != column
    ]
    found.sort(key=lambda item: -item[0])
    rows = [
        [names[row], names[column], f"{count:,}"] for count, row, column in found[:MOST_CONFUSIONS]
    ]
    head = [t("is"), t("was called"), t("rows")]
    return Table(t("The most frequent confusions"), rows, head) if rows else None


def _mistake(item: Mistake) -> dict[str, str]:
    text = clean(item.text)
    return {
        "text": text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "…",
        "expected": clean(item.expected),
        "predicted": clean(item.predicted),
        "score": number(item.score),
    }
