"""What the report says of the run, its training, its quality, its plan, its data and its use."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from memfit.i18n import N_, NP_, pt, shown, t
from memfit.printing import clean
from memfit.records.evaluation import ClassRow, Evaluation, Mistake
from memfit.records.results import RunSummary
from memfit.report import plots
from memfit.report.formatting import (
    PageTable,
    Picture,
    averaging_sentence,
    named,
    number,
    together,
)
from memfit.report.story import CUT, FINISHED, RUNNING, STATES, Story, step_seconds
from memfit.report.terminal import metric
from memfit.units import format_both, format_bytes, format_seconds, percent, tenths_of_percent

LARGEST_MATRIX = 20

SHARES_UP_TO = 8
"""Up to this many columns have room for a share under each count."""

MOST_CLASSES = 100

MOST_CONFUSIONS = 20

LONGEST_TEXT = 300

GOOD, DOUBTFUL, BAD = "good", "doubtful", "bad"

_LEAST_GAIN = 0.01
"""Of all answers: a model that gets no more right than this beyond the largest class is no gain."""

_USELESS = {
    "one_class": N_("Do not use this model: it gives every text the same answer"),
    "no_labels": N_("Do not use this model: it gives no text any label"),
}


def verdict(story: Story) -> dict[str, str] | None:
    """How a run went, in one sentence, and how good that is; None before there is an evaluation.

    What its answers are worth, and whether it kept its budget.
    """
    if story.state != FINISHED or story.evaluated is None:
        return None
    if why := useless(story):
        said, css = t(_USELESS[why]), BAD
    else:
        said, gains = _answers(story.evaluated[0])
        css = GOOD if gains and not story.summary.warnings else DOUBTFUL
    kept, over = _budget(story)
    return {
        "css": BAD if over else css,
        "sentence": t("{first}; {second}.", first=said, second=kept)
        if kept
        else t("{first}.", first=said),
    }


def useless(story: Story) -> str:
    """The warning for which the model must not be used; empty without one."""
    return next((one.kind for one in story.summary.warnings if one.kind in _USELESS), "")


def _answers(evaluation: Evaluation) -> tuple[str, bool]:
    """What was answered right, and whether that is more than without a model."""
    known: dict[str, Any] = {"rows": evaluation.rows}
    metrics = evaluation.metrics
    if evaluation.task == "regression":
        known |= {"off": number(metrics.get("mae")), "r2": metric(metrics.get("r2"))}
        said = N_("On {rows:,} validation texts its values are off by {off} on average, R² {r2}")
        return t(said, **known), (metrics.get("r2") or 0.0) > 0
    known["share"] = tenths_of_percent(metrics.get("accuracy", 0.0))
    if evaluation.task == "multi_label" or not evaluation.classes:
        known["f1"] = metric(next(iter(metrics.values()), None))
        said = N_("All labels of {share} of the {rows:,} validation texts are right, F1 is {f1}")
        return t(said, **known), True
    largest = max(evaluation.classes, key=lambda row: row.rows)
    base = largest.rows / max(evaluation.rows, 1)
    known |= {"largest": clean(largest.name), "base": tenths_of_percent(base)}
    gains = metrics.get("accuracy", 0.0) > base + _LEAST_GAIN
    said = (
        N_(
            "{share} of the {rows:,} validation texts are answered right, where always answering "
            "{largest} would reach {base}"
        )
        if gains
        else N_(
            "Hardly better than no model: {share} of the {rows:,} validation texts are answered "
            "right, and always answering {largest} would reach {base}"
        )
    )
    return t(said, **known), gains


def _budget(story: Story) -> tuple[str, bool]:
    """Whether the peak stayed inside the budget, as measured or else as predicted."""
    memory = story.summary.memory
    peak = memory.measured or memory.predicted
    if not memory.budget_bytes or peak is None:
        return "", False
    over_bytes = peak.device_bytes - memory.budget_bytes
    budget = format_both(memory.budget_bytes)
    if over_bytes > 0:
        over = format_bytes(over_bytes)
        return t(
            "its memory went {over} over the budget of {budget}", over=over, budget=budget
        ), True
    share = percent(peak.device_bytes / memory.budget_bytes)
    return t(
        "its memory stayed at {share} of the budget of {budget}", share=share, budget=budget
    ), False


def quality_section(result: Evaluation, mistakes: Sequence[Mistake]) -> dict[str, Any]:
    """The per-class table, the confusion matrix or its largest entries, and the mistakes."""
    small = 0 < len(result.confusion) <= LARGEST_MATRIX
    return {
        "sentence": quality_sentence(result),
        "classes": _classes(result),
        "matrix": _matrix(result) if small else None,
        "confusions": _confusions(result) if result.confusion and not small else None,
        "mistakes": [_mistake(item) for item in mistakes],
        "score_name": pt("score", "value") if result.task == "regression" else t("score"),
    }


def quality_sentence(result: Evaluation) -> str:
    """What was measured, on what."""
    said = [t("Measured on {rows:,} rows that were not trained on.", rows=result.rows)]
    said.append(averaging_sentence(result.averaging, result.positive, result.why))
    if result.threshold is not None:
        kind = (
            N_("A text is called {positive} from a probability of {threshold:.3g} on.")
            if result.positive
            else N_("A text has a label from a probability of {threshold:.3g} on.")
        )
        said.append(t(kind, positive=clean(result.positive), threshold=result.threshold))
    return together([one for one in said if one])


def _classes(result: Evaluation) -> PageTable | None:
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
    return PageTable(
        caption, [_class_cells(row) for row in (worst if many else result.classes)], head
    )


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


def _confusions(result: Evaluation) -> PageTable | None:
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
    return PageTable(t("The most frequent confusions"), rows, head) if rows else None


def _mistake(item: Mistake) -> dict[str, str]:
    text = clean(item.text)
    return {
        "text": text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "…",
        "expected": clean(item.expected),
        "predicted": clean(item.predicted),
        "score": number(item.score),
    }


_STATES = {
    "finished": N_("Finished"),
    "running": NP_("state of a run", "Training"),
    "stopped": N_("Stopped"),
    "failed": N_("Failed"),
    "cut": N_("No end on record"),
}

_FIDELITIES = {
    "exact": N_("exact: the same numbers, up to rounding"),
    "rounding": N_("rounding: the same algorithm with fewer bits"),
    "optimizer": N_("optimizer: another update rule"),
    "capacity": N_("capacity: fewer weights learn"),
    "data": N_("data: texts are cut shorter"),
}


def title(story: Story) -> str:
    """The page's name."""
    model = clean(Path(story.summary.model).name or story.summary.model)
    return t("{model}, fine-tuned", model=model) if model else t("A run of memfit")


