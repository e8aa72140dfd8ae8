"""The step executor and its weights, on a linear model whose gradient is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.engine.executors import StepExecutor
from memfit.engine.loss import ClassWeightedLoss, counted_labels
from memfit.engine.micro_batches import MicroBatching, Trim
from memfit.errors import ConfigError, DataError


def batch_of(rows: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "features": torch.randn(rows, 4, generator=generator),
        "labels": torch.randint(0, 3, (rows,), generator=generator),
    }


def model_of() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def executor(micro_rows: int | None, **parts: Any) -> StepExecutor:
    def loss(model: nn.Module, inputs: dict[str, Any], weight: float) -> torch.Tensor:
        assert weight == counted_labels(inputs)
        return F.cross_entropy(model(inputs["features"]), inputs["labels"])

    defaults: dict[str, Any] = {
        "weigh": counted_labels,
        "prepare": lambda inputs: inputs,
        "loss": loss,
        "backward": lambda loss: loss.backward(),
    }
    return StepExecutor(
        micro_batching=MicroBatching(max_rows=micro_rows), trim=Trim.RIGHT, **{**defaults, **parts}
    )


def whole_gradient(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    model = model_of()
    loss = F.cross_entropy(model(batch["features"]), batch["labels"])
    loss.backward()
    return loss.detach(), model.weight.grad


@pytest.mark.parametrize("micro_rows", [1, 2, 4, 10, None])
def test_micro_batches_add_up_to_the_mean_of_the_batch(micro_rows):
    batch, model = batch_of(10), model_of()
    loss, gradient = whole_gradient(batch)
    ours = executor(micro_rows).run(model, batch)
    assert not ours.requires_grad
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(model.weight.grad, gradient, rtol=1e-5, atol=1e-7)


def test_ignored_labels_do_not_count_even_a_micro_batch_of_nothing_else():
    batch, model = batch_of(6), model_of()
    batch["labels"][:3] = -100
    loss, gradient = whole_gradient(batch)
    ours = executor(2).run(model, batch)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(model.weight.grad, gradient, rtol=1e-5, atol=1e-7)
    batch["labels"][:] = -100
    with pytest.raises(DataError, match="no label that counts"):
        executor(2).run(model, batch)


def test_one_micro_batch_is_on_the_device_at_a_time():
    shapes = []

    def prepare(inputs: dict[str, Any]) -> dict[str, Any]:
        shapes.append(tuple(inputs["features"].shape))
        return inputs

    executor(4, prepare=prepare).run(model_of(), batch_of(10))
    assert shapes == [(4, 4), (4, 4), (2, 4)]


def test_class_weights_weigh_a_micro_batch_by_its_classes():
    weighted = ClassWeightedLoss([0.5, 1.0, 4.0])
    assert weighted.weight_of(torch.tensor([0, 2, 2, -100])) == 8.5
    assert weighted.weight_of(torch.ones(5, 3)) == 5  # several labels a row: a plain mean
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 2])
    expected = F.cross_entropy(logits, labels, weight=torch.tensor([0.5, 1.0, 4.0]))
    torch.testing.assert_close(weighted({"logits": logits}, labels), expected)
    many = torch.tensor([[1.0, 0.0, 1.0]] * 4)
    expected = F.binary_cross_entropy_with_logits(
        logits, many, pos_weight=torch.tensor([0.5, 1.0, 4.0])
    )
    torch.testing.assert_close(weighted((logits,), many), expected)


def test_class_weights_that_do_not_fit_the_model_are_named():
    with pytest.raises(ConfigError, match="class_weights has 2 numbers, the model 3 classes"):
        ClassWeightedLoss([1.0, 2.0])({"logits": torch.zeros(1, 3)}, torch.tensor([0]))
    with pytest.raises(ConfigError, match="one number, zero or more"):
        ClassWeightedLoss([1.0, -2.0])


def test_what_a_mean_is_a_mean_of():
    ids = torch.zeros(3, 5)
    assert counted_labels({"input_ids": ids}) == 3
    assert counted_labels({"input_ids": ids, "labels": torch.tensor([0, -100, 2])}) == 2
    assert counted_labels({"input_ids": ids, "labels": torch.zeros(3, 7)}) == 3
