"""Measuring a real step on the CPU, in the terms of a prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from memfit.errors import MemfitError
from memfit.memory.components import Component
from memfit.memory.measured import measure, state_tensors


def tiny_bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    return BertForSequenceClassification(config)


def training_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: int = 4
) -> Callable[[], None]:
    batch = {
        "input_ids": torch.randint(1, 99, (rows, 16)),
        "attention_mask": torch.ones(rows, 16, dtype=torch.long),
        "labels": torch.zeros(rows, dtype=torch.long),
    }

    def step() -> None:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def test_a_product_and_its_gradient_are_counted_to_the_byte() -> None:
    layer = torch.nn.Linear(64, 32, bias=False)
    rows = torch.ones(16, 64)
    with measure(layer) as found:
        out = layer(rows)
        out.sum().backward()
    peak = found.peak
    weights, product, gradient = 64 * 32 * 4, 16 * 32 * 4, 64 * 32 * 4
    assert peak.components[Component.WEIGHTS] == weights
    assert peak.components[Component.GRADIENTS] == gradient
    # Alive when the gradient is born: the product, its sum and the seed of the backward pass.
    assert peak.components[Component.ACTIVATIONS] == product + 4 + 4
    assert peak.allocated_bytes == weights + gradient + product + 8
    assert peak.allocated_bytes == peak.reserved_bytes == peak.device_bytes


def test_the_components_of_an_adamw_step_add_up_to_the_peak() -> None:
    model = tiny_bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    step = training_step(model, optimizer, rows=16)
    step()  # the state exists from here on, as in all but the first step
    with measure(model, optimizer) as found:
        step()
    peak = found.peak
    parts = peak.components
    assert sum(parts.values()) == peak.allocated_bytes
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert parts[Component.WEIGHTS] == parameter_bytes(model) + buffers
    steps = 4 * len(list(model.parameters()))
    assert parts[Component.OPTIMIZER] == 2 * parameter_bytes(model) + steps
    assert parts[Component.ACTIVATIONS] > 16 * 16 * 32 * 4
    assert parts[Component.CONTEXT] == parts[Component.WORKSPACE] == 0
    assert peak.module.startswith("bert.encoder.layer.1")


def test_more_rows_raise_activations_alone() -> None:
    found: list[Any] = []
    for rows in (8, 16):
        model = tiny_bert()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
        with measure(model, optimizer) as measured:
            training_step(model, optimizer, rows)()
        found.append(measured.peak.components)
    few, many = found
    assert many[Component.WEIGHTS] == few[Component.WEIGHTS]
    assert many[Component.ACTIVATIONS] == pytest.approx(2 * few[Component.ACTIVATIONS], rel=0.02)


def test_gradients_that_are_kept_are_counted_at_the_next_peak() -> None:
    model = tiny_bert()
    idle = torch.optim.SGD(model.parameters(), lr=0.0)
    model(
        input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.zeros(1).long()
    ).loss.backward()
    with measure(model) as found:
        training_step(model, idle, rows=8)()
    assert found.peak.components[Component.GRADIENTS] == parameter_bytes(model)


def test_an_optimizer_made_late_is_asked_for_when_it_exists() -> None:
    model = tiny_bert()
    made: list[torch.optim.Optimizer] = []
    with measure(model, lambda: made[0] if made else None) as found:
        made.append(torch.optim.AdamW(model.parameters(), foreach=False))
        step = training_step(model, made[0], rows=16)
        step()
        step()
    assert found.peak.components[Component.OPTIMIZER] > 2 * parameter_bytes(model)


def test_hooks_are_gone_afterwards_and_also_after_a_failure() -> None:
    model = tiny_bert()
    with measure(model):
        pass
    with pytest.raises(ZeroDivisionError), measure(model):
        raise ZeroDivisionError
    hooks = [
        hook
        for module in model.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks)
        for hook in table
    ]
    assert hooks == []
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_the_peak_is_not_known_before_the_end() -> None:
    with (
        measure(torch.nn.Linear(2, 2)) as found,
        pytest.raises(MemfitError, match="when the measured block has ended"),
    ):
        _ = found.peak


def test_state_tensors_of_an_optimizer_that_is_not_there_are_none() -> None:
    assert list(state_tensors(None)) == []
