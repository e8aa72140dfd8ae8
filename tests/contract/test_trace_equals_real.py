"""The trace on fake tensors against the same step on real ones: equal to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfit.memory.components import Component
from memfit.memory.phases import training_order
from memfit.memory.stock_estimate import run_segments, trace_segments
from memfit.memory.stock_step import Stepper, StepSpec
from memfit.memory.tracing.depth import Segments, play
from memfit.memory.tracing.meta_models import build_on_meta, materialize, model_config, small_random
from memfit.memory.tracing.tracker import Tracker

SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 211,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "electra": {"embedding_size": 24},
    "albert": {"embedding_size": 24},
    "distilbert": {"dim": 48, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8},
    "mpnet": {},
    "qwen2": {"num_key_value_heads": 2},
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4},
}
UNKNOWN_TO = {"distilbert": {"hidden_size", "num_hidden_layers", "num_attention_heads"}}


def spec(family: str, **changes: Any) -> StepSpec:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    known = {k: v for k, v in SMALL.items() if k not in UNKNOWN_TO.get(family, set())}
    config = {"model_type": family, **known, **ids, **MODELS[family]}
    values: dict[str, Any] = {"rows": 3, "length": 16, "gradient_accumulation_steps": 2}
    return StepSpec(config=config, **{**values, **changes})


def traced(step: StepSpec) -> Segments:
    config = model_config(step)
    return trace_segments(step, config, build_on_meta(step, config), None)


def assert_equal(fake: Segments, real: Segments) -> None:
    assert fake.parts.keys() == real.parts.keys()
    for part, marks in fake.parts.items():
        ours = [(mark.birth, mark.kind) for mark in marks]
        theirs = [(mark.birth, mark.kind) for mark in real.parts[part]]
        assert ours == theirs, part


@pytest.mark.parametrize("family", sorted(MODELS))
def test_every_birth_and_death_of_a_step_is_predicted(family: str) -> None:
    step = spec(family)
    run_segments(step)  # TorchScript functions (DeBERTa) free one scalar later the first time
    assert_equal(traced(step), run_segments(step))


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"precision": "pure_bf16"},
        {"gradient_checkpointing": True},
        {"attn_implementation": "eager"},
        {"padded": False},
        {"rows": 1},
        {"optim": "adamw_torch"},
        {"optim": "adafactor"},
        {"optim": "sgd", "max_grad_norm": 0.0},
        {"freeze": "encoder"},
        {"freeze": "1"},
        {"lora": 4},
        {"num_labels": 5, "problem_type": "multi_label_classification"},
    ],
    ids=lambda changes: "-".join(f"{key}={value}" for key, value in changes.items()),
)
def test_so_is_every_setting_of_the_step(changes: dict[str, Any]) -> None:
    step = spec("bert", **changes)
    assert_equal(traced(step), run_segments(step))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_steps_made_of_traced_parts_equal_two_steps_run_one_after_the_other(
    accumulation: int,
) -> None:
    step = spec("bert", gradient_accumulation_steps=accumulation)
    config = model_config(step)
    model = build_on_meta(step, config)
    with Tracker() as tracker:
        with tracker.accounting(Component.WEIGHTS):
            materialize(model, small_random)
        stepper = Stepper(step, config, model, tracker, cuda=False)
        for _ in range(2):
            for _ in range(accumulation):
                stepper.micro_batch()
            stepper.update()
            stepper.drop_gradients()
        ran = tracker.events()

    events = play(traced(step), training_order(step))
    assert _peak_bytes(events) == tracker.peak_bytes == _peak_bytes(ran)
    assert len(events) == len(ran)
    assert sorted((e.birth, e.nbytes) for e in events) == sorted((e.birth, e.nbytes) for e in ran)


def test_the_tracker_agrees_with_the_tensors_that_are_alive() -> None:
    step = spec("bert")
    config = model_config(step)
    model = build_on_meta(step, config)
    with Tracker() as tracker:
        materialize(model, small_random)
        stepper = Stepper(step, config, model, tracker, cuda=False)
        stepper.micro_batch()
        weights = [*model.parameters(), *model.buffers()]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert tracker.live_bytes == _storage_bytes([*weights, *gradients])
        stepper.update()
        state = [t for s in stepper.optimizer.state.values() for t in s.values()]
        assert tracker.live_bytes == _storage_bytes([*weights, *gradients, *state])


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _peak_bytes(events: list[Any]) -> int:
    now = peak = 0
    for event in events:
        now += event.nbytes if event.birth else -event.nbytes
        peak = max(peak, now)
    return peak
