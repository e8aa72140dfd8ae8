"""The parts of a report in words and tables, for the page, the notebook and the model card."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from memfit.i18n import N_, NP_, pt, shown, t
from memfit.printing import clean
from memfit.records.evaluation import ClassRow, Evaluation
from memfit.records.export_results import Export
from memfit.report import plots
from memfit.report.formatting import (
    FIDELITY_SENTENCES,
    PageTable,
    Picture,
    averaging_sentence,
    metric,
    named,
    number,
    together,
)
from memfit.report.view import CUT, FINISHED, RUNNING, STATES, RunView
from memfit.units import (
    format_both,
    format_bytes,
    format_seconds,
    percent,
    step_time,
    tenths_of_percent,
)

LARGEST_MATRIX = 20

MOST_CLASSES = 100

MOST_CONFUSIONS = 20

GOOD, DOUBTFUL, BAD = "good", "doubtful", "bad"

_LEAST_GAIN = 0.01
"""Of all answers: a model that gets no more right than this beyond the largest class is no gain."""

_USELESS = {
    "one_class": N_("Do not use this model: it gives every text the same answer"),
    "no_labels": N_("Do not use this model: it gives no text any label"),
}

_STATES = {
    "finished": N_("Finished"),
    "running": NP_("state of a run", "Training"),
    "stopped": N_("Stopped"),
    "failed": N_("Failed"),
    "cut": N_("No end on record"),
}


# ---- how it stands ----


def title(view: RunView) -> str:
    """The page's name."""
    model = clean(Path(view.summary.model).name or view.summary.model)
    return t("{model}, fine-tuned", model=model) if model else t("A run of memfit")


def state(view: RunView) -> dict[str, Any]:
    """How the run stands: a word, the facts beside it, why it ended, how to go on."""
    facts = []
    if view.seconds:
        facts.append(t("{time} of training", time=format_seconds(view.seconds)))
    if view.summary.device:
        facts.append(t("on {device}", device=clean(view.summary.device)))
    if view.state != FINISHED and view.step:
        if view.max_steps:
            facts.append(t("step {step:,} of {steps:,}", step=view.step, steps=view.max_steps))
        else:
            facts.append(t("{step:,} steps", step=view.step))
    if (left := view.seconds_left) is not None:
        facts.append(t("about {time} left", time=format_seconds(left)))
    if view.summary.finished_at:
        try:
            when = datetime.fromisoformat(view.summary.finished_at)
            facts.append(f"{when:%Y-%m-%d %H:%M}" + (" UTC" if when.tzinfo is not None else ""))
        except ValueError:
            facts.append(clean(view.summary.finished_at))
    known = view.state if view.state in STATES else ""
    why = clean(view.why) or (
        t("It is still running, or its process was killed.") if view.state == CUT else ""
    )
    done = view.state in (FINISHED, RUNNING)
    go_on = clean(f"memfit train --resume --output-dir {shlex.quote(str(view.folder.path))}")
    return {
        "css": known or "other",
        "word": t(_STATES[known]) if known else clean(view.state).capitalize(),
        "facts": facts,
        "why": why,
        "resume": "" if done or not known else go_on,
        "step": view.step,
        "max_steps": view.max_steps if view.state == RUNNING else None,
    }


def verdict(view: RunView) -> dict[str, str] | None:
    """How a run went, in one sentence, and how good that is; None before there is an evaluation.

    What its answers are worth, and whether it stayed inside its budget.
    """
    if view.state != FINISHED or view.evaluation is None:
        return None
    if view.useless:
        said, css = t(_USELESS[view.useless]), BAD
    else:
        said, gains = _answers(view.evaluation)
        css = GOOD if gains and not view.summary.warnings else DOUBTFUL
    peak = view.peaks.get("measured") or view.peaks.get("predicted")
    if peak is None or peak.share is None:
        return {"css": css, "sentence": t("{first}.", first=said)}
    if peak.over_bytes > 0:
        css, kind = BAD, N_("its memory went {over} over the budget of {budget}")
    else:
        kind = N_("its memory stayed at {share} of the budget of {budget}")
    memory = t(
        kind,
        over=format_bytes(peak.over_bytes),
        share=percent(peak.share),
        budget=format_both(peak.budget_bytes or 0),
    )
    return {"css": css, "sentence": t("{first}; {second}.", first=said, second=memory)}