def state(story: Story) -> dict[str, Any]:
    """How the run stands: a word, the facts beside it, why it ended, how to go on."""
    known = story.state if story.state in STATES else ""
    why = clean(story.why) or (
        t("It is still running, or its process was killed.") if story.state == CUT else ""
    )
    done = story.state in (FINISHED, RUNNING)
    go_on = clean(f"memfit train --resume --output-dir {shlex.quote(str(story.folder.path))}")
    return {
        "css": known or "other",
        "word": t(_STATES[known]) if known else clean(story.state).capitalize(),
        "facts": _facts(story),
        "why": why,
        "resume": "" if done or not known else go_on,
        "step": story.step,
        "max_steps": story.max_steps if story.state == RUNNING else None,
    }


def _facts(story: Story) -> list[str]:
    facts = []
    if story.seconds:
        facts.append(t("{time} of training", time=format_seconds(story.seconds)))
    if story.summary.device:
        facts.append(t("on {device}", device=clean(story.summary.device)))
    if story.state != FINISHED and story.step:
        if story.max_steps:
            facts.append(t("step {step:,} of {steps:,}", step=story.step, steps=story.max_steps))
        else:
            facts.append(t("{step:,} steps", step=story.step))
    if (left := _seconds_left(story)) is not None:
        facts.append(t("about {time} left", time=format_seconds(left)))
    if story.summary.finished_at:
        try:
            when = datetime.fromisoformat(story.summary.finished_at)
            facts.append(f"{when:%Y-%m-%d %H:%M}" + (" UTC" if when.tzinfo is not None else ""))
        except ValueError:
            facts.append(clean(story.summary.finished_at))
    return facts


