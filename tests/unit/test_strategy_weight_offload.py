"""Offload in a whole training: in the Trainer, and with layers whose weights live on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from strategy_models import (
    CLIP,
    LateLink,
    batch_for,
    build,
    groups_of,
    setup_for,
    step,
    train,
    weights_of,
)
from torch import Tensor, nn

from memfit.strategies import ActivationOffload, Checkpointing, OptimizerOffload, Setup
from memfit.strategies.offload.optimizer_offload import HostWeights
from memfit.training.trainer import BudgetTrainer

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

FAMILIES = ["bert", "distilbert", "modernbert", "deberta-v2", "qwen3"]


# ---- in the Trainer ----


def budget_trainer(folder: Path, offload: OptimizerOffload | None, **training: Any) -> Any:
    model = build("bert")
    rows = [{name: x[0] for name, x in batch_for(model, 1, seed=n).items()} for n in range(16)]
    settings = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": CLIP,
        "logging_steps": 1,
        "save_strategy": "no",
        "optim": "adamw_torch_fused",
        **training,
    }
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **settings
    )
    trainer = BudgetTrainer(model, args, train_dataset=rows)
    if offload is not None:
        offload.attach(trainer.setup, LateLink(), LateLink())
    return trainer


def test_a_training_run_is_the_same_with_clipping_and_logs_the_norm(tmp_path: Path) -> None:
    stock_run = budget_trainer(tmp_path, None)
    stock_run.train()
    for offload in (OptimizerOffload(), OptimizerOffload(weights=True)):
        ours = budget_trainer(tmp_path, offload)
        ours.train()
        ours.setup.restore()
        keys = ("loss", "grad_norm", "learning_rate")
        expected, found = (
            [[entry[key] for key in keys] for entry in run.state.log_history if "loss" in entry]
            for run in (stock_run, ours)
        )
        assert len(found) == 4
        assert found == expected
        assert torch.equal(weights_of(ours.model), weights_of(stock_run.model))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_run_resumes_from_a_checkpoint_written_while_weights_are_away(
    tmp_path: Path, dtype: Any
) -> None:
    offload = OptimizerOffload(weights=True, dtype=dtype)
    straight = budget_trainer(tmp_path, offload, save_strategy="steps", save_steps=2)
    straight.train()
    straight.setup.restore()
    resumed = budget_trainer(tmp_path, offload)
    resumed.train(str(tmp_path / "checkpoint-2"))
    resumed.setup.restore()
    assert torch.equal(weights_of(resumed.model), weights_of(straight.model))
    last = type(resumed.model).from_pretrained(tmp_path / "checkpoint-4")
    trained = weights_of(straight.model)  # with all the bits that were trained
    stored = trained if dtype is None else trained.bfloat16().float()
    assert torch.equal(weights_of(last), stored)


# ---- weights ----


def away(model: nn.Module, link: LateLink | None = None) -> tuple[Setup, HostWeights]:
    setup = setup_for(model)
    host = OptimizerOffload(weights=True).attach(setup, LateLink(), link or LateLink())
    assert host is not None
    return setup, host


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_layers_fetched_in_time_are_the_plain_steps(name: str) -> None:
    model = build(name)
    inputs = batch_for(model)
    logits, gradient = step(model, inputs)
    away(model)
    for _ in range(2):
        ours, our_gradient = step(model, inputs)
        assert torch.equal(ours, logits)
        assert torch.equal(our_gradient, gradient)


@pytest.mark.parametrize("others", ["checkpointing", "activation_offload", "all"])
def test_weights_away_stand_beside_what_saves_activations(others: str) -> None:
    model = build("bert")
    inputs = batch_for(model)
    _, gradient = step(model, inputs)
    setup = setup_for(model)
    if others in ("checkpointing", "all"):
        Checkpointing().apply(setup)
    if others in ("activation_offload", "all"):
        ActivationOffload(min_bytes=1).attach(setup, LateLink())
    host = OptimizerOffload(weights=True).attach(setup, LateLink(), LateLink())
    assert host is not None
    for _ in range(2):
        assert torch.equal(step(model, inputs)[1], gradient)
    kinds = [type(module) for module in build("bert").modules()]
    assert [type(module) for module in model.modules()] != kinds
    setup.restore()
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(step(model, inputs)[1], gradient)


def test_two_layers_are_on_the_device_and_no_more() -> None:
    model = build("bert", num_hidden_layers=6)
    layers = list(model.bert.encoder.layer)
    setup, host = away(model)
    most: list[int] = []

    def note(*_: Any) -> None:
        most.append(host.resident_bytes)

    for layer in layers:
        for module in layer.modules():
            module.register_forward_hook(note)
            if isinstance(module, nn.Linear):
                module.weight.register_hook(note)
    layer_bytes = sum(-(-p.nbytes // 512) * 512 for p in layers[0].parameters())
    step(model, batch_for(model))
    assert max(most) == 2 * layer_bytes
    model.eval()
    most.clear()
    with torch.no_grad():
        model(**batch_for(model))
    assert max(most) == 2 * layer_bytes
    host.release()
    assert host.resident_bytes == 0
    assert all(p.untyped_storage().nbytes() == 0 for layer in layers for p in layer.parameters())
    setup.restore()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in layers[0].parameters())


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_training_with_weights_away_is_the_same_bit_by_bit(dtype: Any) -> None:
    found = []
    for weights in (False, True):
        model = build("bert")
        setup = setup_for(model, learning_rate=1e-3, max_grad_norm=CLIP)
        offload = OptimizerOffload(weights=weights, dtype=dtype)
        offload.attach(setup, LateLink(), LateLink())
        assert setup.make_optimizer is not None
        optimizer = setup.make_optimizer(groups_of(model), setup.args)
        train(model, optimizer, range(4))
        found.append((weights_of_state(model), optimizer.fp32_state_dict(model)))
        setup.restore()
        masters = found[-1][1]
        assert all(torch.equal(p, masters[name]) for name, p in model.named_parameters())
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def weights_of_state(model: nn.Module) -> Tensor:
    state = model.state_dict()
    return torch.cat([state[name].flatten().float() for name, _ in model.named_parameters()])


def test_states_are_saved_and_loaded_while_weights_are_away() -> None:
    model, other = build("bert"), build("bert")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    _, host = away(model)
    host.release()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.01)
    model.load_state_dict(other.state_dict())
    inputs = batch_for(other)
    assert torch.equal(step(model, inputs)[1], step(other, inputs)[1])


def test_lora_beside_weights_away() -> None:
    from memfit.models.layers import add_lora

    model = add_lora(build("bert"), 2)
    inputs = batch_for(model)
    _, gradient = step(model, inputs)
    away(model)
    assert torch.equal(step(model, inputs)[1], gradient)
