"""How probabilities become answers, and which figure leads: decided once, before the training.

`scoring_of_run` decides by the run's options and rows; `keep_scoring` writes it into the saved
model, and `kept_scoring` reads it from there.

Two classes: F1 is that of the positive class, which is the one named, or else the rarer one. If the
rarer class has less than a tenth of the other's rows, or there are more classes, F1 is the mean
over the classes: it falls to a half where the rarer class is never found.

The answer is the most probable class, and a label from a probability of 0.5 on. A threshold moves
that: two classes get the positive one from there on, and several labels each label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memfit.errors import ConfigError
from memfit.i18n import N_

if TYPE_CHECKING:
    from memfit.config import DataConfig, RunConfig
    from memfit.data import LabelSpace, TextData

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
    labels: LabelSpace,
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


def answers(scores: Array, labels: LabelSpace, scoring: Scoring) -> Array:
    """Class ids of a table of probabilities; for several labels a table of yes and no."""
    if labels.task == "multi_label":
        return np.asarray(scores >= (scoring.threshold or THRESHOLD))
    if scoring.threshold is None or not scoring.positive:
        return np.asarray(scores.argmax(axis=-1))
    positive = labels.names.index(scoring.positive)
    return np.where(scores[:, positive] >= scoring.threshold, positive, 1 - positive)


def with_tuned_threshold(
    scores: Array, truth: Array, labels: LabelSpace, scoring: Scoring, score: Any
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


# ---- of a run, a table, a model ----


_KEY = "memfit"
"""Under this name a model's config.json has the rules; transformers reads it and does nothing."""


def keep_scoring(config_file: Path, scoring: Scoring) -> None:
    """Writes the rules into the config of a saved model, whose threshold is not tuned again."""
    from memfit.config.files import read_json, write_json

    values = read_json(config_file)
    write_json(config_file, {**values, _KEY: replace(scoring, tuned=False).to_dict()})


def kept_scoring(config: Any, labels: LabelSpace) -> Scoring | None:
    """The rules a model came with; None where there are none that fit its labels.

    They were chosen by the rows of the training, which says nothing of the rows met now.
    """
    values = getattr(config, _KEY, None)
    if not isinstance(values, Mapping):
        return None
    scoring = Scoring.from_dict(values)
    known = not scoring.positive or (scoring.positive in labels.names and len(labels.names) == 2)
    why = "trained" if scoring.averaging == "binary" else ""
    return replace(scoring, why=why) if known else None


def scoring_of_run(config: RunConfig, text: TextData, arguments: Any) -> Scoring:
    """The positive class, the leading metric and the threshold of a run."""
    chosen_by, labels = arguments.metric_for_best_model, text.labels
    several = labels.task == "single_label" and len(labels.names) != 2
    if config.threshold is not None and (several or labels.task == "regression"):
        raise ConfigError(
            "--threshold is for two classes or several labels a row, and this table has "
            "neither; leave it out"
        )
    return scoring_for(
        labels,
        text.counts.train_class_counts,
        positive=_positive_label(config.data, labels),
        threshold=config.threshold,
        leads=chosen_by.removeprefix("eval_") if chosen_by else None,
    )


def class_weights_of_run(config: RunConfig, text: TextData) -> list[float] | None:
    """What a row of each class counts in the loss; None where all count alike."""
    from memfit.data.labels import weights_of_classes

    if config.class_weights is None:
        return None
    counts = text.counts
    return weights_of_classes(
        config.class_weights,
        text.labels,
        counts.train_class_counts,
        counts.train_rows,
        config.data.label_names,
    )


def scoring_of_table(
    kept: Scoring | None, data: DataConfig, labels: LabelSpace, counts: Mapping[str, int]
) -> Scoring:
    """For `evaluate`: the model's rules, or those its table suggests; --positive-label wins."""
    positive = _positive_label(data, labels)
    scoring = scoring_for(labels, counts) if kept is None else kept
    if positive is None:
        return scoring
    threshold = scoring.threshold
    if threshold is not None and scoring.positive not in ("", positive):
        threshold = 1 - threshold  # the same answers, told of the other class
    return replace(scoring, averaging="binary", positive=positive, why="given", threshold=threshold)


def _positive_label(data: DataConfig, labels: LabelSpace) -> str | None:
    from memfit.data.labels import label_named

    if data.positive_label is None:
        return None
    if labels.task != "single_label" or len(labels.names) != 2:
        kind = N_("--positive-label is for two classes, and a row has one of them; leave it out")
        if labels.task == "single_label":
            kind = N_(
                "--positive-label is for two classes, and there are {count} here; leave it out"
            )
        raise ConfigError(kind, count=len(labels.names))
    return label_named(data.positive_label, labels, data.label_names, "--positive-label")
