"""Labels as people write them become a task, names in order, and ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_fixtures import config, write_csv, write_jsonl

from memfit.data import LabelSpace, TextData, read_labelled, read_table
from memfit.errors import DataError
from memfit.i18n import speaking


def read(tmp_path: Path, labels: list[Any], **options: Any) -> TextData:
    """Twelve rows of every label, as JSON keeps the types."""
    rows = [{"text": f"text {n}", "label": label} for n, label in enumerate(labels * 12)]
    return read_table(config(write_jsonl(tmp_path / "a.jsonl", rows), **options))


def learned(data: TextData) -> list[Any]:
    """The labels of all rows in the order of the file."""
    rows = [*data.train, *data.validation]
    return [row["label"] for row in sorted(rows, key=lambda row: int(row["text"].split()[1]))]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([1, 0], ("0", "1")),
        ([10, 9, 2], ("2", "9", "10")),
        ([1.0, 0.0], ("0", "1")),
        (["1.0", "0.0"], ("0", "1")),
        (["01", 1, 1.0, "2"], ("1", "2")),
        ([True, False], ("False", "True")),
        (["pos", "neg", " pos "], ("neg", "pos")),
        (["负面", "正面"], ("正面", "负面")),
        ([0, "unknown", 1], ("0", "1", "unknown")),
        ([-1, 0, 1], ("-1", "0", "1")),
        (["nan", "inf"], ("inf", "nan")),
        ([12345678901234567890, 12345678901234567891],
         ("12345678901234567890", "12345678901234567891")),
        (["1e3", "5"], ("5", "1000")),
    ],
)  # fmt: skip
def test_numbers_keep_their_order_and_words_are_sorted(
    tmp_path: Path, labels: list[Any], names: tuple[str, ...]
) -> None:
    data = read(tmp_path, labels)
    assert data.labels == LabelSpace("single_label", names)
    assert set(learned(data)) == set(range(len(names)))


def test_the_ids_follow_the_labels_of_the_rows(tmp_path: Path) -> None:
    assert learned(read(tmp_path, ["b", "a", "c"]))[:3] == [1, 0, 2]


def test_label_names_replace_labels_and_keep_the_order(tmp_path: Path) -> None:
    data = read(tmp_path, [1, 0], label_names={"1": "正評", "0": "負評"})
    assert data.labels.names == ("負評", "正評")
    assert data.labels.id2label == {0: "負評", 1: "正評"}
    assert data.labels.label2id == {"負評": 0, "正評": 1}
    assert data.labels.problem_type == "single_label_classification"
    assert data.labels.num_labels == 2
    assert learned(data)[:2] == [1, 0]


@pytest.mark.parametrize(
    ("labels", "label_names", "names"),
    [
        ([1, 0], {"1.0": "good"}, ("0", "good")),
        ([True, False], {"true": "yes", "FALSE": "no"}, ("no", "yes")),
        (["a", "b"], {" b ": "B!"}, ("a", "B!")),
        ([1, 0], {0: "bad", 1: "good"}, ("bad", "good")),
    ],
)
def test_label_names_are_matched_as_people_write_them(
    tmp_path: Path, labels: list[Any], label_names: dict[Any, str], names: tuple[str, ...]
) -> None:
    assert read(tmp_path, labels, label_names=label_names).labels.names == names


def test_fractions_are_regression(tmp_path: Path) -> None:
    data = read(tmp_path, [0.5, 2, "3.25"])
    assert data.labels == LabelSpace("regression", ("label",))
    assert data.labels.problem_type == "regression"
    assert learned(data)[:3] == [0.5, 2.0, 3.25]
    assert data.train.features["label"].dtype == "float32"
    assert data.counts.train_class_counts == {}


def test_whole_numbers_are_regression_when_named(tmp_path: Path) -> None:
    assert learned(read(tmp_path, [1, 2, 5], task="regression"))[:3] == [1.0, 2.0, 5.0]


def test_fractions_are_classes_when_named(tmp_path: Path) -> None:
    data = read(tmp_path, ["0.5", "1.5"], task="single_label", label_names={"0.5": "half"})
    assert data.labels.names == ("half", "1.5")


def test_regression_takes_more_different_numbers_than_there_may_be_classes(tmp_path: Path) -> None:
    rows = [(n + 0.5, f"text {n}") for n in range(10_050)]
    data = read_table(config(write_csv(tmp_path / "a.csv", rows)))
    assert data.labels.task == "regression"
    assert data.counts.validation_rows == 1005


LISTS = [["red", "blue"], ["blue"], [], ["green", "red"]]
VECTORS = [[1.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 1.0]]


def test_lists_are_multi_label(tmp_path: Path) -> None:
    data = read(tmp_path, LISTS)
    assert data.labels == LabelSpace("multi_label", ("blue", "green", "red"))
    assert data.labels.problem_type == "multi_label_classification"
    assert learned(data)[:4] == VECTORS
    assert data.train.features["label"].feature.dtype == "float32"
    total = {
        name: data.counts.train_class_counts[name] + count
        for name, count in data.counts.validation_class_counts.items()
    }
    assert total == {"blue": 24, "green": 12, "red": 24}


@pytest.mark.parametrize("separator", ["|", ";", ","])
def test_joined_labels_are_multi_label(tmp_path: Path, separator: str) -> None:
    joined = [separator.join(labels) or separator for labels in LISTS]
    named = {} if separator == "|" else {"task": "multi_label"}
    data = read(tmp_path, joined, **named)
    assert data.labels == LabelSpace("multi_label", ("blue", "green", "red"))
    assert learned(data)[:4] == VECTORS


def test_joined_numbers_keep_their_order(tmp_path: Path) -> None:
    assert read(tmp_path, ["10|9", "2"]).labels.names == ("2", "9", "10")


def test_a_bar_inside_a_word_is_kept_when_single_label_is_named(tmp_path: Path) -> None:
    assert read(tmp_path, ["a|b", "c"], task="single_label").labels.names == ("a|b", "c")


def test_vectors_of_zeros_and_ones_are_multi_label(tmp_path: Path) -> None:
    vectors = [[0, 1, 1], [1, 0, 1], [0, 0, 0]]
    data = read(tmp_path, vectors, label_names={"2": "last"})
    assert data.labels.names == ("0", "1", "last")
    assert learned(data)[:3] == vectors


def test_several_columns_of_zeros_and_ones_are_multi_label(tmp_path: Path) -> None:
    rows = [(f"text {n}", n % 2, "true", ("", "1.0", "0")[n % 3]) for n in range(30)]
    path = write_csv(tmp_path / "a.csv", rows, header=("text", "a", "b", "c"))
    data = read_table(config(path, label_column="a,b,c"))
    assert data.labels == LabelSpace("multi_label", ("a", "b", "c"))
    assert data.counts.dropped_no_label == 10
    assert learned(data)[:2] == [[1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
    assert data.counts.label_column == "a,b,c"


def test_a_rare_label_of_a_multi_label_table_is_always_trained(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": ["a", "b"][: 1 + n % 2]} for n in range(60)]
    rows[7]["label"] = ["rare"]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    for seed in range(12):
        data = read_table(config(path, seed=seed, validation_split=0.5))
        assert data.counts.train_class_counts["rare"] == 1


@pytest.mark.parametrize(
    ("labels", "options", "sentence"),
    [
        ([1], {}, "one class only, every label in 'label' is '1'"),
        ([["x"]], {}, "one class only"),
        ([[], []], {}, "every label in 'label' is 'none at all'"),
        ([2.5], {}, "every label in 'label' is 2.5; there is nothing to learn"),
        (["a", "b"], {"task": "regression"}, "regression needs numbers and one label is 'a'"),
        ([[1, 2]], {"task": "regression"}, "regression needs one number a row and finds lists"),
        ([1.5, 2], {"label_names": {"1": "x"}}, "label_names has no meaning for regression"),
        ([["a"], ["a", "b"]], {"task": "single_label"}, "finds lists of 1 to 2; give task=multi"),
        (["no", "yes"], {"label_names": {"yess": "x"}},
         r"label_names names 'yess', which does not occur; the labels are no, yes. "
         r"Did you mean 'yes'\?"),
        ([0, 1], {"label_names": {"2": "x"}}, "names '2', which does not occur"),
        ([0, 1], {"label_names": {"0": "x", "1": "x"}}, "gives two labels the name 'x'"),
    ],
)  # fmt: skip
def test_labels_that_cannot_be_learned_are_explained(
    tmp_path: Path, labels: list[Any], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        read(tmp_path, labels, **options)


def test_label_columns_with_other_values_than_zero_and_one_are_refused(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [("x", 1, 2)], header=("text", "a", "b"))
    with pytest.raises(DataError, match="column 'b' holds '2'; several label columns must hold"):
        read_table(config(path, label_column="a,b"))


def test_more_labels_than_classes_can_be_are_refused(tmp_path: Path) -> None:
    rows = [(f"label {n}", f"text {n}") for n in range(10_001)]
    with pytest.raises(DataError, match="more than 10,000 different labels; name the right"):
        read_table(config(write_csv(tmp_path / "a.csv", rows)))


def test_declared_names_keep_their_ids_and_hidden_labels_are_dropped(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["pos", "neg", "no"])})
    rows = {"text": [f"text {n}" for n in range(21)], "label": [n % 2 for n in range(20)] + [-1]}
    path = tmp_path / "a.parquet"
    Dataset.from_dict(rows, features).to_parquet(path)
    data = read_table(config(path, label_names={"0": "good", "neg": "bad"}))
    assert data.labels.names == ("good", "bad", "no")
    assert data.counts.dropped_no_label == 1
    assert data.counts.train_class_counts == {"good": 9, "bad": 9, "no": 0}
    assert learned(data)[:2] == [0, 1]


def test_declared_names_inside_lists_are_multi_label(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, List, Value

    features = Features({"text": Value("string"), "labels": List(ClassLabel(names=["b", "a"]))})
    rows = {"text": [f"text {n}" for n in range(20)], "labels": [[0], [0, 1]] * 10}
    path = tmp_path / "a.parquet"
    Dataset.from_dict(rows, features).to_parquet(path)
    data = read_table(config(path))
    assert data.labels == LabelSpace("multi_label", ("b", "a"))
    assert learned(data)[:2] == [[1.0, 0.0], [1.0, 1.0]]


MODEL = LabelSpace("single_label", ("負評", "正評"))


@pytest.mark.parametrize(
    ("labels", "label_names"),
    [
        (["正評", "負評"], {}),
        ([1, 0], {"1": "正評", "0": "負評"}),
        (["1.0", "0.0"], {"1": "正評", "0": "負評"}),
        (["good", "bad"], {"good": "正評", "bad": "負評"}),
        ([5, 1], {"5": "正評", "1": "負評"}),
    ],
)
def test_an_existing_models_labels_are_met_by_name_or_by_translation(
    tmp_path: Path, labels: list[Any], label_names: dict[str, str]
) -> None:
    rows = [{"text": f"text {n}", "label": label} for n, label in enumerate(labels * 2)]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, {"text": " ", "label": 1}])
    dataset, counts = read_labelled(config(path, label_names=label_names), MODEL)
    assert dataset["label"][:] == [1, 0, 1, 0]
    assert (counts.rows_read, counts.validation_rows, counts.dropped_no_text) == (5, 4, 1)
    assert counts.validation_class_counts == {"負評": 2, "正評": 2}


def test_numbers_are_ids_only_of_labels_without_names(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [(1, "x"), (0, "y")])
    unnamed = LabelSpace("single_label", ("LABEL_0", "LABEL_1"))
    assert read_labelled(config(path), unnamed)[0]["label"][:] == [1, 0]
    words = LabelSpace("single_label", ("address", "app", "price"))
    said = r"labels are numbers \(0, 1\) and the model's are words .* --label-names 0=address 1=app"
    with pytest.raises(DataError, match=said):
        read_labelled(config(path), words)


def test_labels_that_differ_only_in_case_are_not_two_classes(tmp_path: Path) -> None:
    labels = ["positive", " Positive ", "negative"]
    with pytest.raises(DataError, match="'Positive' and 'positive' differ only in case or spaces"):
        read(tmp_path, labels)
    merged = read(tmp_path, labels, label_names={"Positive": "positive"})
    assert merged.labels.names == ("positive", "negative")
    assert learned(merged)[:3] == [0, 0, 1]
    apart = read(tmp_path, labels, label_names={"Positive": "very positive"})
    assert apart.labels.names == ("very positive", "negative", "positive")


def test_an_empty_cell_of_several_labels_is_a_row_without_any(tmp_path: Path) -> None:
    data = read(tmp_path, ["a|b", "", "b"])
    assert (data.labels.task, data.counts.dropped_no_label) == ("multi_label", 0)
    assert learned(data)[:3] == [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    assert read(tmp_path, ["a", "", "b"]).counts.dropped_no_label == 12
    path = write_jsonl(tmp_path / "b.jsonl", [{"text": "x", "label": ""}])
    space = LabelSpace("multi_label", ("a", "b"))
    assert read_labelled(config(path), space)[0]["label"][:] == [[0.0, 0.0]]


def test_one_class_is_enough_to_evaluate(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [("正評", "x")])
    assert read_labelled(config(path), MODEL)[0]["label"][:] == [1]


@pytest.mark.parametrize(
    ("space", "labels", "expected"),
    [
        (LabelSpace("multi_label", ("a", "b")), ["a|b", "b"], [[1.0, 1.0], [0.0, 1.0]]),
        (LabelSpace("multi_label", ("a", "b")), [[0, 0], [0, 1]], [[0.0, 0.0], [0.0, 1.0]]),
        (LabelSpace("multi_label", ("a", "b")), [["b"], ["a"]], [[0.0, 1.0], [1.0, 0.0]]),
        (LabelSpace("regression", ("score",)), [1, "2"], [1.0, 2.0]),
    ],
)
def test_other_tasks_are_evaluated_too(
    tmp_path: Path, space: LabelSpace, labels: list[Any], expected: list[Any]
) -> None:
    rows = [{"text": "x", "label": label} for label in labels]
    dataset, _ = read_labelled(config(write_jsonl(tmp_path / "a.jsonl", rows)), space)
    assert dataset["label"][:] == expected


@pytest.mark.parametrize(
    ("label", "label_names", "sentence"),
    [
        ("好評", {}, "the label '好評' does not occur in the model, which has 負評, 正評"),
        (2, {}, "the label '2' does not occur in the model"),
        (1, {"1": "正平"}, r"the model has no label '正平', only 負評, 正評"),
    ],
)
def test_labels_the_model_does_not_know_are_refused(
    tmp_path: Path, label: Any, label_names: dict[str, str], sentence: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": label}])
    with pytest.raises(DataError, match=sentence):
        read_labelled(config(path, label_names=label_names), MODEL)


def test_a_label_the_model_does_not_know_is_refused_in_chinese_alone(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": "好評"}])
    with speaking("zh"), pytest.raises(DataError, match="标签 '好評' 是未知的（模型：負評"):
        read_labelled(config(path), MODEL)
