"""How good predictions are: one evaluation for the Trainer, the terminal and the report.

`load()` stands in for the `evaluate` package, which fetches its metrics from a hub;
`from memfit.records import evaluation as evaluate` is all that a notebook has to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PureWindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np

from memfit.errors import ConfigError, DataError, MemfitError, nearest
from memfit.records.scoring import (
    THRESHOLD,
    Array,
    Scoring,
    answers,
    leading_metric,
    scoring_for,
    with_tuned_threshold,
)

if TYPE_CHECKING:
    from memfit.data import LabelSpace


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One line of the per-class table."""

    name: str
    precision: float
    recall: float
    f1: float
    rows: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything known about one set of predictions.

    The metric that leads is the first of `metrics`. `averaging`, `positive`, `why`, `threshold` and
    `tuned` are those of `Scoring`. `confusion[i][j]` counts rows of class i predicted as j.
    """

    task: str
    rows: int
    metrics: Mapping[str, float]
    averaging: str = ""
    positive: str = ""
    why: str = ""
    threshold: float | None = None
    tuned: bool = False
    classes: tuple[ClassRow, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rows of the table that were not evaluated: `no_text` and `no_label`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evaluation:
        """The inverse of `to_dict`, also after a trip through JSON."""
        return cls(
            **{
                **values,
                "classes": tuple(ClassRow(**row) for row in values.get("classes", ())),
                "confusion": tuple(tuple(row) for row in values.get("confusion", ())),
            }
        )


@dataclass(frozen=True, slots=True)
class Mistake:
    """A text the model got wrong; `score` is its probability, or the value in a regression."""

    text: str
    expected: str
    predicted: str
    score: float


def evaluate_predictions(
    logits: Array, labels: Array, labelspace: LabelSpace, scoring: Scoring | None = None
) -> Evaluation:
    """Score raw model outputs against the true labels, by the names alone if no rules are given."""
    logits, labels = np.asarray(logits), np.asarray(labels)
    if len(labels) == 0:
        raise DataError("there are no rows to evaluate on; give a validation file or a split")
    # A diverged model would otherwise pass for one that always answers class 0.
    broken_rows = int(np.isnan(logits).reshape(len(logits), -1).any(axis=1).sum())
    if broken_rows:
        raise MemfitError(
            "the model answers {rows} of {count} rows with NaN: the training has diverged; "
            "lower the learning rate or train in bf16 or fp32 instead of fp16",
            rows=f"{broken_rows:,}",
            count=f"{len(logits):,}",
        )
    scoring = scoring_for(labelspace) if scoring is None else scoring
    if labelspace.task == "regression":
        return _regression(logits, labels, scoring)
    names = labelspace.names
    if labelspace.task == "single_label" and not 0 <= labels.min() <= labels.max() < len(names):
        raise DataError(
            "the data has the label id {label}, but the model knows only 0 to {most} ({names})",
            label=int(labels.min() if labels.min() < 0 else labels.max()),
            most=len(names) - 1,
            names=", ".join(names[:5]) + ("…" if len(names) > 5 else ""),
        )
    evaluate = _single_label if labelspace.task == "single_label" else _multi_label
    scores = probabilities(logits, labelspace.task)

    def score(rules: Scoring) -> float:
        said = answers(scores, labelspace, rules)
        return evaluate(said, labels, names, rules).metrics[rules.leads]

    scoring = with_tuned_threshold(scores, labels, labelspace, scoring, score)
    return evaluate(answers(scores, labelspace, scoring), labels, names, scoring)


def compute_metrics_for(
    task: str, names: Sequence[str], scoring: Scoring | None = None
) -> Callable[[Any], dict[str, float]]:
    """The `compute_metrics` that the Trainer calls after each evaluation."""
    from memfit.data.tables import LabelSpace

    space = LabelSpace(task, tuple(names))

    def compute_metrics(prediction: Any) -> dict[str, float]:
        # It has more than two parts where the user asks for inputs or losses beside them.
        logits, labels = prediction.predictions, prediction.label_ids
        # Some heads return their hidden states after the logits.
        logits = logits[0] if isinstance(logits, tuple) else logits
        return dict(evaluate_predictions(logits, labels, space, scoring).metrics)

    return compute_metrics


def best_metric(task: str) -> tuple[str, bool]:
    """The metric that chooses the best checkpoint, and whether greater is better."""
    return leading_metric(task), task != "regression"


def probabilities(logits: Array, task: str) -> Array:
    """Softmax for one label, sigmoid for several, the value itself for a regression."""
    logits = np.asarray(logits, dtype=np.float64)
    if task == "regression":
        return logits
    if task == "multi_label":
        return np.exp(-np.logaddexp(0.0, -logits))
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def worst_mistakes(
    logits: Array,
    labels: Array,
    labelspace: LabelSpace,
    texts: Sequence[str],
    scoring: Scoring | None = None,
    *,
    limit: int = 12,
) -> tuple[Mistake, ...]:
    """The texts the model got most wrong, worst first: those that teach about data and model."""
    scores, labels = probabilities(logits, labelspace.task), np.asarray(labels)
    names = labelspace.names
    if labelspace.task == "regression":
        values, truth = scores.reshape(len(labels), -1)[:, 0], labels.reshape(len(labels), -1)[:, 0]
        order = np.argsort(-np.abs(values - truth), kind="stable")[:limit]
        return tuple(
            Mistake(texts[int(i)], f"{truth[i]:.4g}", f"{values[i]:.4g}", float(values[i]))
            for i in order
        )
    scoring = scoring_for(labelspace) if scoring is None else scoring
    said = answers(scores, labelspace, scoring)
    if labelspace.task == "multi_label":
        true, sure = labels >= 0.5, scores.max(axis=1)
        # How far the most wrong decision of a row is on the wrong side.
        cut = THRESHOLD if scoring.threshold is None else scoring.threshold
        badness = np.where(said != true, np.abs(scores - cut), -1.0).max(axis=1)
    else:
        true, sure = labels, scores[np.arange(len(said)), said]
        badness = np.where(said != true, sure, -1.0)
    order = np.argsort(-badness, kind="stable")[:limit]
    return tuple(
        Mistake(texts[int(i)], _said(true[i], names), _said(said[i], names), float(sure[i]))
        for i in order
        if badness[i] >= 0
    )


def _said(answer: Any, names: Sequence[str]) -> str:
    """A label id, or a row of yes and no, in names."""
    if np.ndim(answer) == 0:
        return names[int(answer)]
    return ", ".join(name for name, yes in zip(names, answer, strict=True) if yes) or "–"


def _scores(right: float, said: float, rows: float) -> tuple[float, float, float]:
    """Precision, recall and F1 by counts; 0 where there is nothing to divide by.

    As scikit-learn has them, whose import alone takes longer than many an evaluation.
    """
    precision = right / said if said else 0.0
    recall = right / rows if rows else 0.0
    return precision, recall, 2 * right / (said + rows) if said + rows else 0.0


def _class_rows(
    right: Array, said: Array, rows: Array, names: Sequence[str]
) -> tuple[ClassRow, ...]:
    """One line a class, by how often it was rightly said, said, and there."""
    counts = zip(right.tolist(), said.tolist(), rows.tolist(), strict=True)
    return tuple(
        ClassRow(name, *_scores(*count), int(count[2]))
        for name, count in zip(names, counts, strict=True)
    )


def _single_label(
    said: Array, labels: Array, names: tuple[str, ...], scoring: Scoring
) -> Evaluation:
    confusion = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(confusion, (labels.astype(np.int64), said), 1)
    met = confusion.sum(axis=0) + confusion.sum(axis=1)
    classes = _class_rows(confusion.diagonal(), confusion.sum(0), confusion.sum(1), names)
    averaged = [
        row
        for row, count in zip(classes, met, strict=True)
        # A class that is neither in the data nor among the answers has no F1 to average.
        if (row.name == scoring.positive if scoring.averaging == "binary" else count)
    ]
    metrics = {
        name: float(np.mean([getattr(row, name) for row in averaged]))
        for name in ("f1", "precision", "recall")
    }
    return Evaluation(
        task="single_label",
        rows=len(labels),
        metrics=_led({**metrics, "accuracy": float((said == labels).mean())}, scoring),
        averaging=scoring.averaging,
        positive=scoring.positive,
        why=scoring.why,
        threshold=scoring.threshold,
        tuned=scoring.tuned,
        classes=classes,
        confusion=tuple(tuple(int(count) for count in row) for row in confusion),
    )


def _led(metrics: Mapping[str, float], scoring: Scoring) -> dict[str, float]:
    """Puts the leading metric first; the usual one if the loss picks the best model."""
    usual = ("f1_macro", "f1", "accuracy", "precision", "recall")
    order = [name for name in (scoring.leads, *usual, *metrics) if name in metrics]
    return {name: metrics[name] for name in order}


def _multi_label(
    said: Array, labels: Array, names: tuple[str, ...], scoring: Scoring
) -> Evaluation:
    truth = labels >= 0.5
    right = said & truth
    precision, recall, f1 = _scores(int(right.sum()), int(said.sum()), int(truth.sum()))
    classes = _class_rows(right.sum(0), said.sum(0), truth.sum(0), names)
    metrics = {
        # All labels of a row right, which is what scikit-learn calls accuracy here.
        "accuracy": float((said == truth).all(axis=1).mean()),
        "f1": f1,
        "f1_macro": float(np.mean([row.f1 for row in classes])),
        "precision": precision,
        "recall": recall,
    }
    return Evaluation(
        task="multi_label",
        rows=len(labels),
        metrics=_led(metrics, scoring),
        averaging=scoring.averaging,
        threshold=scoring.threshold,
        tuned=scoring.tuned,
        classes=classes,
    )


def _regression(logits: Array, labels: Array, scoring: Scoring) -> Evaluation:
    said = np.asarray(logits, dtype=np.float64).reshape(-1)
    truth = np.asarray(labels, dtype=np.float64).reshape(-1)
    error = said - truth
    metrics = {"mse": float((error**2).mean()), "mae": float(np.abs(error).mean())}
    # Neither is defined where nothing varies.
    if truth.std() > 0:
        metrics["r2"] = 1.0 - metrics["mse"] / float(truth.var())
        if said.std() > 0:
            metrics["pearson"] = float(np.corrcoef(said, truth)[0, 1])
    return Evaluation(task="regression", rows=len(labels), metrics=_led(metrics, scoring))


# name -> the function of sklearn.metrics; its keywords (average, pos_label…) pass through.
_METRICS = {
    "accuracy": "accuracy_score",
    "f1": "f1_score",
    "precision": "precision_score",
    "recall": "recall_score",
    "mse": "mean_squared_error",
    "mae": "mean_absolute_error",
}

_NO_WARNING = {"f1", "precision", "recall"}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric by name, called like those of the `evaluate` package."""

    name: str

    def compute(self, *, predictions: Any, references: Any, **options: Any) -> dict[str, Any]:
        """{'f1': 0.93}; with average=None an array with one value a class."""
        import sklearn.metrics

        if self.name in _NO_WARNING:
            options.setdefault("zero_division", 0)
        try:
            value = getattr(sklearn.metrics, _METRICS[self.name])(
                np.asarray(references), np.asarray(predictions), **options
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(
                "cannot compute {name}: {error}", name=self.name, error=error
            ) from error
        return {self.name: float(value) if np.ndim(value) == 0 else value}


def load(name_or_path: str) -> Metric:
    """A metric by name ('f1') or by the path of its script ('metrics/f1/f1.py'); no hub needed."""
    name = PureWindowsPath(name_or_path).stem  # reads / and \ alike
    if name not in _METRICS:
        raise ConfigError(
            "there is no metric {name} here; known are {known}.{hint}",
            name=repr(name_or_path),
            known=", ".join(_METRICS),
            hint=nearest(name, _METRICS),
        )
    return Metric(name)