def _answers(evaluation: Evaluation) -> tuple[str, bool]:
    """What was answered right, and whether that is more than without a model."""
    metrics, rows = evaluation.metrics, evaluation.rows
    if evaluation.task == "regression":
        said = t(
            "On {rows:,} validation texts its values are off by {off} on average, R² {r2}",
            rows=rows,
            off=number(metrics.get("mae")),
            r2=metric(metrics.get("r2")),
        )
        return said, (metrics.get("r2") or 0.0) > 0
    accuracy = metrics.get("accuracy", 0.0)
    share = tenths_of_percent(accuracy)
    if evaluation.task == "multi_label" or not evaluation.classes:
        said = t(
            "All labels of {share} of the {rows:,} validation texts are right, F1 is {f1}",
            share=share,
            rows=rows,
            f1=metric(next(iter(metrics.values()), None)),
        )
        return said, True
    largest = max(evaluation.classes, key=lambda row: row.rows)
    base = largest.rows / max(rows, 1)
    gains = accuracy > base + _LEAST_GAIN
    said = t(
        N_(
            "{share} of the {rows:,} validation texts are answered right, where always answering "
            "{largest} would reach {base}"
        )
        if gains
        else N_(
            "Hardly better than no model: {share} of the {rows:,} validation texts are answered "
            "right, and always answering {largest} would reach {base}"
        ),
        share=share,
        rows=rows,
        largest=clean(largest.name),
        base=tenths_of_percent(base),
    )
    return said, gains


def figures(view: RunView) -> list[dict[str, str]]:
    """The metrics as big numbers, each with what it is."""
    summary, shown = view.summary, []
    kinds = {"macro": N_("{metric} (macro)"), "micro": N_("{metric} (micro)")}
    if summary.positive:
        kinds["binary"] = N_("{metric} (of {class_name})")
    for name, value in summary.metrics.items():
        label = named("metric", name)
        if name in ("f1", "precision", "recall") and summary.averaging in kinds:
            kind = kinds[summary.averaging]
            label = t(kind, metric=label, class_name=clean(summary.positive))
        shown.append({"name": label, "value": metric(value)})
    return shown


# ---- the evaluation ----


def quality(view: RunView) -> dict[str, Any] | None:
    """The per-class table, the confusion matrix or its largest entries, and the mistakes."""
    result = view.evaluation
    if result is None:
        return None
    said = [
        t("Measured on {rows:,} rows that were not trained on.", rows=result.rows),
        averaging_sentence(result.averaging, result.positive, result.why),
    ]
    if result.threshold is not None:
        kind = (
            N_("A text is called {positive} from a probability of {threshold:.3g} on.")
            if result.positive
            else N_("A text has a label from a probability of {threshold:.3g} on.")
        )
        said.append(t(kind, positive=clean(result.positive), threshold=result.threshold))
    small = 0 < len(result.confusion) <= LARGEST_MATRIX
    confusions = None
    if result.confusion and not small:
        names = [clean(row.name) for row in result.classes]
        pairs = [
            (count, names[row], names[column])
            for row, counts in enumerate(result.confusion)
            for column, count in enumerate(counts)
            if count and row != column
        ]
        pairs.sort(key=lambda item: -item[0])
        rows = [[true, said, f"{count:,}"] for count, true, said in pairs[:MOST_CONFUSIONS]]
        head = [t("is"), t("was called"), t("rows")]
        confusions = PageTable(t("The most frequent confusions"), rows, head) if rows else None
    return {
        "sentence": together([one for one in said if one]),
        "classes": class_table(result.classes) if result.classes else None,
        "matrix": result if small else None,
        "confusions": confusions,
        "score_name": pt("score", "value") if result.task == "regression" else t("score"),
    }


