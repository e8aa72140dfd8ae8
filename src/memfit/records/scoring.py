"""How probabilities become answers, and which figure leads: decided once, before the training.

Two classes: F1 is that of the positive class, which is the one named, or else the rarer one. If the
rarer class has less than a tenth of the other's rows, or there are more classes, F1 is the mean
over the classes: it falls to a half where the rarer class is never found.

The answer is the most probable class, and a label from a probability of 0.5 on. A threshold moves
that: two classes get the positive one from there on, and several labels each label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

THRESHOLD = 0.5
"""The probability from which a multi-label text has a label, unless another is chosen."""

STRONG_IMBALANCE = 10
"""From this many rows of one class for each of another on, accuracy says little."""

_MOST_CUTS = 200
"""Thresholds that are tried at most."""

_POSITIVE_WORDS = frozenset(
    {
        "1", "positive", "pos", "good", "true", "yes", "正", "正面", "正向", "正类", "好", "好评",
        "好評", "正评", "正評", "积极", "積極", "是", "有", "真", "阳性", "陽性", "满意", "滿意",
    }
)  # fmt: skip


class Labels(Protocol):
    """What scoring needs to know of the labels; `memfit.data`'s LabelSpace is one."""

    @property
    def task(self) -> str:
        """single_label, multi_label or regression."""

    @property
    def names(self) -> tuple[str, ...]:
        """Label names in the order of their ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """The rules of one run, kept with its model.

    `averaging` says what `f1`, `precision` and `recall` are: of the positive class ("binary"), the
    mean over classes ("macro"), or over all decisions of a multi-label task ("micro").
    """

    averaging: str = ""
    positive: str = ""
    """The positive one of two classes; also known where the mean over both leads."""
    why: str = ""
    """Why this class: `given`, `rarer`, of two alike `tie_called` or `tie_last`, by `name` if no
    rows were counted, `trained` of a loaded model; `imbalance` where the mean leads."""
    leads: str = "f1"
    """The metric that is shown first and picks the best model."""
    threshold: float | None = None
    tuned: bool = False
    """Whether the threshold is the best one for the rows that are scored."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the model's config."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Scoring:
        """The inverse of `to_dict`; keys of another version are passed over."""
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


def scoring_for(
    labels: Labels,
    counts: Mapping[str, int] | None = None,
    *,
    positive: str | None = None,
    threshold: float | str | None = None,
    leads: str | None = None,
) -> Scoring:
    """The rules for these labels, whose training rows are `counts`; "auto" tunes the threshold."""
    made = Scoring(
        leads=leading_metric(labels.task) if leads in (None, "loss") else str(leads),
        threshold=threshold if isinstance(threshold, float) else None,
        tuned=threshold == "auto",
    )
    if labels.task == "regression":
        return made
    if labels.task == "multi_label":
        return replace(made, averaging="micro")
    if len(labels.names) != 2:
        return replace(made, averaging="macro")
    if positive is not None:
        return replace(made, averaging="binary", positive=positive, why="given")
    name, why = _usual_positive(labels.names, counts or {})
    if imbalance(counts or {}) > STRONG_IMBALANCE:
        return replace(made, averaging="macro", positive=name, why="imbalance")
    return replace(made, averaging="binary", positive=name, why=why)


def leading_metric(task: str) -> str:
    """The metric that is shown first and picks the best model, unless another is asked for."""
    return {"regression": "mse", "multi_label": "f1_macro"}.get(task, "f1")


def imbalance(counts: Mapping[str, int]) -> float:
    """Rows of the most frequent class for each row of the rarest that has any."""
    known = [count for count in counts.values() if count > 0]
    return max(known) / min(known) if known else 1.0


def _usual_positive(names: Sequence[str], counts: Mapping[str, int]) -> tuple[str, str]:
    """The rarer class; of two alike the one called positive, or else the last."""
    rows = [counts.get(name, 0) for name in names]
    if rows[0] != rows[1]:
        return names[rows.index(min(rows))], "rarer"
    called = [name for name in names if name.strip().casefold() in _POSITIVE_WORDS]
    if len(called) == 1:
        return called[0], "tie_called" if any(rows) else "name"
    return names[-1], "tie_last" if any(rows) else "name"


def answers(scores: Array, labels: Labels, scoring: Scoring) -> Array:
    """Class ids of a table of probabilities; for several labels a table of yes and no."""
    if labels.task == "multi_label":
        return np.asarray(scores >= (scoring.threshold or THRESHOLD))
    if scoring.threshold is None or not scoring.positive:
        return np.asarray(scores.argmax(axis=-1))
    positive = labels.names.index(scoring.positive)
    return np.where(scores[:, positive] >= scoring.threshold, positive, 1 - positive)


def with_tuned_threshold(
    scores: Array, truth: Array, labels: Labels, scoring: Scoring, score: Any
) -> Scoring:
    """The threshold at which `score(scoring)` is highest; of equals the nearest to 0.5.

    F1 is highest where one more row that has the label comes in, so only cuts just below the
    scores of such rows are tried.
    """
    if not scoring.tuned:
        return scoring
    if labels.task == "multi_label":
        values, having = scores.ravel(), (truth >= 0.5).ravel()
    elif scoring.positive:
        positive = labels.names.index(scoring.positive)
        values, having = scores[:, positive], truth == positive
    else:
        return replace(scoring, tuned=False)
    distinct = np.unique(values)
    at = np.searchsorted(distinct, np.unique(values[having]))
    if len(at) > _MOST_CUTS:
        at = at[np.linspace(0, len(at) - 1, _MOST_CUTS).round().astype(int)]
    below = np.where(at > 0, distinct[np.maximum(at - 1, 0)], 0.0)
    cuts = [THRESHOLD, *((distinct[at] + below) / 2).tolist()]
    cuts.sort(key=lambda cut: abs(cut - THRESHOLD))
    tried = [replace(scoring, threshold=cut) for cut in cuts]
    return max(tried, key=score)  # the first of equals
