"""A deep model's trace from two shallow ones against the full trace."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from memfit.memory.cards import find_card
from memfit.memory.phases import training_order
from memfit.memory.stock_estimate import predict_segments, trace_segments
from memfit.memory.stock_step import StepSpec
from memfit.memory.tracing.depth import play
from memfit.memory.tracing.meta_models import build_on_meta, model_config
from step_memory import peak_on_a_card

CARD = find_card("T4")
WIDTH = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
SMALL = {"vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {**WIDTH, "num_hidden_layers": 7},
    "electra": {**WIDTH, "num_hidden_layers": 6, "embedding_size": 64},
    "distilbert": {"dim": 128, "hidden_dim": 512, "n_layers": 6, "n_heads": 4},
    "deberta-v2": {**WIDTH, "num_hidden_layers": 6, "relative_attention": True},
    "modernbert": {**WIDTH, "num_hidden_layers": 13, "cls_token_id": 1, "sep_token_id": 2},
    "qwen2": {**WIDTH, "num_hidden_layers": 6, "num_key_value_heads": 2},
    "gemma2": {**WIDTH, "num_hidden_layers": 12, "num_key_value_heads": 2, "head_dim": 32},
    "gpt2": {"n_embd": 128, "n_layer": 6, "n_head": 4},
    "bart": {"d_model": 128, "encoder_layers": 6, "decoder_layers": 2},
}
TRACED = {"modernbert": (4, 7), "gemma2": (4, 6)}


def spec(family: str, **changes: Any) -> StepSpec:
    config = {"model_type": family, **SMALL, **MODELS[family]}
    return StepSpec(config=config, **{"rows": 4, "length": 64, **changes})


def compare(step: StepSpec, traced_layers: tuple[int, ...]) -> None:
    if step.config["model_type"] == "deberta-v2":
        predict_segments(step, CARD)  # TorchScript frees one scalar later the first time
    predicted = predict_segments(step, CARD)
    assert predicted.traced_layers == traced_layers
    config = model_config(step)
    full = trace_segments(step, config, build_on_meta(step, config), CARD)
    order = training_order(step)
    events, expected = play(predicted.segments, order), play(full, order)
    assert [(e.birth, e.nbytes) for e in events] == [(e.birth, e.nbytes) for e in expected]
    births, deaths = (
        Counter(e.module for e in events if e.birth is kind) for kind in (True, False)
    )
    assert births == Counter(e.module for e in expected if e.birth)
    assert deaths == Counter(e.module for e in expected if not e.birth)
    ours, theirs = peak_on_a_card(events), peak_on_a_card(expected)
    assert ours.allocated_bytes == theirs.allocated_bytes
    assert ours.reserved_bytes == pytest.approx(theirs.reserved_bytes, rel=0.02)


@pytest.mark.parametrize("family", sorted(MODELS))
def test_births_and_deaths_are_those_of_the_full_trace_in_order(family: str) -> None:
    compare(spec(family), TRACED.get(family, (2, 3)))


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"gradient_checkpointing": True, "gradient_accumulation_steps": 4},
        {"optim": "adamw_torch"},
        {"optim": "adafactor", "precision": "fp16"},
        {"lora": 4},
        {"freeze": "encoder"},
        {"freeze": "1"},
        {"freeze": "7"},  # all of them: the shallow models have fewer
    ],
    ids=lambda changes: "-".join(f"{key}={value}" for key, value in changes.items()),
)
def test_so_they_are_with_every_kind_of_step(changes: dict[str, Any]) -> None:
    compare(spec("bert", **changes), (2, 3))


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [
        ("albert", {}, 1),  # one layer, run twelve times
        ("bert", {"freeze": "4"}, 7),  # four layers unlike the other three
    ],
)
def test_layers_that_do_not_repeat_are_traced_in_full(
    family: str, changes: dict[str, Any], layers: int
) -> None:
    config = {"model_type": family, **SMALL, **MODELS.get(family, WIDTH)}
    step = StepSpec(config=config, rows=2, length=16, **changes)
    assert predict_segments(step, CARD).traced_layers == (layers,)
