"""Which figure leads, from where on a text has a label, and what a run warns of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data_fixtures import config, reviews, write_csv
from transformers import AutoConfig, TrainerCallback, TrainerControl

import memfit
from memfit.cli import run
from memfit.config import RunConfig
from memfit.data import LabelSpace, LengthSummary, read_table
from memfit.data.labels import weights_of_classes
from memfit.errors import ConfigError, DataError, OutputError
from memfit.i18n import speaking
from memfit.records.evaluation import evaluate_predictions, probabilities, worst_mistakes
from memfit.records.results import (
    RunSummary,
    read_summary,
    trained_with_weights,
    write_summary,
)
from memfit.records.run_warnings import answer_warnings, data_warnings
from memfit.records.scoring import Scoring, kept_scoring, scoring_for
from memfit.report.formatting import averaging_sentence
from memfit.report.model_card import model_card
from memfit.run.callbacks import StopEarly

TWO = LabelSpace("single_label", ("投诉", "正常"))
COUNTS = {"正常": 1000, "投诉": 5}


def logits_of(probability: Any) -> np.ndarray:
    """Of two classes, from the probabilities of the first."""
    p = np.asarray(probability, dtype=float)
    return np.log(np.stack([p, 1 - p], axis=1))


@pytest.mark.parametrize(
    ("names", "counts", "positive", "why"),
    [
        (("差评", "好评"), {"差评": 40, "好评": 60}, "差评", "rarer"),
        (("差评", "好评"), {"差评": 60, "好评": 40}, "好评", "rarer"),
        (("正面", "负面"), {"正面": 50, "负面": 50}, "正面", "tie_called"),
        (("0", "1"), {"0": 50, "1": 50}, "1", "tie_called"),
        (("cat", "dog"), {"cat": 50, "dog": 50}, "dog", "tie_last"),
        (("cat", "dog"), {}, "dog", "name"),
    ],
)
def test_the_positive_class_is_the_rarer_one_then_the_one_called_so_then_the_last(
    names: tuple[str, str], counts: dict[str, int], positive: str, why: str
) -> None:
    scoring = scoring_for(LabelSpace("single_label", names), counts)
    assert (scoring.averaging, scoring.positive, scoring.why) == ("binary", positive, why)


def test_a_loaded_model_does_not_call_its_class_the_rarer_one_of_another_table() -> None:
    kept = scoring_for(TWO, {"正常": 60, "投诉": 40}).to_dict()
    loaded = kept_scoring(SimpleNamespace(memfit=kept), TWO)
    assert loaded is not None
    assert averaging_sentence(loaded.averaging, loaded.positive, loaded.why) == (
        "F1, precision and recall are those of 投诉, as in the training; --positive-label names "
        "another."
    )


def test_the_class_chosen_of_two_alike_is_given_its_reason() -> None:
    scoring = scoring_for(TWO, {"正常": 180, "投诉": 180})
    assert averaging_sentence(scoring.averaging, scoring.positive, scoring.why) == (
        "F1, precision and recall are those of 正常: both classes have equally many rows, and this "
        "one stands last; --positive-label names another."
    )


def test_a_strong_imbalance_lets_the_mean_lead_unless_a_class_was_named() -> None:
    assert scoring_for(TWO, {"正常": 100, "投诉": 10}).averaging == "binary"
    assert scoring_for(TWO, {"正常": 101, "投诉": 10}).averaging == "macro"
    assert scoring_for(TWO, COUNTS, positive="正常").averaging == "binary"
    assert scoring_for(LabelSpace("single_label", ("a", "b", "c"))).averaging == "macro"


def test_a_class_that_is_never_found_shows_in_the_first_figure() -> None:
    truth = np.array([1] * 100 + [0])
    result = evaluate_predictions(
        logits_of(np.full(101, 0.1)), truth, TWO, scoring_for(TWO, COUNTS)
    )
    assert next(iter(result.metrics)) == "f1"
    # 正常: precision 100/101, recall 1; 投诉: nothing.
    assert result.metrics["f1"] == pytest.approx((200 / 201) / 2)
    assert result.metrics["accuracy"] == pytest.approx(100 / 101)
    (warning,) = answer_warnings(result)
    assert warning.sentence == (
        "The model answers 正常 for every one of the 101 rows: 投诉 is never found."
    )
    named = evaluate_predictions(
        logits_of(np.full(101, 0.1)), truth, TWO, scoring_for(TWO, COUNTS, positive="投诉")
    )
    assert named.metrics["f1"] == 0.0


def test_the_metric_that_picks_the_best_model_is_the_first() -> None:
    def first(space: LabelSpace, leads: str | None = None) -> str:
        labels = np.array([0, 1]) if space.task == "single_label" else np.eye(2)
        scoring = scoring_for(space, leads=leads)
        return next(iter(evaluate_predictions(np.eye(2), labels, space, scoring).metrics))

    assert first(TWO) == "f1"
    assert first(TWO, "accuracy") == "accuracy"
    assert first(TWO, "loss") == "f1"
    assert first(LabelSpace("multi_label", ("a", "b"))) == "f1_macro"


def test_a_class_among_several_that_is_never_found_is_named() -> None:
    space = LabelSpace("single_label", ("a", "b", "c"))
    said = np.eye(3)[[0, 1, 1]]
    (warning,) = answer_warnings(evaluate_predictions(said, np.array([0, 1, 2]), space))
    assert warning.sentence == "Never found in the 3 rows: c."
    assert answer_warnings(evaluate_predictions(said, np.array([0, 1, 1]), space)) == ()
    nothing = evaluate_predictions(
        np.full((2, 2), -9.0), np.eye(2), LabelSpace("multi_label", ("a", "b"))
    )
    assert [one.kind for one in answer_warnings(nothing)] == ["no_labels"]


# ---- thresholds ----


def test_a_tuned_threshold_finds_what_one_half_does_not() -> None:
    scores = np.array([0.40, 0.30, 0.20, 0.10, 0.05, 0.02])
    truth = np.array([0, 0, 1, 0, 1, 1])
    plain = evaluate_predictions(
        logits_of(scores), truth, TWO, scoring_for(TWO, {"正常": 3, "投诉": 3}, positive="投诉")
    )
    assert plain.metrics["f1"] == 0.0
    rules = scoring_for(TWO, positive="投诉", threshold="auto")
    tuned = evaluate_predictions(logits_of(scores), truth, TWO, rules)
    # All cuts: 1/1 of 3, 2/2 of 3, 2/3, 3/4 of 3 right: F1 2/4, 4/5, 4/6, 6/7.
    assert tuned.metrics["f1"] == pytest.approx(6 / 7)
    assert tuned.threshold == pytest.approx((0.10 + 0.05) / 2)
    assert tuned.tuned
    assert [one.kind for one in answer_warnings(tuned)] == ["tuned"]
    kept = Scoring(positive="投诉", averaging="binary", threshold=tuned.threshold)
    again = evaluate_predictions(logits_of(scores), truth, TWO, kept)
    assert again.metrics == tuned.metrics
    wrong = worst_mistakes(logits_of(scores), truth, TWO, list("abcdef"), kept)
    assert [(one.text, one.predicted, one.score) for one in wrong] == [
        ("c", "投诉", pytest.approx(0.2))
    ]


def test_one_threshold_is_tuned_for_all_labels_of_a_row() -> None:
    space = LabelSpace("multi_label", ("a", "b"))
    scores = np.array([[0.4, 0.1], [0.1, 0.3], [0.1, 0.2]])
    truth = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    logits = np.log(scores / (1 - scores))
    tuned = evaluate_predictions(logits, truth, space, scoring_for(space, threshold="auto"))
    assert tuned.metrics["f1_macro"] == 1.0
    assert tuned.threshold == pytest.approx(0.25)
    assert probabilities(logits, "multi_label") == pytest.approx(scores)


def test_a_threshold_that_is_no_better_stays_at_one_half() -> None:
    rules = scoring_for(TWO, positive="投诉", threshold="auto")
    tuned = evaluate_predictions(logits_of([0.9, 0.1]), np.array([0, 1]), TWO, rules)
    assert tuned.threshold == 0.5


# ---- warnings about the data ----


def lengths(cut_rows: int) -> LengthSummary:
    return LengthSummary(
        count=90, mean=99.0, p50=70, p90=250, p99=510, max=2900, max_length=128,
        cut_rows=cut_rows, histogram=(),
    )  # fmt: skip


def test_a_table_without_faults_gets_no_warning(tmp_path: Path) -> None:
    data = read_table(config(write_csv(tmp_path / "a.csv", reviews(50))))
    assert data.counts.validation_class_counts == {"0": 20, "1": 20}
    assert data_warnings(data.counts, lengths(30)) == ()


def test_every_fault_of_a_table_is_said_with_what_to_do(tmp_path: Path) -> None:
    rows = [("正常", f"一切正常 {n}") for n in range(220)] + [
        ("投诉", f"我要投诉 {n}") for n in range(18)
    ]
    rows += [("正常", "味道很好"), ("投诉", "味道很好")]
    validation = [("正常", f"一切正常 {n}") for n in range(210, 240)] + [("投诉", "要求退款")]
    checked = write_csv(tmp_path / "b.csv", validation)
    table = write_csv(tmp_path / "a.csv", rows)
    data = read_table(config(table, validation_file=str(checked)))
    found = {one.kind: one for one in data_warnings(data.counts, lengths(31))}
    assert {kind: one.sentence for kind, one in found.items()} == {
        "imbalance": "正常 has 12 training rows for each one of 投诉 (19 rows).",
        "few_rows": "Fewer than 20 validation rows: 投诉 (1). Their figures rest on a few texts.",
        "contradictions": "2 rows have a text that other rows label differently.",
        "duplicates": "10 validation rows repeat a text that is also trained on, which flatters "
        "the figures.",
        "cut": "34% of the texts are longer than 128 tokens and lose their end.",
    }
    assert found["contradictions"].advice.endswith("begins: 味道很好")
    assert "--max-length 250" in found["cut"].advice
    assert "--class-weights balanced" in found["imbalance"].advice
    with speaking("zh"):
        said = [one.sentence + one.advice for one in found.values()]
    assert not any("rows" in one for one in said)


def test_weights_are_not_advised_where_they_are_set_or_the_class_is_not_rare() -> None:
    space = LabelSpace("single_label", ("a", "b", "c"))
    # 53 rows of a, found as b; 40 of b; 7 of c.
    truth = np.array([0] * 53 + [1] * 40 + [2] * 7)

    def advised(said: list[int], *, weighted: bool = False) -> str:
        logits = np.eye(3)[said]
        (one,) = answer_warnings(evaluate_predictions(logits, truth, space), weighted=weighted)
        return one.advice

    rare = [0] * 53 + [1] * 47
    assert advised([1] * 93 + [2] * 7) == "Train longer, or at another learning rate."
    assert "--class-weights balanced" in advised(rare)
    assert advised(rare, weighted=True) == "Train longer, or add rows of these classes."
    assert "--class-weights" not in advised([0] * 100, weighted=True)
    assert "--class-weights" not in advised([2] * 100)


def test_a_run_folder_tells_whether_its_classes_were_weighted(tmp_path: Path) -> None:
    assert not trained_with_weights(tmp_path)
    for training, expected in (({}, False), ({"class_weights": "a 1, b 5"}, True)):
        write_summary(tmp_path, RunSummary(model="m", task="single_label", training=training))
        assert trained_with_weights(tmp_path) is expected


def test_the_f1_of_the_large_class_is_not_to_be_looked_at(tmp_path: Path) -> None:
    rows = [("正常", f"正常 {n}") for n in range(300)] + [("投诉", f"投诉 {n}") for n in range(20)]
    counts = read_table(config(write_csv(tmp_path / "a.csv", rows))).counts

    def advised(positive: str, *, weighted: bool = False) -> str:
        scoring = scoring_for(TWO, COUNTS, positive=positive)
        found = data_warnings(counts, scoring=scoring, weighted=weighted)
        return next(one.advice for one in found if one.kind == "imbalance")

    assert advised("正常").startswith("Look at the figures of 投诉, not at accuracy")
    assert advised("投诉").startswith("Look at F1, not at accuracy. --class-weights balanced")
    assert "--class-weights" not in advised("正常", weighted=True)
    assert "--class-weights" not in advised("投诉", weighted=True)


def test_rows_of_several_labels_contradict_each_other_as_a_whole(tmp_path: Path) -> None:
    rows = [("a|b", "same"), ("a", "same"), ("b|a", "twice"), ("a|b", "twice")]
    rows += [("b", f"other {n}") for n in range(9)]
    counts = read_table(config(write_csv(tmp_path / "a.csv", rows))).counts
    assert (counts.contradicting_rows, counts.contradicting_example) == (2, "same")
    numbers = [(f"{n}.5", "same") for n in range(9)]
    counts = read_table(config(write_csv(tmp_path / "b.csv", numbers))).counts
    assert counts.contradicting_rows == 0


def test_a_longer_max_length_is_advised_only_where_the_model_reads_it(tmp_path: Path) -> None:
    counts = read_table(config(write_csv(tmp_path / "a.csv", reviews(50)))).counts

    def advice(most: int | None, length: int = 128) -> str:
        cut = dataclasses.replace(lengths(80), most_tokens=most, max_length=length)
        return data_warnings(counts, cut)[0].advice

    assert "--max-length 250, which nine in ten" in advice(None)
    assert "--max-length 250, which nine in ten" in advice(512)
    assert "--max-length 200, the most the model reads" in advice(200)
    assert advice(128).startswith("The model reads no more. Shorten the texts")


def test_words_the_vocabulary_lacks_are_told_before_training(tmp_path: Path) -> None:
    counts = read_table(config(write_csv(tmp_path / "a.csv", reviews(50)))).counts
    lacking = dataclasses.replace(lengths(0), unknown_share=0.65, unknown_example="房间很大")
    (found,) = data_warnings(counts, lacking)
    assert found.sentence.startswith("The model's vocabulary lacks 65% of the words")
    assert found.advice.endswith("One of them begins: 房间很大")
    assert data_warnings(counts, dataclasses.replace(lacking, unknown_share=0.02)) == ()


def test_warnings_survive_the_summary_and_unknown_ones_are_passed_over(tmp_path: Path) -> None:
    data = read_table(config(write_csv(tmp_path / "a.csv", reviews())))
    warnings = data_warnings(data.counts, lengths(80))
    write_summary(tmp_path, RunSummary(model="m", task="single_label", warnings=warnings))
    assert read_summary(tmp_path).warnings == warnings
    stored = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert [one["kind"] for one in stored["warnings"]] == ["few_rows", "cut"]
    assert stored["warnings"][1]["message"].startswith("89% of the texts")
    stored["warnings"].append({"kind": "of another version", "values": {}})
    assert RunSummary.from_dict(stored).warnings == warnings


# ---- a whole run ----


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_never_finds_the_rare_class_says_so_everywhere(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("正常", f"房间很大 {n}") for n in range(1000)] + [
        ("投诉", f"房间很脏 {n}") for n in range(5)
    ]
    table = write_csv(tmp_path / "a.csv", rows)
    options: dict[str, Any] = {"model": tiny_model_dir, "max_length": 16}
    options |= {"max_steps": 12, "learning_rate": 3e-3, "exact": True}
    result = memfit.finetune(table, output_dir=tmp_path / "run", quiet=True, **options)
    assert next(iter(result.metrics)) == "f1"
    assert result.metrics["f1"] < 0.5 < 0.98 < result.metrics["accuracy"]
    assert result.summary.training["best_by"] == "f1"
    kinds = [one.kind for one in result.summary.warnings]
    assert kinds == ["one_class", "imbalance", "few_rows", "unknown"]
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    first, second = page.index("投诉 is never found"), page.index("means over both classes")
    assert first < page.index('class="figures"') < second
    again = memfit.evaluate(tmp_path / "run", table)
    assert (again.averaging, again.positive, again.why) == ("macro", "投诉", "")
    named = memfit.evaluate(tmp_path / "run", table, positive_label="投诉")
    assert (named.metrics["f1"], named.why) == (0.0, "given")
    assert run(["evaluate", str(tmp_path / "run"), str(table), "--json"]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning["kind"] == "one_class"
    assert "投诉 is never found" in warning["message"]
    with pytest.raises(DataError, match=r"--positive-label names '投訴', which is no label here"):
        memfit.evaluate(tmp_path / "run", table, positive_label="投訴")


def test_a_positive_label_is_for_two_classes(tiny_model_dir: Path, tmp_path: Path) -> None:
    table = write_csv(tmp_path / "a.csv", [(n % 3, f"text {n}") for n in range(60)])
    with pytest.raises(ConfigError, match="for two classes, and there are 3 here"):
        memfit.finetune(
            table, output_dir=tmp_path / "run", model=tiny_model_dir, positive_label="2"
        )


# ---- what a run may be told ----


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("balanced", "balanced"),
        ("0=1,1=5", {"0": 1.0, "1": 5.0}),
        ("正常=1，投诉=2.5", {"正常": 1.0, "投诉": 2.5}),
        ({0: 1, "a,b=c": 3}, {"0": 1.0, "a,b=c": 3.0}),
    ],
)
def test_class_weights_are_written_in_several_ways_and_kept_in_the_file(
    given: Any, kept: Any, tmp_path: Path
) -> None:
    run = RunConfig.build(data="a.csv", model="m", class_weights=given, threshold="0.3")
    assert (run.class_weights, run.threshold) == (kept, 0.3)
    (tmp_path / "run.toml").write_text(run.to_toml(), encoding="utf-8")
    assert RunConfig.from_toml(tmp_path / "run.toml") == run


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("class_weights", "many"),
        ("class_weights", "a=-1"),
        ("class_weights", "a=0"),
        ("class_weights", {"a": float("nan")}),
        ("class_weights", [1, 2]),
        ("threshold", "1.5"),
        ("threshold", "half"),
        ("threshold", True),
        ("early_stopping", 0),
    ],
)
def test_what_is_no_weight_or_threshold_is_refused(option: str, value: Any) -> None:
    flag = "--" + option.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} is .*; write"):
        RunConfig.build(data="a.csv", model="m", **{option: value})


def test_balanced_classes_count_alike_in_sum() -> None:
    assert weights_of_classes("balanced", TWO, COUNTS, 1005, {}) == [100.5, 0.5025]
    several = LabelSpace("multi_label", ("a", "b", "c"))
    found = {"a": 10, "b": 50, "c": 0}
    assert weights_of_classes("balanced", several, found, 100, {}) == [9.0, 1.0, 1.0]
    named = weights_of_classes({"0": 7}, TWO, COUNTS, 1005, {"0": "投诉"})
    assert named == [7.0, 1.0]
    with pytest.raises(DataError, match="--class-weights names '退款', which is no label here"):
        weights_of_classes({"退款": 2}, TWO, COUNTS, 1005, {})
    with pytest.raises(DataError, match="no meaning for a regression"):
        weights_of_classes("balanced", LabelSpace("regression", ("y",)), {}, 5, {})


@pytest.mark.parametrize("greater", [True, False])
def test_early_stopping_counts_evaluations_since_the_best_also_of_an_earlier_session(
    greater: bool,
) -> None:
    arguments: Any = SimpleNamespace(metric_for_best_model="f1", greater_is_better=greater)

    def stops(*values: float) -> bool:
        signed = [value if greater else -value for value in values]
        history = [{"loss": 1.0}, *({"eval_f1": value} for value in signed)]
        state: Any = SimpleNamespace(log_history=history, global_step=9)
        control = TrainerControl()
        StopEarly(2).on_evaluate(arguments, state, control)
        return control.should_training_stop

    assert not stops()
    assert not stops(0.5, 0.4)
    assert not stops(0.5, 0.4, 0.6, 0.1)
    assert stops(0.5, 0.4, 0.5)  # as good is not better
    assert stops(0.1, 0.6, 0.5, 0.4)


class _Broken(TrainerCallback):
    """Ends the run after its first checkpoint."""

    def on_save(self, *_: Any, **__: Any) -> None:
        self.saved = getattr(self, "saved", 0) + 1
        if self.saved == 1:
            raise RuntimeError("the machine went away")


@pytest.mark.usefixtures("undrawn")
def test_weights_threshold_and_early_stopping_hold_for_a_run_and_its_resumption(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    rows = [("正常", f"房间很大 {n}") for n in range(126)] + [
        ("投诉", f"房间很脏 {n}") for n in range(7)
    ]
    table = write_csv(tmp_path / "a.csv", [*rows[:108], *rows[126:130]])
    checked = write_csv(tmp_path / "b.csv", [*rows[108:126], *rows[130:]])
    options: dict[str, Any] = {
        "model": tiny_model_dir, "max_length": 16, "learning_rate": 3e-3, "epochs": 30,
        "class_weights": "balanced", "threshold": "auto", "early_stopping": 1, "quiet": True,
        "positive_label": "投诉", "validation_file": checked, "batch_size": 64,
        "exact": True,
    }  # fmt: skip
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match="the machine went away"):
        memfit.finetune(table, output_dir=folder, callbacks=[_Broken()], **options)
    with pytest.raises(OutputError, match="class_weights: not set, not balanced"):
        memfit.finetune(output_dir=folder, resume=True, class_weights={"投诉": 2})
    result = memfit.finetune(output_dir=folder, resume=True, quiet=True)
    training = result.summary.training
    assert training["class_weights"] == "投诉 14, 正常 0.5185"
    assert (training["threshold"], training["early_stopping"]) == ("auto", 1)
    assert training["stopped_early"]
    assert training["epochs"] < 30
    assert result.summary.threshold == result.evaluation.threshold is not None
    # The loss is the weighted one, in an evaluation that is cut into micro-batches too.
    classifier = memfit.load(folder)
    logits = classifier.logits([text for _, text in (*rows[108:126], *rows[130:])])
    truth = torch.tensor([1] * 18 + [0] * 3)
    weights = torch.tensor([112 / 8, 112 / 216])
    expected = torch.nn.functional.cross_entropy(torch.tensor(logits), truth, weights)
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    best_step = int(str(result.summary.best_checkpoint).removeprefix("checkpoint-"))
    losses = {one["step"]: one["eval_loss"] for one in history if "eval_loss" in one}
    assert losses[best_step] == pytest.approx(float(expected), rel=0.02)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "投诉 14, 正常 0.5185" in page
    assert "A text is called 投诉 from a probability of" in page
    card = model_card(folder, "anna/complaints", "mit")
    assert "| class weights | 投诉 14, 正常 0.5185 |" in card
    assert "memfit answers by a threshold of" in card
    # The threshold lies in the model's own config, which transformers reads as before.
    settings = AutoConfig.from_pretrained(folder)
    assert settings.memfit["threshold"] == result.summary.threshold
    assert settings.memfit["tuned"] is False  # other rows are scored with it as it is
    answer = classifier.predict("房间很脏 3")[0]
    assert answer.score == answer.scores[answer.label]
    # From just above its own probability on, the same text is the other class.
    rules = dataclasses.replace(classifier.scoring, threshold=answer.scores["投诉"] + 1e-6)
    other = dataclasses.replace(classifier, scoring=rules).predict("房间很脏 3")[0]
    assert (other.label, other.scores) == ("正常", answer.scores)
    again = memfit.evaluate(folder, table)
    assert again.threshold == result.summary.threshold
    assert not again.tuned


def test_what_cannot_stop_early_or_has_no_threshold_is_refused(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    table = write_csv(tmp_path / "a.csv", [(n % 3, f"text {n}") for n in range(60)])
    options: dict[str, Any] = {"output_dir": tmp_path / "run", "model": tiny_model_dir}
    with pytest.raises(ConfigError, match="--threshold is for two classes or several labels"):
        memfit.finetune(table, threshold="auto", **options)
    with pytest.raises(ConfigError, match="--early-stopping goes back to the best model"):
        memfit.finetune(table, early_stopping=2, eval_strategy="no", **options)