def _seconds_left(story: Story) -> float | None:
    """By the later half of what was sampled: the first steps warm up."""
    if story.state != RUNNING or not story.max_steps or len(story.samples) < 4:
        return None
    begin, end = story.samples[len(story.samples) // 2], story.samples[-1]
    if end.step <= begin.step:
        return None
    return (end.seconds - begin.seconds) / (end.step - begin.step) * (story.max_steps - end.step)


def figures(summary: RunSummary) -> list[dict[str, str]]:
    """The metrics as big numbers, each with what it is."""
    shown = []
    for name, value in summary.metrics.items():
        label = named("metric", name)
        if name in ("f1", "precision", "recall"):
            if summary.averaging == "binary" and summary.positive:
                label = t(
                    "{metric} (of {class_name})", metric=label, class_name=clean(summary.positive)
                )
            elif summary.averaging in ("macro", "micro"):
                kind = (
                    N_("{metric} (macro)")
                    if summary.averaging == "macro"
                    else N_("{metric} (micro)")
                )
                label = t(kind, metric=label)
        shown.append({"name": label, "value": metric(value)})
    return shown


def run_warnings(summary: RunSummary) -> list[dict[str, str]]:
    """What makes the figures less than they seem, and what to do about it."""
    return [{"says": one.sentence, "do": one.advice} for one in summary.warnings]


def training(summary: RunSummary) -> PageTable:
    """Facts about the training, in the order the run gave them."""
    rows = [(t("model"), clean(summary.model))]
    if summary.task:
        rows.append((t("task"), named("task", summary.task)))
    rows += [
        (named("training", name), _picked_by(value) if name == "best_by" else number(value))
        for name, value in summary.training.items()
    ]
    rows += [
        (named("work", name), format_seconds(seconds))
        for name, seconds in summary.seconds.items()
        if seconds is not None
    ]
    if summary.best_checkpoint:
        rows.append((t("best checkpoint"), clean(summary.best_checkpoint)))
    return PageTable(t("How it was trained"), [(name, value) for name, value in rows if value])


def _picked_by(value: object) -> str:
    return t("loss") if value in ("loss", "eval_loss") else named("metric", clean(value))


def training_parts(story: Story) -> dict[str, PageTable]:
    """The same facts in two lists: what a reader looks for first, and the rest."""
    listed = training(story.summary)
    firsts = [named("training", name) for name in ("steps", "epochs", "best_by")]
    firsts += [t("best checkpoint"), *(named("work", name) for name in ("train", "total"))]
    step, rows = _measured_step(story), story.summary.training.get("effective_batch")
    speed = rows / step if step and isinstance(rows, int | float) else None
    short = [
        *((name, value) for name, value in listed.rows if name in firsts),
        (t("time of a step"), _step_time(step)),
        (t("rows a second"), "" if speed is None else f"{speed:,.3g}"),
    ]
    return {
        "short": PageTable(t("In short"), [row for row in short if row[1]]),
        "more": PageTable(listed.caption, [row for row in listed.rows if row[0] not in firsts]),
    }


def ranks(summary: RunSummary) -> PageTable | None:
    """What each rank held and how long it waited; None of a training by one process."""
    if not summary.ranks:
        return None
    head = [
        t("rank"), t("device"), t("highest memory"), t("in steps"), t("waiting"), t("tokens"),
    ]  # fmt: skip
    rows = [
        [
            str(one.rank),
            clean(one.device),
            "–" if one.peak_bytes is None else format_bytes(one.peak_bytes),
            format_seconds(one.step_seconds),
            format_seconds(one.waiting_seconds),
            f"{one.tokens:,}",
        ]
        for one in summary.ranks
    ]
    return PageTable(t("Each rank"), rows, head)


def plan(story: Story) -> dict[str, Any] | None:
    """Strategies, settings, reasons, and the predicted figures beside the measured ones."""
    made = story.plan
    if made is None:
        return None
    fidelity = _FIDELITIES.get(made.fidelity)
    facts = [
        (t("fidelity"), t(fidelity) if fidelity is not None else clean(made.fidelity)),
        (t("on the device at once"), clean(made.limits).replace("_", " ")),
        (
            t("peak on the device, predicted"),
            format_bytes(made.device_bytes) if made.device_bytes else "",
        ),
        (t("peak on the device, measured"), _measured_peak(story.summary)),
        (
            t("in the computer's memory, predicted"),
            format_bytes(made.host_bytes) if made.host_bytes else "",
        ),
        (t("time of a step, predicted"), _step_time(made.step_seconds)),
        (t("time of a step, measured"), _step_time(_measured_step(story))),
    ]
    head = [t("strategy"), t("settings"), t("why")]
    rows = [
        [named("strategy", name), *(clean(shown(word)) or "–" for word in rest)]
        for name, *rest in made.strategies
    ]
    return {
        "strategies": PageTable(t("What it does to fit"), rows, head, numbers=False)
        if rows
        else None,
        "reasons": [clean(shown(reason)) for reason in made.reasons],
        "facts": PageTable(
            t("Predicted and measured"),
            [(name, value) for name, value in facts if value],
        ),
    }


def _measured_peak(summary: RunSummary) -> str:
    measured = summary.memory.measured
    return format_bytes(measured.device_bytes) if measured else ""


def _measured_step(story: Story) -> float | None:
    """The median between two samples: evaluations and checkpoints in between do not count."""
    times = [seconds for _, seconds in step_seconds(story.samples)]
    return statistics.median(times) if times else None


def _step_time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else format_seconds(seconds)


def data(summary: RunSummary) -> dict[str, Any] | None:
    """Where the rows went, how the classes are spread, what `max_length` cuts."""
    if not summary.data and not summary.lengths:
        return None
    counts, lengths = summary.data, summary.lengths
    train: Mapping[str, int] = counts.get("train_class_counts") or {}
    held: Mapping[str, int] = counts.get("validation_class_counts") or {}
    names = list(dict.fromkeys([*train, *held]))
    caption = (
        t("The first {shown} of {count:,} classes", shown=MOST_CLASSES, count=len(names))
        if len(names) > MOST_CLASSES
        else t("Rows of each class")
    )
    head = [t("class"), t("train"), t("validation")]
    rows = [
        (named("count", name), number(value))
        for name, value in counts.items()
        if not isinstance(value, Mapping)
        and value not in (None, "")
        and name != "contradicting_example"  # the warning says it
    ]
    classes = [
        [clean(name), number(train.get(name, 0)), number(held.get(name, 0))]
        for name in names[:MOST_CLASSES]
    ]
    return {
        "rows": PageTable(t("Rows"), rows) if rows else None,
        "classes": PageTable(caption, classes, head) if classes else None,
        "lengths": _lengths(lengths),
        "picture": _length_picture(lengths),
    }


def _lengths(lengths: Mapping[str, Any]) -> str:
    if not lengths.get("count"):
        return ""
    cut = lengths["cut_rows"]
    return t(
        N_(
            "Half of the texts have up to {p50:,} tokens, nine in ten up to {p90:,}, the "
            "longest {longest:,}. A max_length of {limit:,} cuts {cut:,} of them ({share})."
        )
        if cut
        else N_(
            "Half of the texts have up to {p50:,} tokens, nine in ten up to {p90:,}, the "
            "longest {longest:,}. A max_length of {limit:,} cuts none of them."
        ),
        p50=lengths["p50"],
        p90=lengths["p90"],
        longest=lengths["max"],
        limit=lengths["max_length"],
        cut=cut,
        share=percent(cut / lengths["count"]),
    )


def _length_picture(lengths: Mapping[str, Any]) -> Picture | None:
    bins = [
        (item["first_tokens"], item["last_tokens"], item["rows"])
        for item in lengths.get("histogram") or ()
    ]
    if not bins or not plots.available():
        return None
    limit, caption = lengths.get("max_length"), t("Length of the texts")
    svg = plots.histogram(
        bins,
        mark=limit,
        name="lengths",
        label=f"{caption}: {_lengths(lengths)}",
        x_label=t("tokens"),
        y_label=t("rows"),
    )
    keys = [("dashes-2", t("max_length {tokens:,}", tokens=limit))] if limit is not None else []
    return Picture(svg, caption, keys)


def usage(folder: Path) -> list[tuple[str, str]]:
    """Ways to use the model, ready to copy; the first in three lines."""
    where = str(folder)
    python = [
        "import memfit",
        f"classifier = memfit.load({where!r})",
        'print(classifier.predict(["…"]))',
    ]
    return [
        (t("In Python"), "\n".join(python)),
        (t("In a terminal"), clean(f'memfit predict {shlex.quote(where)} "…"')),
        (
            t("With transformers alone"),
            f'transformers.pipeline("text-classification", {where!r})("…")',
        ),
    ]


def again(story: Story) -> str:
    """The command that repeats the training."""
    config = shlex.quote(str(story.folder.config.absolute()))
    return clean(f"memfit train --config {config} --output-dir NEW_FOLDER")


def made_with(summary: RunSummary) -> PageTable | None:
    """Versions, the machine and the configuration's digest."""
    rows = [(clean(name), clean(version)) for name, version in summary.versions.items()]
    if summary.device:
        rows.append((t("device"), clean(summary.device)))
    if summary.config_digest:
        rows.append((t("configuration"), clean(summary.config_digest)))
    return PageTable(t("Versions and machine"), rows) if rows else None
