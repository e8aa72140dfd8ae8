"""LoRA adapters through peft: what learns, what is saved, and the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from strategy_fixtures import (
    build,
    collate,
    learning,
    losses,
    rows_of,
    same_state,
    setup_of,
    state_of,
    trained,
)

from memfit.errors import ConfigError
from memfit.strategies import Fidelity, Lora

FAMILIES = ["bert", "ernie", "electra", "roberta", "albert", "distilbert", "modernbert-mean"]


@pytest.mark.parametrize("family", FAMILIES)
def test_only_adapters_and_the_head_learn(family):
    model = build(family)
    head = {
        name: one.numel()
        for name, one in model.named_parameters()
        if not name.startswith(f"{model.base_model_prefix}.")
    }
    setup = setup_of(model)
    Lora(rank=4).apply(setup)
    names = learning(setup.model)
    adapters = {name for name in names if "lora_" in name}
    assert all("modules_to_save" in name for name in names - adapters)
    sizes = {name: one.numel() for name, one in setup.model.named_parameters()}
    assert sum(sizes[name] for name in names - adapters) == sum(head.values())
    assert adapters
    assert Lora().fidelity is Fidelity.CAPACITY


def test_adapters_have_the_size_their_rank_says():
    setup = setup_of(build())
    Lora(rank=4).apply(setup)
    sizes = [one.numel() for name, one in setup.model.named_parameters() if "lora_" in name]
    # Two layers x query and value x (A [4, 32] and B [32, 4]).
    assert sum(sizes) == 2 * 2 * (4 * 32 + 32 * 4)


def test_a_fresh_model_with_adapters_gives_the_same_logits():
    model = build().eval()
    batch = collate(rows_of(5))
    before = model(**batch).logits
    setup = setup_of(model)
    Lora().apply(setup)
    torch.testing.assert_close(setup.model.eval()(**batch).logits, before, atol=1e-6, rtol=0)


def test_alpha_is_twice_the_rank_unless_given_and_dropout_is_off():
    for strategy, expected in ((Lora(rank=4), (4, 8, 0.0)), (Lora(4, 4, 0.1), (4, 4, 0.1))):
        setup = setup_of(build())
        strategy.apply(setup)
        made: Any = setup.model.peft_config["default"]
        assert (made.r, made.lora_alpha, made.lora_dropout) == expected


def test_a_pooler_that_was_never_pre_trained_learns_in_full():
    setup = setup_of(build())
    Lora(fresh=("bert.pooler.dense.weight", "bert.pooler.dense.bias")).apply(setup)
    pooler = {name for name in learning(setup.model) if ".pooler." in name}
    assert len(pooler) == 2


def test_the_loss_falls_frozen_weights_stay_and_the_optimizer_is_small(tmp_path):
    model = build()
    before = state_of(model)
    setup = setup_of(model, tmp_path, max_steps=40, learning_rate=1e-2)
    trainer = trained(setup, [Lora(rank=4)], rows_of(32))
    assert sum(losses(trainer)[-4:]) < 0.92 * sum(losses(trainer)[:4])
    kept = {
        name.replace("base_model.model.", "").replace(".base_layer", ""): one
        for name, one in trainer.model.named_parameters()
    }
    for name, (value, _) in before.items():
        if not name.startswith("classifier"):
            assert torch.equal(kept[name], value), name
    held = sum(len(one["exp_avg"].flatten()) for one in trainer.optimizer.optimizer.state.values())
    assert held == 2 * 2 * (4 * 32 + 32 * 4) + (32 * 2 + 2)


def test_undo_gives_the_model_back_after_training_too(tmp_path):
    model = build()
    model.bert.embeddings.requires_grad_(False)  # the user's own doing, which peft forgets
    before = state_of(model)
    batch = collate(rows_of(5))
    logits = model.eval()(**batch).logits
    setup = setup_of(model, tmp_path, max_steps=3, learning_rate=5e-3)
    trained(setup, [Lora(rank=4)], rows_of(16))
    setup.restore()
    assert setup.model is model
    assert same_state(before, state_of(model))
    assert torch.equal(model.eval()(**batch).logits, logits)
    assert not hasattr(model, "peft_config")
    Lora(rank=2).apply(setup)  # and can be had again
    assert any("lora_" in name for name in learning(setup.model))


def test_the_merged_model_loads_in_a_pipeline(tmp_path, tiny_model_dir):
    auto: Any = transformers.AutoModelForSequenceClassification
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tiny_model_dir)
    texts = ["房間很乾淨", "房間很髒"]
    rows = [
        {"input_ids": tokenizer(text)["input_ids"], "labels": n} for n, text in enumerate(texts)
    ]
    setup = setup_of(
        auto.from_pretrained(tiny_model_dir), tmp_path, max_steps=5, learning_rate=1e-2
    )
    trainer = trained(setup, [Lora(rank=4)], rows)
    logits = torch.tensor(trainer.predict(rows).predictions)
    merged: Any = trainer.model
    merged.merge_and_unload().save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    found = transformers.pipeline("text-classification", str(tmp_path / "saved"))(texts)
    expected = logits.softmax(-1).max(-1).values.tolist()
    assert [one["score"] for one in found] == pytest.approx(expected, abs=1e-5)


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "peft" else name)
    reason = Lora().unavailable(setup_of(build()))
    assert reason == "peft is not installed; install it with: pip install memfit[lora]"


def test_models_that_cannot_have_adapters_are_refused():
    setup = setup_of(build())
    Lora().apply(setup)
    assert Lora().unavailable(setup) == "the model has adapters already"
    with pytest.raises(ConfigError, match="adapters already"):
        Lora().apply(setup)
    assert "no transformers model" in Lora().unavailable(setup_of(torch.nn.Linear(2, 2)))
    config = transformers.FNetConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, intermediate_size=48
    )
    fnet = transformers.FNetForSequenceClassification(config)
    assert "does not know the attention projections" in Lora().unavailable(setup_of(fnet))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "the rank of LoRA adapters is at least 1, not 0"),
        ({"alpha": 0}, "alpha of LoRA adapters is at least 1, not 0"),
        ({"dropout": 1.0}, "from 0 to below 1, not 1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Lora(**settings)
