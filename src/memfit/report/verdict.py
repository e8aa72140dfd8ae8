"""How a run went, in one sentence: what its answers are worth, and whether it kept its budget."""

from __future__ import annotations

from typing import Any

from memfit.records.evaluation import Evaluation
from memfit.report.formatting import number
from memfit.report.story import FINISHED, Story
from memfit.report.terminal import metric
from memfit.text import N_, clean, t
from memfit.units import format_both, format_bytes, percent, tenths_of_percent

GOOD, DOUBTFUL, BAD = "good", "doubtful", "bad"

_LEAST_GAIN = 0.01
"""Of all answers: a model that gets no more right than this beyond the largest class is no gain."""

_USELESS = {
    "one_class": N_("Do not use this model: it gives every text the same answer"),
    "no_labels": N_("Do not use this model: it gives no text any label"),
}


def verdict(story: Story) -> dict[str, str] | None:
    """The sentence and how good it is; None before there is an evaluation."""
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
