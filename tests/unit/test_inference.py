"""The trained classifier: answers, their order, batches, and models that are not there."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memfit.errors import ConfigError, DataError, ModelError, OutputError
from memfit.records.results import RunSummary, write_summary
from memfit.run.inference import Classifier, token_batches
from memfit.waiting import telling
from waits import without_waits

TEXTS = [
    "服務人員都很親切",
    "房間很髒，空調太吵，再也不會來了",
    "好",
    "位置方便，早餐好吃，價格也不貴" * 3,
    "早餐",
]


@pytest.fixture(scope="module")
def classifier(tiny_model_dir: Path) -> Classifier:
    return Classifier.load(tiny_model_dir)


def alone(classifier: Classifier, text: str) -> np.ndarray:
    """The model's logits for one text without padding, by the plainest way there is."""
    encoded = classifier.tokenizer(
        text, truncation=True, max_length=classifier.max_length, return_tensors="pt"
    )
    with torch.inference_mode():
        return classifier.model(**encoded).logits[0].numpy()


@pytest.fixture
def variant(tiny_model_dir: Path, tmp_path: Path) -> Any:
    """A copy of the tiny model with a changed config.json."""

    def make(**changes: Any) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(tiny_model_dir, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    return make


@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_answers_are_in_order_and_the_same_for_every_batch_size(
    classifier: Classifier, batch_tokens: int
) -> None:
    logits = classifier.logits(TEXTS, batch_tokens=batch_tokens)
    expected = np.stack([alone(classifier, text) for text in TEXTS])
    np.testing.assert_allclose(logits, expected, atol=1e-6)


def test_more_texts_than_one_chunk_stay_in_order(
    classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = classifier.logits(TEXTS)
    monkeypatch.setattr("memfit.run.inference.CHUNK_TEXTS", 2)
    np.testing.assert_allclose(classifier.logits(TEXTS), expected, atol=1e-6)


def test_answers_equal_those_of_the_pipeline(classifier: Classifier, tiny_model_dir: Path) -> None:
    from transformers import pipeline

    expected = pipeline("text-classification", str(tiny_model_dir))(TEXTS[:2])
    answers = classifier.predict(TEXTS[:2])
    assert [answer.label for answer in answers] == [item["label"] for item in expected]
    assert [answer.score for answer in answers] == pytest.approx(
        [item["score"] for item in expected], abs=1e-5
    )
    assert set(answers[0].scores) == {"負評", "正評"}
    assert sum(answers[0].scores.values()) == pytest.approx(1.0)


def test_one_text_one_pair_or_a_list_of_either(classifier: Classifier) -> None:
    one = classifier.predict(TEXTS[0])
    assert one == classifier.predict([TEXTS[0]])
    pair = (TEXTS[0], TEXTS[2])
    assert classifier.predict(pair) == classifier.predict([pair])
    assert classifier.predict(pair)[0].score != pytest.approx(one[0].score, abs=1e-7)
    assert classifier.predict([]) == []


@pytest.mark.parametrize("bad", [["好", ("a", "b")], ["好", None], [3], [("a", "b", "c")]])
def test_what_is_no_text_is_an_error(classifier: Classifier, bad: list[Any]) -> None:
    with pytest.raises(DataError, match="text"):
        classifier.predict(bad)


def test_batches_hold_the_longest_first_within_the_tokens() -> None:
    lengths = [3, 10, 1, 10, 4, 2]
    batches = list(token_batches(lengths, 12))
    assert batches == [[1], [3], [4, 0, 5], [2]]
    assert all(len(rows) * lengths[rows[0]] <= 12 for rows in batches)
    assert list(token_batches([50], 12)) == [[0]]
    assert list(token_batches([], 12)) == []


def test_long_texts_are_cut_where_the_training_cut_them(variant: Any) -> None:
    folder = variant()
    assert Classifier.load(folder).max_length == 64  # the model's positions
    write_summary(folder, RunSummary(model="m", task="single_label", lengths={"max_length": 16}))
    trained = Classifier.load(folder)
    assert trained.max_length == 16
    assert trained.predict("好" * 200) == trained.predict("好" * 14)
    assert Classifier.load(folder, max_length=20).max_length == 20
    with pytest.raises(ConfigError, match="max_length 65 is beyond the 64 positions"):
        Classifier.load(folder, max_length=65)


def test_several_labels_are_those_from_one_half_on(variant: Any) -> None:
    several = Classifier.load(variant(problem_type="multi_label_classification"))
    assert several.labels.task == "multi_label"
    chances = np.array([[0.7, 0.5], [0.2, 0.4]])
    both, neither = several.predictions(np.log(chances / (1 - chances)))
    assert (both.label, both.labels) == ("負評|正評", ("負評", "正評"))
    assert both.scores == pytest.approx({"負評": 0.7, "正評": 0.5})
    assert (neither.label, neither.score) == ("", pytest.approx(0.4))
    logits = several.logits(["好"])
    sigmoid = 1 / (1 + np.exp(-logits[0]))
    assert list(several.predict("好")[0].scores.values()) == pytest.approx(sigmoid.tolist())


def test_a_regression_answers_with_its_value(tiny_model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    config = AutoConfig.from_pretrained(tiny_model_dir, num_labels=1, problem_type="regression")
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path)
    model = Classifier.load(tmp_path)
    value = float(model.logits(["好"])[0, 0])
    answer = model.predict("好")[0]
    assert model.labels.task == "regression"
    assert (answer.label, answer.score) == (f"{value:.6g}", pytest.approx(value))


def test_evaluate_scores_the_answers(classifier: Classifier) -> None:
    said = classifier.logits(TEXTS).argmax(axis=1)
    assert classifier.evaluate(TEXTS, said).metrics["accuracy"] == 1.0
    assert classifier.evaluate(TEXTS, 1 - said).metrics["accuracy"] == 0.0


def test_evaluate_takes_labels_by_name(classifier: Classifier) -> None:
    said = [answer.label for answer in classifier.predict(TEXTS)]
    assert classifier.evaluate(TEXTS, said).metrics["accuracy"] == 1.0
    other = dict(zip(classifier.labels.names, reversed(classifier.labels.names), strict=True))
    swapped = [other[name] for name in said]
    assert classifier.evaluate(TEXTS, np.array(swapped)).metrics["accuracy"] == 0.0


def test_evaluate_takes_lists_of_names_for_several_labels(variant: Any) -> None:
    several = Classifier.load(variant(problem_type="multi_label_classification"), device="cpu")
    both = several.labels.names
    for given in ([[both[1]], list(both), [], [both[0]], []], [[] for _ in TEXTS]):
        ids = [[float(name in names) for name in both] for names in given]
        assert several.evaluate(TEXTS, given).metrics == several.evaluate(TEXTS, ids).metrics


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["正評", "正平"], "正平"),
        (["正評", None], "text 2 has no label"),
        (["正評"], "2 texts and 1 labels"),
    ],
)
def test_labels_the_model_lacks_or_too_few_are_an_error(
    classifier: Classifier, labels: list[Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        classifier.evaluate(TEXTS[:2], labels)


def test_half_precision_weights_run_in_full_on_a_cpu_unless_asked(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    shutil.copytree(tiny_model_dir, tmp_path, dirs_exist_ok=True)
    half = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path)
    assert Classifier.load(tmp_path).model.dtype == torch.float32
    asked = Classifier.load(tmp_path, dtype="bfloat16")
    assert asked.model.dtype == torch.bfloat16
    assert asked.logits(["好"]).dtype == np.float32
    with pytest.raises(ConfigError, match=r"dtype is 'float8'.*Did you mean 'float"):
        Classifier.load(tmp_path, dtype="float8")


def test_a_device_that_is_not_there_is_an_error(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="the device 'cuda:9' cannot be used"):
        Classifier.load(tiny_model_dir, device="cuda:9")
    with pytest.raises(ConfigError, match="'gpu' cannot be used"):
        Classifier.load(tiny_model_dir, device="gpu")


# --- models that are not there -------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", r"no config\.json"),
        ("model.safetensors", r"no weights; it needs model\.safetensors"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_a_folder_that_lacks_a_part_says_which(variant: Any, missing: str, message: str) -> None:
    folder = variant()
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=message):
        Classifier.load(folder)


def test_an_unfinished_run_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(ModelError, match="has not finished; continue it with memfit train"):
        Classifier.load(tmp_path)
    state = tmp_path / "checkpoints" / "checkpoint-30" / "trainer_state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    with pytest.raises(ModelError, match=r"name a checkpoint of it \(.*checkpoint-30\)"):
        Classifier.load(tmp_path)


def test_weights_that_are_cut_off_are_an_error(variant: Any) -> None:
    folder = variant()
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ModelError, match="cannot load the model"):
        Classifier.load(folder)


@pytest.mark.parametrize("name", ["./nowhere", "no/such/model", "someone/no-such-model"])
def test_a_model_that_is_nowhere_is_an_error(name: str) -> None:
    with pytest.raises(ModelError, match=r"no (model )?folder"):
        Classifier.load(name)


def test_a_model_without_a_trained_head_is_not_used(
    tiny_model_dir: Path, tmp_path: Path, variant: Any
) -> None:
    """Random answers would look like answers."""
    from transformers import AutoModel, AutoTokenizer

    with pytest.raises(ModelError, match="no trained classifier, only BertForMaskedLM"):
        Classifier.load(variant(architectures=["BertForMaskedLM"]))
    AutoModel.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"weights without classifier\.bias"):
        Classifier.load(tmp_path / "base")


