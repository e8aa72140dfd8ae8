"""Fused attention in place of eager: the same gradients, less kept, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from strategy_fixtures import build, collate, kept_bytes, rows_of, setup_of
from torch import nn

from memfit.errors import ConfigError
from memfit.strategies import Fidelity, FusedAttention, Packing

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def eager(family: str = "bert", **changes: Any) -> Any:
    settings = {**(NO_DROPOUT if family != "distilbert" else {}), **changes}
    model = build(family, **settings)
    model.set_attn_implementation("eager")
    return model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.eval().zero_grad()
    model(**collate(rows_of(6))).loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()}


@pytest.mark.parametrize("family", ["bert", "roberta", "albert", "modernbert-mean"])
def test_gradients_are_those_of_eager_attention(family):
    model = eager(family)
    setup = setup_of(model)
    before = gradients(model)
    FusedAttention().apply(setup)
    assert model.config._attn_implementation == "sdpa"
    after = gradients(model)
    largest = max(float(one.abs().max()) for one in before.values())
    difference = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < difference < 1e-5 * largest
    setup.restore()
    assert model.config._attn_implementation == "eager"
    assert all(torch.equal(one, before[name]) for name, one in gradients(model).items())
    assert FusedAttention().fidelity is Fidelity.EXACT


def test_less_is_kept_for_backward(tmp_path):
    plain = kept_bytes(setup_of(eager(), tmp_path, max_steps=1))
    fused = kept_bytes(setup_of(eager(), tmp_path, max_steps=1), FusedAttention())
    length = max(len(row["input_ids"]) for row in rows_of(8))
    weights_bytes = 2 * 8 * 2 * length**2 * 4  # layers x rows x heads x length^2 floats
    outputs_bytes = 2 * 8 * length * 32 * 4  # which the fused kernel keeps instead
    assert plain - fused == pytest.approx(weights_bytes - outputs_bytes, abs=0.1 * weights_bytes)


def test_what_is_fused_already_stays():
    reason = FusedAttention().unavailable(setup_of(build(**NO_DROPOUT)))
    assert reason == "its attention is fused already (sdpa)"
    with pytest.raises(ConfigError, match="fused already"):
        FusedAttention().apply(setup_of(build(**NO_DROPOUT)))


def test_a_cpu_has_no_fused_attention_with_dropout_and_a_card_has():
    setup = setup_of(eager(attention_probs_dropout_prob=0.1))
    reason = FusedAttention().unavailable(setup)
    assert "would keep as much as eager attention (attention_probs_dropout_prob is not 0)" in reason
    setup.device = torch.device("cuda:0")
    assert FusedAttention().unavailable(setup) == ""


def test_with_dropout_a_cpu_really_keeps_as_much(tmp_path):
    def kept(implementation: str) -> int:
        model = build(attention_probs_dropout_prob=0.1)
        model.set_attn_implementation(implementation)
        return kept_bytes(setup_of(model, tmp_path, max_steps=1))

    assert kept("sdpa") >= kept("eager")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # DeBERTa's own
def test_models_without_it_are_refused():
    import transformers

    config = transformers.DebertaV2Config(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=48,
    )  # fmt: skip
    deberta = transformers.DebertaV2ForSequenceClassification(config)
    reason = FusedAttention().unavailable(setup_of(deberta))
    assert reason == "DebertaV2ForSequenceClassification has only eager attention"
    assert "no transformers model" in FusedAttention().unavailable(setup_of(nn.Linear(2, 2)))


def test_attention_weights_that_are_asked_for_need_eager_attention():
    setup = setup_of(eager(output_attentions=True))
    assert "asks for attention weights" in FusedAttention().unavailable(setup)


def test_packing_brings_its_own():
    assert Packing.name in FusedAttention.conflicts
    setup = setup_of(eager())
    Packing().apply(setup)
    assert FusedAttention().unavailable(setup) == "a packed model has its own fused attention"


def test_no_other_kernel_is_known():
    with pytest.raises(ConfigError, match="fused attention is 'sdpa'"):
        FusedAttention("flash")  # type: ignore[arg-type]
