"""Features of a frozen encoder by themselves: logits, gradients, order, labels, plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from strategy_fixtures import (
    FAMILIES,
    arguments,
    collate,
    count_calls,
    frozen,
    losses,
    rows_of,
    same_state,
    state_of,
)
from torch import nn
from torch.utils.data import DataLoader

from memfit import BudgetTrainer
from memfit.errors import DataError
from memfit.strategies.frozen_features import FeatureHead, cached_features

pytestmark = [
    pytest.mark.filterwarnings("ignore:only the classification head is trainable"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]
every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
def test_logits_of_features_are_the_whole_models_in_evaluation_mode(family):
    model, rows = frozen(family), rows_of(37)
    expected = model.eval()(**collate(rows)).logits
    model.train()
    features = cached_features(model, rows, collate, max_tokens=90)
    assert model.training
    assert features.features.shape == (37, 32)
    assert features.column_names == ["frozen_features", "labels"]
    head = FeatureHead(model)
    model.eval()
    batch = features.collate([features[row] for row in range(37)])
    found = model(**batch)
    torch.testing.assert_close(found.logits, expected, atol=1e-5, rtol=1e-5)
    labels = torch.tensor([row["labels"] for row in rows])
    loss = nn.functional.cross_entropy(expected, labels)
    torch.testing.assert_close(found.loss, loss, atol=1e-5, rtol=1e-5)
    # Texts still go through the whole model.
    torch.testing.assert_close(model(**collate(rows)).logits, expected)
    head.remove()
    with pytest.raises((TypeError, ValueError, AttributeError)):
        model(**batch)


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert-mean"])
def test_the_head_has_the_gradient_of_the_whole_model_in_evaluation_mode(family):
    model, rows = frozen(family), rows_of(12)
    model.eval()
    model(**collate(rows)).loss.backward()
    expected = {n: one.grad.clone() for n, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    features = cached_features(model, rows, collate)
    FeatureHead(model)
    model(**features.__getitems__(list(range(12)))).loss.backward()
    found = {n: one.grad for n, one in model.named_parameters() if one.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4)


def test_rows_keep_their_order_over_many_collated_chunks(monkeypatch):
    monkeypatch.setattr("memfit.strategies.frozen_features._COLLATED_ROWS", 7)
    model, rows = frozen(), rows_of(30)
    features = cached_features(model, rows, collate, max_tokens=64)
    expected = model.eval().bert(**{k: v for k, v in collate(rows).items() if k != "labels"})
    torch.testing.assert_close(features.features, expected.pooler_output, atol=1e-5, rtol=1e-5)
    assert features.columns["labels"].tolist() == [row["labels"] for row in rows]


def test_no_more_tokens_go_through_at_once_than_allowed():
    model, rows = frozen(), rows_of(40)
    sizes = []
    model.bert.register_forward_pre_hook(
        lambda _m, args, _kwargs: sizes.append(args[0].numel()), with_kwargs=True
    )
    cached_features(model, rows, collate, max_tokens=100)
    assert max(sizes) <= 100
    # Sorted by length there is little padding: close to the tokens there are.
    assert sum(sizes) < 1.15 * sum(len(row["input_ids"]) for row in rows)


def test_modes_weights_and_random_numbers_are_as_before():
    model, rows = frozen(), rows_of(9)
    model.train()
    model.bert.eval()
    before, random = state_of(model), torch.get_rng_state()
    cached_features(model, rows, collate)
    assert same_state(before, state_of(model))
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert not model.bert.encoder.training


def test_labels_of_every_kind_and_further_columns_are_kept():
    model = frozen(num_labels=3, problem_type="multi_label_classification")

    def with_names(rows: Any) -> dict[str, Any]:
        batch = collate(rows)
        batch["labels"] = torch.eye(3)[batch["labels"]]
        return {**batch, "names": [f"row {len(row['input_ids'])}" for row in rows]}

    rows = rows_of(5)
    plain = {n: v for n, v in collate(rows).items() if n != "labels"}
    expected = model.eval()(**plain).logits
    features = cached_features(model, rows, with_names, label_names=("labels", "names"))
    batch = features.collate([features[3], features[1]])
    assert batch.pop("names") == [f"row {len(rows[at]['input_ids'])}" for at in (3, 1)]
    assert batch["labels"].shape == (2, 3)
    FeatureHead(model)
    found = model.eval()(**batch)
    torch.testing.assert_close(found.logits, expected[[3, 1]], atol=1e-5, rtol=1e-5)
    assert features.__getitems__([3, 1])["names"] == [features[3]["names"], features[1]["names"]]


def test_what_has_no_entry_a_row_is_refused():
    model = frozen()
    with pytest.raises(DataError, match="'scale' has not one entry for each of 4 rows"):
        cached_features(
            model, rows_of(4), lambda rows: {**collate(rows), "scale": torch.tensor(2.0)},
            label_names=("labels", "scale"),
        )  # fmt: skip
    with pytest.raises(DataError, match="no row"):
        cached_features(model, [], collate)


def test_a_plain_torch_loop_trains_the_head():
    model, rows = frozen(noise=0.3), rows_of(48)
    features = cached_features(model, rows, collate)
    head = FeatureHead(model)
    optimizer = torch.optim.AdamW(model.classifier.parameters(), lr=2e-2)
    seen = []
    for _ in range(30):
        for batch in DataLoader(features, batch_size=16, collate_fn=features.collate):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(loss.detach()))
    assert sum(seen[-3:]) < 0.8 * sum(seen[:3])
    head.remove()
    logits = model.eval()(**collate(rows)).logits
    accuracy = float((logits.argmax(-1) == features.columns["labels"]).float().mean())
    assert accuracy > 0.7


def test_the_trainer_takes_features_as_any_dataset(tmp_path):
    model, rows = frozen(), rows_of(24)
    features = cached_features(model, rows, collate)
    FeatureHead(model)
    args = arguments(tmp_path, max_steps=60, learning_rate=3e-2, remove_unused_columns=False)
    trainer = BudgetTrainer(model, args, train_dataset=features, data_collator=features.collate)
    trainer.remove_callback(transformers.PrinterCallback)
    calls = count_calls(model)
    trainer.train()
    assert calls == [0]
    assert sum(losses(trainer)[-3:]) < 0.9 * sum(losses(trainer)[:3])