def class_table(
    classes: Sequence[ClassRow], digits: int = 3, most: int = MOST_CLASSES
) -> PageTable:
    """Precision, recall and F1 of each class; of very many the weakest."""
    rows, caption = list(classes), t("Each class")
    if len(rows) > most:
        caption = t("The {shown} weakest of {count:,} classes", shown=most, count=len(rows))
        rows = sorted(rows, key=lambda row: row.f1)[:most]
    scores = ("precision", "recall", "f1")
    return PageTable(
        caption,
        [
            (
                clean(row.name),
                *(f"{value:.{digits}f}" for value in (row.precision, row.recall, row.f1)),
                f"{row.rows:,}",
            )
            for row in rows
        ],
        [t("class"), *(named("metric", name) for name in scores), t("rows")],
    )


# ---- the training ----


def training(view: RunView) -> PageTable:
    """Facts about the training, in the order the run gave them."""
    summary = view.summary
    rows = [(t("model"), clean(summary.model))]
    if summary.task:
        rows.append((t("task"), named("task", summary.task)))
    rows += [(named("training", name), fact(name, it)) for name, it in summary.training.items()]
    rows += [
        (named("work", name), format_seconds(seconds))
        for name, seconds in summary.seconds.items()
        if seconds is not None
    ]
    if summary.best_checkpoint:
        rows.append((t("best checkpoint"), clean(summary.best_checkpoint)))
    return PageTable(t("How it was trained"), [row for row in rows if row[1]])


def fact(name: str, value: object) -> str:
    """A figure of the training in words."""
    if name != "best_by":
        return number(value)
    return t("loss") if value in ("loss", "eval_loss") else named("metric", clean(value))


def training_parts(view: RunView) -> dict[str, PageTable]:
    """The same facts in two lists: what a reader looks for first, and the rest."""
    listed = training(view)
    firsts = [named("training", name) for name in ("steps", "epochs", "best_by")]
    firsts += [t("best checkpoint"), *(named("work", name) for name in ("train", "total"))]
    short = [row for row in listed.rows if row[0] in firsts]
    if step := view.step_seconds:
        short.append((t("time of a step"), step_time(step)))
        if view.rows_a_step:
            short.append((t("rows a second"), f"{view.rows_a_step / step:,.3g}"))
    return {
        "short": PageTable(t("In short"), short),
        "more": PageTable(listed.caption, [row for row in listed.rows if row[0] not in firsts]),
    }


# ---- the plan ----


def plan(view: RunView) -> dict[str, Any] | None:
    """Strategies, settings, reasons, and the predicted figures beside the measured ones."""
    made = view.plan
    if made is None:
        return None
    known = FIDELITY_SENTENCES.get(made.fidelity)
    measured = view.peaks.get("measured")
    bytes_of = {
        N_("peak on the device, predicted"): made.device_bytes,
        N_("peak on the device, measured"): measured and measured.device_bytes,
        N_("in the computer's memory, predicted"): made.host_bytes,
    }
    seconds_of = {
        N_("time of a step, predicted"): made.step_seconds,
        N_("time of a step, measured"): view.step_seconds,
    }
    facts = [
        (t("fidelity"), t(known) if known else clean(made.fidelity)),
        (t("on the device at once"), clean(made.limits).replace("_", " ")),
        *((t(name), format_bytes(size)) for name, size in bytes_of.items() if size),
        *((t(name), step_time(one)) for name, one in seconds_of.items() if one is not None),
    ]
    rows = [
        [named("strategy", name), *(clean(shown(word)) or "–" for word in rest)]
        for name, *rest in made.strategies
    ]
    head = [t("strategy"), t("settings"), t("why")]
    table = PageTable(t("What it does to fit"), rows, head, numbers=False)
    return {
        "strategies": table if rows else None,
        "reasons": [clean(shown(reason)) for reason in made.reasons],
        "facts": PageTable(t("Predicted and measured"), [row for row in facts if row[1]]),
    }


# ---- the data ----


