"""How a run is scored and its classes weighed, by its options and rows; how a model keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config.files import read_json, write_json
from memfit.data.labels import label_named, weights_of_classes
from memfit.errors import ConfigError
from memfit.records.scoring import Scoring, scoring_for
from memfit.text import t

if TYPE_CHECKING:
    from memfit.config import DataConfig, RunConfig
    from memfit.data import LabelSpace, TextData


_KEY = "memfit"
"""Under this name a model's config.json has the rules; transformers reads it and does nothing."""


def keep_scoring(config_file: Path, scoring: Scoring) -> None:
    """Writes the rules into the config of a saved model, whose threshold is not tuned again."""
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
    chosen_by = arguments.metric_for_best_model
    return scoring_for(
        text.labels,
        text.counts.train_class_counts,
        positive=_positive_label(config.data, text.labels),
        threshold=_threshold(config, text.labels),
        leads=chosen_by.removeprefix("eval_") if chosen_by else None,
    )


def class_weights_of_run(config: RunConfig, text: TextData) -> list[float] | None:
    """What a row of each class counts in the loss; None where all count alike."""
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


def _threshold(config: RunConfig, labels: LabelSpace) -> float | str | None:
    if config.threshold is not None and (
        labels.task == "regression" or (labels.task == "single_label" and len(labels.names) != 2)
    ):
        raise ConfigError(
            t(
                "--threshold is for two classes or several labels a row, and this table has "
                "neither; leave it out"
            )
        )
    return config.threshold


def _positive_label(data: DataConfig, labels: LabelSpace) -> str | None:
    if data.positive_label is None:
        return None
    if labels.task != "single_label" or len(labels.names) != 2:
        raise ConfigError(
            t(
                "--positive-label is for two classes, and there are {count} here; leave it out",
                count=len(labels.names),
            )
            if labels.task == "single_label"
            else t("--positive-label is for two classes, and a row has one of them; leave it out")
        )
    return label_named(data.positive_label, labels, data.label_names, "--positive-label")
