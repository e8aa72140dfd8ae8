"""Metrics against numbers worked out by hand."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import transformers

from memfit.errors import ConfigError, DataError, MemfitError
from memfit.records import evaluation

EvalPrediction = namedtuple("EvalPrediction", "predictions label_ids")


@dataclass(frozen=True)
class Space:
    task: str
    names: tuple[str, ...]


BINARY = Space("single_label", ("負評", "正評"))


def one_hot(ids: list[int], classes: int) -> np.ndarray:
    return np.eye(classes)[ids]


def test_two_classes_score_the_positive_class() -> None:
    # truth 1 1 1 0 0, said 1 1 0 1 0: tp 2, fp 1, fn 1, tn 1
    result = evaluation.evaluate_predictions(
        one_hot([1, 1, 0, 1, 0], 2), np.array([1, 1, 1, 0, 0]), BINARY
    )
    assert result.metrics == pytest.approx(
        {"accuracy": 3 / 5, "f1": 2 / 3, "precision": 2 / 3, "recall": 2 / 3}
    )
    assert (result.averaging, result.positive, result.rows) == ("binary", "正評", 5)
    assert result.confusion == ((1, 1), (1, 2))
    negative = result.classes[0]
    assert (negative.name, negative.precision, negative.recall, negative.rows) == (
        "負評",
        0.5,
        0.5,
        2,
    )


def test_three_classes_are_averaged_over_classes() -> None:
    # truth 0 0 1 1 2, said 0 1 1 1 0: F1 0.5, 0.8, 0
    space = Space("single_label", ("a", "b", "c"))
    result = evaluation.evaluate_predictions(
        one_hot([0, 1, 1, 1, 0], 3), np.array([0, 0, 1, 1, 2]), space
    )
    assert result.averaging == "macro"
    assert [row.f1 for row in result.classes] == pytest.approx([0.5, 0.8, 0.0])
    assert result.metrics["f1"] == pytest.approx(1.3 / 3)
    assert result.metrics["recall"] == pytest.approx((0.5 + 1.0 + 0.0) / 3)


def test_a_class_that_never_occurs_does_not_lower_the_mean() -> None:
    space = Space("single_label", ("a", "b", "never"))
    result = evaluation.evaluate_predictions(one_hot([0, 1], 3), np.array([0, 1]), space)
    assert result.metrics["f1"] == 1.0
    assert len(result.classes) == 3


def test_several_labels_count_every_decision() -> None:
    # decisions: tp 2 (a, b), fp 1 (b), fn 1 (a); rows wholly right: 1 of 3
    logits = np.array([[3.0, -2.0], [-1.0, 2.0], [-0.5, 0.5]])
    labels = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    result = evaluation.evaluate_predictions(logits, labels, Space("multi_label", ("a", "b")))
    assert result.averaging == "micro"
    assert result.metrics == pytest.approx(
        {"accuracy": 1 / 3, "f1": 2 / 3, "f1_macro": 2 / 3, "precision": 2 / 3, "recall": 2 / 3}
    )
    assert [(row.precision, row.recall, row.rows) for row in result.classes] == [
        (1.0, 0.5, 2),
        (0.5, 1.0, 1),
    ]


def test_regression_scores_values_of_a_column() -> None:
    result = evaluation.evaluate_predictions(
        np.array([[1.0], [2.0], [5.0]]), np.array([1.0, 3.0, 4.0]), Space("regression", ("value",))
    )
    # errors 0, -1, 1; variance of 1 3 4 is 14/9
    assert result.metrics["mse"] == pytest.approx(2 / 3)
    assert result.metrics["mae"] == pytest.approx(2 / 3)
    assert result.metrics["r2"] == pytest.approx(1 - (2 / 3) / (14 / 9))
    assert result.metrics["pearson"] == pytest.approx(np.corrcoef([1, 2, 5], [1, 3, 4])[0, 1])


def test_regression_of_constant_values_leaves_undefined_metrics_out() -> None:
    result = evaluation.evaluate_predictions(
        np.array([1.0, 2.0]), np.array([2.0, 2.0]), Space("regression", ("value",))
    )
    assert result.metrics == {"mse": 0.5, "mae": 0.5}


def test_a_diverged_model_is_not_scored() -> None:
    logits = np.array([[np.nan, 1.0], [0.0, 1.0]])
    with pytest.raises(MemfitError, match="1 of 2 rows with NaN"):
        evaluation.evaluate_predictions(logits, np.array([0, 1]), BINARY)


def test_a_label_the_model_does_not_know_is_an_error() -> None:
    with pytest.raises(DataError, match="label id 5, but the model knows only 0 to 1"):
        evaluation.evaluate_predictions(one_hot([0, 1], 2), np.array([0, 5]), BINARY)
    with pytest.raises(DataError, match="label id -100"):
        evaluation.evaluate_predictions(one_hot([0, 1], 2), np.array([0, -100]), BINARY)


def test_no_rows_is_an_error() -> None:
    with pytest.raises(DataError, match="no rows to evaluate"):
        evaluation.evaluate_predictions(np.zeros((0, 2)), np.zeros(0), BINARY)


def test_the_trainer_gets_the_same_numbers_also_from_a_tuple_of_outputs() -> None:
    compute = evaluation.compute_metrics_for("single_label", ["負評", "正評"])
    logits, labels = one_hot([1, 1, 0, 1, 0], 2), np.array([1, 1, 1, 0, 0])
    plain = compute(EvalPrediction(logits, labels))
    assert plain == dict(evaluation.evaluate_predictions(logits, labels, BINARY).metrics)
    assert compute(EvalPrediction((logits, np.zeros(3)), labels)) == plain
    beside = {"inputs": np.zeros((5, 3)), "losses": np.zeros(5)}  # --include-for-metrics
    assert compute(transformers.EvalPrediction(logits, labels, **beside)) == plain


@pytest.mark.parametrize("task", ["single_label", "multi_label", "regression"])
def test_the_metric_that_picks_the_best_checkpoint_is_among_the_metrics(task: str) -> None:
    labels = np.array([0, 1]) if task == "single_label" else np.eye(2)
    name, greater_is_better = evaluation.best_metric(task)
    metrics = evaluation.compute_metrics_for(task, ["a", "b"])(EvalPrediction(np.eye(2), labels))
    assert name in metrics
    assert greater_is_better == (task != "regression")


def test_an_evaluation_survives_json() -> None:
    result = evaluation.evaluate_predictions(one_hot([1, 0], 2), np.array([1, 0]), BINARY)
    again = evaluation.Evaluation.from_dict(json.loads(json.dumps(result.to_dict())))
    assert again == result


def test_probabilities_do_not_overflow() -> None:
    assert evaluation.probabilities(np.array([[1000.0, -1000.0]]), "single_label").tolist() == [
        [1.0, 0.0]
    ]
    sigmoid = evaluation.probabilities(np.array([[1000.0, -1000.0, 0.0]]), "multi_label")
    assert sigmoid.tolist() == [[1.0, 0.0, 0.5]]


def test_the_most_confident_mistake_comes_first() -> None:
    logits = np.array([[0.0, 1.0], [0.0, 4.0], [3.0, 0.0], [2.0, 0.0]])
    labels = np.array([0, 0, 0, 1])
    found = evaluation.worst_mistakes(logits, labels, BINARY, ["slightly", "badly", "right", "bad"])
    assert [m.text for m in found] == ["badly", "bad", "slightly"]
    assert (found[0].expected, found[0].predicted) == ("負評", "正評")
    assert found[0].score == pytest.approx(1 / (1 + np.exp(-4)))
    assert len(evaluation.worst_mistakes(logits, labels, BINARY, ["a"] * 4, limit=1)) == 1


def test_mistakes_of_other_tasks() -> None:
    several = evaluation.worst_mistakes(
        np.array([[3.0, -3.0], [3.0, -1.0]]),
        np.array([[1.0, 0.0], [0.0, 1.0]]),
        Space("multi_label", ("a", "b")),
        ["right", "wrong"],
    )
    assert [(m.text, m.expected, m.predicted) for m in several] == [("wrong", "b", "a")]
    values = evaluation.worst_mistakes(
        np.array([[1.0], [9.0]]), np.array([1.5, 2.0]), Space("regression", ("value",)), ["x", "y"]
    )
    assert [(m.text, m.expected, m.predicted) for m in values] == [
        ("y", "2", "9"),
        ("x", "1.5", "1"),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "f1",
        "evaluate-main/metrics/f1/f1.py",
        "evaluate-main\\metrics\\f1\\f1.py",
        "evaluate-main/metrics/f1",
    ],
)
def test_metrics_load_by_name_or_by_the_path_of_their_script(name: str) -> None:
    result = evaluation.load(name).compute(predictions=[1, 1, 0, 1], references=[1, 1, 1, 0])
    assert result == {"f1": pytest.approx(2 / 3)}


def test_every_named_metric_computes() -> None:
    values = {
        name: evaluation.load(name).compute(predictions=[1, 1, 0, 1, 0], references=[1, 1, 1, 0, 0])
        for name in ("accuracy", "f1", "precision", "recall", "mse", "mae")
    }
    assert values["accuracy"] == {"accuracy": 0.6}
    assert values["precision"] == {"precision": pytest.approx(2 / 3)}
    assert values["recall"] == {"recall": pytest.approx(2 / 3)}
    assert values["mse"] == {"mse": pytest.approx(0.4)}
    assert values["mae"] == {"mae": pytest.approx(0.4)}


def test_averages_pass_through_and_none_gives_one_value_a_class() -> None:
    f1 = evaluation.load("f1")
    said, truth = np.array([0, 1, 1, 1, 0]), np.array([0, 0, 1, 1, 2])
    assert f1.compute(predictions=said, references=truth, average="macro")["f1"] == pytest.approx(
        1.3 / 3
    )
    each = f1.compute(predictions=said, references=truth, average=None)["f1"]
    assert each.tolist() == pytest.approx([0.5, 0.8, 0.0])


def test_binary_f1_of_three_classes_says_what_to_choose() -> None:
    with pytest.raises(ConfigError, match=r"cannot compute f1: .*average"):
        evaluation.load("f1").compute(predictions=[0, 1, 2], references=[0, 1, 2])


def test_an_unknown_metric_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"known are accuracy, f1.*Did you mean 'accuracy'\?"):
        evaluation.load("acuracy")
