"""Freezing: what learns, what has a gradient, and the rate at which a head learns at all."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from strategy_fixtures import (
    build,
    collate,
    kept_bytes,
    learning,
    losses,
    rows_of,
    same_state,
    setup_of,
    state_of,
    trained,
)

from memfit.errors import ConfigError
from memfit.strategies import Fidelity, Freezing
from memfit.strategies.freezing import HEAD_LEARNING_RATE
from sentences import SENTENCES

BERT_HEAD = {"classifier.weight", "classifier.bias"}
HEAD_SEED = 1
"""A fresh head that by chance is not right from the start."""
quietly = pytest.mark.filterwarnings("ignore:only the classification head is trainable")


# ---- what learns ----


@quietly
@pytest.mark.parametrize(
    ("what", "frozen"),
    [
        ("embeddings", ("bert.embeddings",)),
        (1, ("bert.embeddings", "bert.encoder.layer.0.")),
        (2, ("bert.embeddings", "bert.encoder.")),
        ("encoder", ("bert.",)),
    ],
)
def test_exactly_what_was_named_stops_learning(what, frozen):
    model = build()
    everything = learning(model)
    Freezing(what).apply(setup_of(model))
    stopped = {name for name in everything if name.startswith(frozen)}
    assert learning(model) == everything - stopped
    assert len(stopped) >= 5
    assert Freezing(what).fidelity is Fidelity.CAPACITY


@quietly
@pytest.mark.parametrize(
    "family", ["ernie", "electra", "roberta", "albert", "distilbert", "modernbert-mean", "mpnet"]
)
def test_in_every_family_the_encoder_is_all_but_the_head(family):
    model = build(family)
    Freezing("encoder").apply(setup_of(model))
    prefix = f"{model.base_model_prefix}."
    expected = {n for n, _ in model.named_parameters() if not n.startswith(prefix)}
    assert learning(model) == expected
    assert expected


@quietly
def test_frozen_weights_get_no_gradient_and_do_not_move(tmp_path):
    model = build()
    before = state_of(model)
    setup = setup_of(model, tmp_path, max_steps=20)
    trainer = trained(setup, [Freezing("encoder")], rows_of(32))
    assert losses(trainer)[-1] < losses(trainer)[0]
    moved = {n for n, one in model.named_parameters() if not torch.equal(one, before[n][0])}
    assert moved == BERT_HEAD
    model(input_ids=torch.ones(2, 4, dtype=torch.long), labels=torch.ones(2).long()).loss.backward()
    assert {n for n, one in model.named_parameters() if one.grad is not None} == BERT_HEAD
    states = trainer.optimizer.optimizer.state
    assert sum(len(one["exp_avg"].flatten()) for one in states.values()) == 32 * 2 + 2


@quietly
def test_the_more_is_frozen_the_less_is_kept_for_backward(tmp_path):
    kept = [
        kept_bytes(setup_of(build(), tmp_path, max_steps=1), *strategies)
        for strategies in ([], [Freezing(1)], [Freezing("encoder")])
    ]
    assert kept[1] < 0.7 * kept[0]
    assert kept[2] < 0.05 * kept[0]


@quietly
def test_layers_above_frozen_ones_still_learn_with_checkpointing(tmp_path):
    model = build()
    before = state_of(model)
    setup = setup_of(model, tmp_path, max_steps=3, gradient_checkpointing=True)
    trained(setup, [Freezing(1)], rows_of(16))
    moved = {n for n, one in model.named_parameters() if not torch.equal(one, before[n][0])}
    assert "bert.encoder.layer.1.attention.self.query.weight" in moved
    assert not any(name.startswith("bert.encoder.layer.0.") for name in moved)


@quietly
def test_undo_lets_everything_learn_again():
    model = build()
    model.bert.pooler.dense.bias.requires_grad = False  # was the user's own doing, and stays so
    before = state_of(model)
    setup = setup_of(model)
    Freezing("encoder").apply(setup)
    assert setup.args.learning_rate == HEAD_LEARNING_RATE
    setup.restore()
    assert same_state(before, state_of(model))
    assert setup.args.learning_rate == 5e-5


# ---- the head's learning rate ----


def test_a_rate_nobody_chose_becomes_the_heads_and_is_said():
    setup = setup_of(build())
    with pytest.warns(UserWarning, match="learning_rate is 0.001 instead of 5e-05"):
        Freezing("encoder").apply(setup)
    assert setup.args.learning_rate == 1e-3


def test_a_rate_the_user_chose_stands_but_is_warned_of_when_it_teaches_nothing():
    setup = setup_of(build(), learning_rate=2e-5)
    with pytest.warns(UserWarning, match="at learning_rate=2e-05 it learns next to nothing"):
        Freezing("encoder").apply(setup)
    assert setup.args.learning_rate == 2e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Freezing("encoder").apply(other := setup_of(build(), learning_rate=3e-3))
    assert other.args.learning_rate == 3e-3


def test_names_of_what_the_user_gave_decide_where_they_are_known():
    not_given = setup_of(build(), learning_rate=2e-5)  # a default of whoever made the arguments
    not_given.user_set = frozenset({"num_train_epochs"})
    with pytest.warns(UserWarning, match="learning_rate is 0.001 instead of 2e-05"):
        Freezing("encoder").apply(not_given)
    given = setup_of(build(), learning_rate=5e-5)
    given.user_set = frozenset({"learning_rate"})
    with pytest.warns(UserWarning, match="learns next to nothing"):
        Freezing("encoder").apply(given)
    assert (not_given.args.learning_rate, given.args.learning_rate) == (1e-3, 5e-5)


def test_a_heads_rate_can_be_given_and_is_used_without_a_word():
    setup = setup_of(build(), learning_rate=2e-5)
    Freezing("encoder", head_learning_rate=4e-4).apply(setup)
    assert setup.args.learning_rate == 4e-4


@pytest.mark.parametrize("what", ["embeddings", 1])
def test_the_rate_stays_where_layers_still_learn(what):
    setup = setup_of(build())
    Freezing(what).apply(setup)
    assert setup.args.learning_rate == 5e-5
    with pytest.raises(ConfigError, match="goes with the whole encoder"):
        Freezing(what, head_learning_rate=1e-3)


@pytest.fixture(scope="module")
def learned_encoder(tmp_path_factory):
    """A model whose encoder knows the task, trained as a whole on rows of its own."""
    setup = setup_of(build(), tmp_path_factory.mktemp("all"), max_steps=60, learning_rate=2e-3)
    return trained(setup, [], rows_of(64, seed=9)).model


def test_a_fresh_head_learns_nothing_at_2e_5_and_the_task_at_1e_3(tmp_path, learned_encoder):
    rows = rows_of(96, share=0.66)
    majority = sum(row["labels"] for row in rows) / len(rows)

    def learned(rate: float) -> tuple[float, float, float]:
        model = copy.deepcopy(learned_encoder)
        with torch.no_grad():
            torch.manual_seed(HEAD_SEED)
            model.classifier.weight.normal_(std=0.02)  # as transformers starts a head
            model.classifier.bias.zero_()
            before = float(model.eval()(**collate(rows)).loss)
        setup = setup_of(model, tmp_path, num_train_epochs=5)
        trainer = trained(setup, [Freezing("encoder", head_learning_rate=rate)], rows)
        output = trainer.predict(rows)
        accuracy = float((output.predictions.argmax(-1) == output.label_ids).mean())
        return before, output.metrics["test_loss"], accuracy

    before, after, accuracy = learned(2e-5)
    assert after > 0.98 * before
    assert accuracy <= majority < 0.7
    before, after, accuracy = learned(1e-3)
    assert after < 0.5 * before
    assert accuracy > 0.95


# ---- what it refuses, and what it leaves behind ----


def test_what_would_freeze_nothing_or_everything_is_refused():
    frozen = build()
    frozen.bert.requires_grad_(False)
    with pytest.raises(ConfigError, match="froze nothing"):
        Freezing("encoder").apply(setup_of(frozen))
    headless = build()
    headless.classifier.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable weight is left"):
        Freezing("encoder").apply(setup_of(headless))
    assert learning(headless)
    with pytest.raises(ConfigError, match="more than the 2 layers"):
        Freezing(3).apply(setup_of(build()))


@pytest.mark.parametrize("what", ["decoder", 0, -1, True, 1.5])
def test_what_is_no_part_of_a_model_is_refused(what):
    with pytest.raises(ConfigError, match="write encoder, embeddings or a number of layers"):
        Freezing(what)


def test_adapters_and_foreign_modules_are_refused():
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(build(), LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    assert "frozen already" in Freezing().unavailable(setup_of(adapted))
    assert "no transformers model" in Freezing().unavailable(setup_of(torch.nn.Linear(2, 2)))


@quietly
def test_the_saved_model_loads_in_a_pipeline(tmp_path, tiny_model_dir):
    auto: Any = transformers.AutoModelForSequenceClassification
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tiny_model_dir)
    rows = [
        {"input_ids": tokenizer(text)["input_ids"], "labels": index % 2}
        for index, text in enumerate(SENTENCES)
    ]
    setup = setup_of(auto.from_pretrained(tiny_model_dir), tmp_path, max_steps=3)
    trainer = trained(setup, [Freezing("encoder")], rows, processing_class=tokenizer)
    trainer.save_model(str(tmp_path / "saved"))
    classify = transformers.pipeline("text-classification", str(tmp_path / "saved"))
    found = classify(list(SENTENCES))
    logits = torch.tensor(trainer.predict(rows).predictions)
    expected = logits.softmax(-1).max(-1).values.tolist()
    assert [one["score"] for one in found] == pytest.approx(expected, abs=1e-5)