def data(view: RunView) -> dict[str, Any] | None:
    """Where the rows went, how the classes are spread, what `max_length` cuts."""
    counts, lengths = view.summary.data, view.summary.lengths
    if not counts and not lengths:
        return None
    rows = [
        (named("count", name), number(value))
        for name, value in counts.items()
        if not isinstance(value, Mapping)
        and value not in (None, "")
        and name != "contradicting_example"  # the warning says it
    ]
    sentence, picture = lengths_sentence(lengths), None
    names = ("first_tokens", "last_tokens", "rows")
    if (bins := lengths.get("histogram")) and plots.available():
        limit, caption = lengths.get("max_length"), t("Length of the texts")
        svg = plots.histogram(
            [tuple(item[name] for name in names) for item in bins],
            mark=limit,
            name="lengths",
            label=f"{caption}: {sentence}",
            x_label=t("tokens"),
            y_label=t("rows"),
        )
        keys = [] if limit is None else [("dashes-2", t("max_length {tokens:,}", tokens=limit))]
        picture = Picture(svg, caption, keys)
    return {
        "rows": PageTable(t("Rows"), rows) if rows else None,
        "classes": rows_of_classes(view, MOST_CLASSES),
        "lengths": sentence,
        "picture": picture,
    }


def rows_of_classes(view: RunView, most: int | None = None) -> PageTable | None:
    """How many rows of each class were trained on and held out."""
    train: Mapping[str, int] = view.summary.data.get("train_class_counts") or {}
    held: Mapping[str, int] = view.summary.data.get("validation_class_counts") or {}
    names = list(dict.fromkeys([*train, *held]))
    rows = [
        [clean(name), number(train.get(name, 0)), number(held.get(name, 0))]
        for name in names[:most]
    ]
    caption = (
        t("The first {shown} of {count:,} classes", shown=most, count=len(names))
        if len(names) > len(rows)
        else t("Rows of each class")
    )
    return PageTable(caption, rows, [t("class"), t("train"), t("validation")]) if rows else None


def lengths_sentence(lengths: Mapping[str, Any]) -> str:
    """How long the texts are, and how many `max_length` cuts; empty if they were not counted."""
    if not lengths.get("count"):
        return ""
    return t(
        N_(
            "Half of the texts have up to {p50:,} tokens, nine in ten up to {p90:,}, the "
            "longest {longest:,}. A max_length of {limit:,} cuts {cut:,} of them ({share})."
        )
        if lengths["cut_rows"]
        else N_(
            "Half of the texts have up to {p50:,} tokens, nine in ten up to {p90:,}, the "
            "longest {longest:,}. A max_length of {limit:,} cuts none of them."
        ),
        p50=lengths["p50"],
        p90=lengths["p90"],
        longest=lengths["max"],
        limit=lengths["max_length"],
        cut=lengths["cut_rows"],
        share=percent(lengths["cut_rows"] / lengths["count"]),
    )


# ---- the export ----


def export(view: RunView) -> dict[str, Any] | None:
    """Every variant that `memfit export` measured, and why a file was not written."""
    made = view.export
    if made is None or not made.variants:
        return None
    return {
        "sentence": t(
            "Each variant answered the same {rows:,} rows; the times are of the machine that "
            "exported it.",
            rows=made.rows,
        ),
        "refused": clean(made.refused),
        "table": export_table(made),
    }


def export_table(made: Export, *, written_only: bool = False) -> PageTable:
    """Size, time, metric and changed answers of every variant, torch first."""
    rows = []
    for one in made.variants:
        if written_only and one.name != "torch" and not one.file:
            continue
        changed = t("{changed} of {rows}", changed=f"{one.changed_answers:,}",
                    rows=f"{made.rows:,}")  # fmt: skip
        rows.append(
            [
                clean(f"{one.name} ({one.scheme})" if one.scheme else one.name),
                format_bytes(one.size_bytes),
                f"{one.alone_milliseconds:.1f}",
                f"{one.batched_milliseconds:.2f}",
                f"{one.metric:.4f}",
                changed,
            ]
        )
    head = [
        t("variant"), t("size"), t("ms a text alone"), t("ms a text in batches"),
        named("metric", made.metric), t("answers changed"),
    ]  # fmt: skip
    return PageTable(t("The exported files beside torch"), rows, head)
