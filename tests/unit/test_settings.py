"""memfit's defaults: few, documented, and giving way to what the user sets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import IntervalStrategy

from memfit.config import training_fields
from memfit.config.training_fields import DEFAULTS, METRICS, training_arguments, with_defaults
from memfit.data import LabelSpace
from memfit.errors import ConfigError
from memfit.records.evaluation import evaluate_predictions


def test_without_anything_given_it_evaluates_saves_and_keeps_the_best_each_epoch(
    tmp_path: Path,
) -> None:
    arguments = training_arguments({}, tmp_path, "f1")
    assert arguments.per_device_train_batch_size == 32
    assert arguments.learning_rate == 2e-5
    assert arguments.eval_strategy == arguments.save_strategy == "epoch"
    assert arguments.save_total_limit == 3
    assert arguments.load_best_model_at_end
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("f1", True)
    assert arguments.num_train_epochs == 3  # TrainingArguments' own


def test_the_best_regression_has_the_smallest_error(tmp_path: Path) -> None:
    arguments = training_arguments({}, tmp_path, "mse")
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("mse", False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"eval_strategy": "steps", "eval_steps": 50},
         {"save_strategy": "steps", "save_steps": 50, "load_best_model_at_end": True}),
        ({"eval_steps": 50},
         {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 50}),
        ({"save_steps": 10},
         {"save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 10,
          "load_best_model_at_end": True}),
        ({"save_steps": 10, "eval_strategy": "epoch"},
         {"save_strategy": "steps", "eval_strategy": "epoch", "load_best_model_at_end": False}),
        ({"save_steps": 10, "save_strategy": "steps"}, {"eval_strategy": "epoch"}),
        ({"eval_steps": 10, "save_strategy": "epoch"},
         {"eval_strategy": "steps", "load_best_model_at_end": False}),
        ({"eval_strategy": "no"}, {"save_strategy": "epoch", "load_best_model_at_end": False}),
        ({"save_strategy": "no"}, {"eval_strategy": "epoch", "load_best_model_at_end": False}),
        ({"save_strategy": "best"}, {"load_best_model_at_end": True,
                                     "metric_for_best_model": "f1"}),
        ({"metric_for_best_model": "accuracy"}, {"metric_for_best_model": "accuracy"}),
        ({"load_best_model_at_end": False}, {"save_strategy": "epoch"}),
    ],
)  # fmt: skip
def test_fields_that_belong_together_follow_the_one_that_was_set(
    given: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    fields = with_defaults(given, "f1")
    assert {key: fields[key] for key in expected} == expected
    training_arguments(given, tmp_path, "f1")  # and transformers takes them


@pytest.mark.parametrize("kind", ["logging", "eval", "save"])
def test_steps_beside_another_strategy_are_refused_and_not_ignored(
    kind: str, tmp_path: Path
) -> None:
    given = {f"{kind}_strategy": IntervalStrategy.EPOCH, f"{kind}_steps": 10}
    with pytest.raises(ConfigError, match=f"--{kind}-steps is 10, and --{kind}-strategy epoch"):
        training_arguments(given, tmp_path, "f1")


def test_what_transformers_refuses_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TrainingArguments refuses.*sometimes"):
        training_arguments({"eval_strategy": "sometimes"}, tmp_path, "f1")


@pytest.mark.parametrize(
    ("metric", "task"),
    [("loss", "single_label"), ("eval_f1", "single_label"), ("f1_macro", "multi_label"),
     ("eval_r2", "regression")],
)  # fmt: skip
def test_every_metric_of_the_task_may_choose_the_best(
    metric: str, task: str, tmp_path: Path
) -> None:
    given = {"metric_for_best_model": metric}
    assert training_arguments(given, tmp_path, "f1", task=task).metric_for_best_model == metric
    with pytest.raises(ConfigError, match="--metric-for-best-model is 'f3'"):
        training_arguments({"metric_for_best_model": "f3"}, tmp_path, "f1", task=task)


def test_the_metrics_named_are_those_an_evaluation_has() -> None:
    labels = {
        "single_label": np.array([0, 1, 2]),
        "multi_label": np.eye(3),
        "regression": np.array([1.0, 2.0, 3.0]),
    }
    for task, names in METRICS.items():
        logits = np.array([[1.0], [2.5], [2.0]]) if task == "regression" else np.eye(3)
        space = LabelSpace(task, ("a",) if task == "regression" else ("a", "b", "c"))
        assert set(evaluate_predictions(logits, labels[task], space).metrics) == set(names)


def test_steps_stand_in_for_epochs(tmp_path: Path) -> None:
    given = {"num_train_epochs": 0, "max_steps": 5}
    assert training_arguments(given, tmp_path, "f1").max_steps == 5
    with pytest.raises(ConfigError, match="--epochs"):
        training_arguments({"num_train_epochs": 0.0}, tmp_path, "f1")


def test_the_table_at_the_top_tells_every_default() -> None:
    rows = dict(re.findall(r"^\| (\w+) \| (.+?) \|", training_fields.__doc__ or "", re.M))
    for name, value in DEFAULTS.items():
        shown = {0.02: "2 % of the steps", 2e-5: "2e-5"}.get(value, str(value))
        assert rows[name] == shown


def test_a_frozen_encoder_gets_a_rate_at_which_a_head_learns(tmp_path):
    def rate(training, **more):
        return training_arguments(training, tmp_path, "f1", **more).learning_rate

    assert rate({}) == 2e-5
    assert rate({}, head_only=True) == 1e-3
    assert rate({"learning_rate": 3e-5}, head_only=True) == 3e-5