# --- files ---------------------------------------------------------------------------------


def read_csv(path: Path, delimiter: str = ",") -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def test_a_file_keeps_its_rows_and_gains_label_and_score(
    classifier: Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.run.file_predictions.CPU_WINDOW_ROWS", 2)
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_bytes(
        'id,review\n1,好\n2,"早餐,\n""難吃"""\n3,  \n4,服務人員都很親切\n'.encode("gb18030")
    )
    done = classifier.predict_file(source, target)
    assert (done.path, done.rows, done.empty_rows) == (target, 4, 1)
    rows = read_csv(target)
    assert [row["id"] for row in rows] == ["1", "2", "3", "4"]
    assert rows[1]["review"] == '早餐,\n"難吃"'
    expected = classifier.predict(["好", '早餐,\n"難吃"', "服務人員都很親切"])
    got = [row for row in rows if row["id"] != "3"]
    assert [row["label"] for row in got] == [answer.label for answer in expected]
    assert [float(row["score"]) for row in got] == pytest.approx(
        [answer.score for answer in expected], abs=1e-6
    )
    assert (rows[2]["label"], rows[2]["score"]) == ("", "")
    assert target.read_bytes().startswith(b"\xef\xbb\xbfid,review")  # what Excel goes by


def test_a_label_column_of_the_input_is_not_overwritten(
    classifier: Classifier, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_text("label,text\n正評,好\n", encoding="utf-8")
    done = classifier.predict_file(tmp_path / "in.csv", tmp_path / "out.csv")
    assert (done.label_column, done.score_column) == ("predicted_label", "predicted_score")
    assert read_csv(tmp_path / "out.csv")[0]["label"] == "正評"


def test_json_lines_and_pairs_to_tsv_and_json_lines(classifier: Classifier, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"sentence1": "好", "sentence2": "早餐", "tags": ["a", "b"]},
        {"sentence1": "好", "sentence2": ""},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    classifier.predict_file(source, tmp_path / "out.tsv")
    first, second = read_csv(tmp_path / "out.tsv", "\t")
    assert first["label"] == classifier.predict(("好", "早餐"))[0].label
    assert first["tags"] == '["a", "b"]'
    assert second["label"] == ""
    classifier.predict_file(source, tmp_path / "out.jsonl", text_column="sentence2")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert lines[0]["tags"] == ["a", "b"]
    assert lines[0]["score"] == pytest.approx(classifier.predict("早餐")[0].score, abs=1e-6)


def test_a_file_that_fails_midway_leaves_the_old_output(
    classifier: Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.run.file_predictions.CPU_WINDOW_ROWS", 1)
    (tmp_path / "in.jsonl").write_text('{"text": "好"}\n{"text": "早餐"}\n[]\n', encoding="utf-8")
    (tmp_path / "in.csv").write_text("id,text\n1,好\n2,早餐,吃\n", encoding="utf-8")
    (tmp_path / "out.csv").write_text("old")
    for name in ("in.jsonl", "in.csv"):
        with pytest.raises(DataError, match="line 3"):
            classifier.predict_file(tmp_path / name, tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "in.jsonl", "out.csv"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("in.csv", "is the file the texts come from"),
        ("folder", "is a folder"),
        ("nowhere/out.csv", "there is no folder"),
        ("out.xlsx", r"cannot write \.xlsx files"),
    ],
)
def test_an_output_that_cannot_be_is_refused(
    classifier: Classifier, tmp_path: Path, target: str, message: str
) -> None:
    (tmp_path / "in.csv").write_text("text\n好\n", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match=message):
        classifier.predict_file(tmp_path / "in.csv", tmp_path / target)
    assert (tmp_path / "in.csv").read_text(encoding="utf-8") == "text\n好\n"


def test_inputs_that_cannot_be_are_refused(classifier: Classifier, tmp_path: Path) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    for text, message in (
        ("text\n", "no rows"),
        ("text,a,a\n好,1,2\n", "several columns are called 'a'"),
        ("x,y\n1,2\n", "no text column"),
    ):
        source.write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=message):
            classifier.predict_file(source, target)
    assert not target.exists()


def test_a_command_says_how_many_rows_a_second_and_others_are_told_nothing(
    classifier: Classifier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "texts.csv"
    table.write_text("text\n" + "\n".join(["早餐", " ", "好", "位置方便"]) + "\n", encoding="utf-8")
    with telling():
        classifier.evaluate(TEXTS, [0, 1, 0, 1, 0])
        classifier.predict_file(table, tmp_path / "out.csv")
        classifier.predict(TEXTS, progress=False)
    said = without_waits(capsys.readouterr().err).splitlines()
    form = r"{} rows in \d+(\.\d)? s, [\d,]+ rows/s"
    assert len(said) == 2
    assert re.fullmatch(form.format(5), said[0])
    assert re.fullmatch(form.format(4), said[1])
    classifier.evaluate(TEXTS, [0, 1, 0, 1, 0])
    assert capsys.readouterr().err == ""
