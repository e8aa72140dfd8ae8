"""Recomputed layers: the same gradients bit by bit, less memory, on models of many families."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from strategy_models import DEPTH, MODELS, batch_for, build, peak_bytes, setup_for, step
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from memfit.errors import ConfigError
from memfit.strategies import Checkpointing, Fidelity, Setup, activation_checkpointing
from memfit.strategies.packing.packed_model import PackedModel

# transformers' DeBERTa still uses torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

every_model = pytest.mark.parametrize("name", MODELS)


def recompute(model: nn.Module, **settings: Any) -> Setup:
    setup = setup_for(model)
    Checkpointing(**settings).apply(setup)
    return setup


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every call that is checkpointed."""
    found: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return checkpoint(*args, **kwargs)

    monkeypatch.setattr(activation_checkpointing, "checkpoint", counted)
    return found


@every_model
@pytest.mark.parametrize("layers", [None, 2])
def test_gradients_are_the_plain_steps_bit_by_bit_with_dropout(
    name: str, layers: int | None, calls: list[int]
) -> None:
    model = build(name)
    inputs = batch_for(model)
    logits, gradient = step(model, inputs)
    recompute(model, layers=layers)
    ours, our_gradient = step(model, inputs)
    assert len(calls) == (layers or DEPTH)
    assert torch.equal(ours, logits)
    assert torch.equal(our_gradient, gradient)
    assert float(gradient.norm()) > 0


@pytest.mark.parametrize("name", ["bert", "albert", "modernbert", "deberta-v2"])
def test_each_layer_recomputed_takes_less_memory(name: str) -> None:
    model = build(name)
    peaks = [peak_bytes(model)]
    for layers in range(1, DEPTH + 1):
        setup = recompute(model, layers=layers)
        peaks.append(peak_bytes(model))
        setup.restore()
    assert all(more > less for more, less in itertools.pairwise(peaks[:DEPTH]))
    # With all but one recomputed, the working layer of backward is as large as the one kept.
    assert peaks[DEPTH] <= peaks[DEPTH - 1]
    # One layer's work and four inputs instead of four layers.
    assert peaks[DEPTH] < 0.6 * peaks[0]
    assert peak_bytes(model) == peaks[0]


def test_the_first_layers_are_a_better_choice_than_the_last() -> None:
    """What the module's comment says, measured: the same k from the top needs a layer more."""
    model = build("bert")
    setup = recompute(model, layers=2)
    first = peak_bytes(model)
    setup.restore()
    # Stock checkpointing, switched on for two layers by hand, is the other choice.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.bert.encoder.layer[:2]:
        layer.gradient_checkpointing = False
    assert first < 0.95 * peak_bytes(model)


def test_it_costs_what_stock_checkpointing_costs_and_no_more() -> None:
    model = build("bert")
    setup = recompute(model)
    ours = peak_bytes(model)
    setup.restore()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert ours == pytest.approx(peak_bytes(model), rel=0.01)


def test_undo_gives_the_model_back_as_it_was() -> None:
    model = build("bert")
    kinds = [type(module) for module in model.modules()]
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    setup = recompute(model)
    Checkpointing().apply(setup)
    assert [type(module) for module in model.modules()] != kinds
    assert [type(module).__name__ for module in model.modules()] == [k.__name__ for k in kinds]
    setup.restore()
    assert [type(module) for module in model.modules()] == kinds
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooks


def test_evaluation_and_forward_passes_without_gradients_recompute_nothing(
    calls: list[int],
) -> None:
    model = build("albert")
    recompute(model)
    inputs = batch_for(model)
    with torch.no_grad():
        model(**inputs)
    model.eval()
    model(**inputs).loss.backward()
    assert not calls
    model.train()
    model(**inputs)
    assert len(calls) == DEPTH


@pytest.mark.parametrize("name", ["bert", "albert", "modernbert"])
def test_packed_batches_recompute_with_their_boundaries(name: str) -> None:
    model = build(name)
    with PackedModel(model) as packer:
        inputs = packer.pack(batch_for(model, rows=5)).inputs()
        logits, gradient = step(model, inputs)
        recompute(model)
        ours, our_gradient = step(model, inputs)
        assert torch.equal(ours, logits)
        assert torch.equal(our_gradient, gradient)


def test_two_packed_forward_passes_before_their_backward_do_not_mix() -> None:
    model = build("bert")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with PackedModel(model) as packer:
        batches = [packer.pack(batch_for(model, rows=rows)).inputs() for rows in (2, 5)]
        expected = sum(step(model, inputs)[1] for inputs in batches)
        recompute(model)
        model.zero_grad()
        losses = [model(**inputs).loss for inputs in batches]
        torch.stack(losses).sum().backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_gradients_flow_through_layers_above_frozen_ones(calls: list[int]) -> None:
    model = build("bert")
    for part in (model.bert.embeddings, model.bert.encoder.layer[0]):
        part.requires_grad_(False)
    inputs = batch_for(model)
    _, gradient = step(model, inputs)
    recompute(model, layers=2)
    _, ours = step(model, inputs)
    assert torch.equal(ours, gradient)
    # The frozen layer keeps nothing; the two lowest that learn are recomputed.
    assert len(calls) == 2
    assert model.bert.encoder.layer[1].attention.self.query.weight.grad is not None


def test_lora_adapters_get_their_gradients() -> None:
    from memfit.models.layers import add_lora

    model = add_lora(build("bert"), 2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    inputs = batch_for(model)
    _, gradient = step(model, inputs)
    recompute(model)
    _, ours = step(model, inputs)
    assert torch.equal(ours, gradient)


def test_a_copied_model_recomputes_its_own_layers(calls: list[int]) -> None:
    model = build("bert")
    recompute(model, layers=3)
    step(model, batch_for(model))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    inputs = batch_for(twin)
    assert torch.equal(step(twin, inputs)[1], step(build("bert"), inputs)[1])
    assert len(calls) == 2 * 3


def test_checkpointing_of_the_user_is_left_alone() -> None:
    strategy = Checkpointing()
    model = build("bert")
    assert strategy.fidelity is Fidelity.EXACT
    assert strategy.unavailable(setup_for(model)) == ""
    assert "already" in strategy.unavailable(setup_for(model, gradient_checkpointing=True))
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match="already"):
        strategy.apply(setup_for(model))


def test_a_model_without_layers_or_with_fewer_raises() -> None:
    with pytest.raises(ConfigError, match="no transformers model"):
        Checkpointing().apply(setup_for(nn.Sequential(nn.Linear(2, 2))))
    headless = build("bert")
    headless.bert.encoder = nn.Identity()
    with pytest.raises(ConfigError, match="no list of layers"):
        Checkpointing().apply(setup_for(headless))
    with pytest.raises(ConfigError, match="has 4 layers, not 5"):
        Checkpointing(layers=5).apply(setup_for(build("albert")))


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 layer"):
        Checkpointing(0)


def test_a_decoders_cache_is_not_filled_a_second_time() -> None:
    """GPT-2 hands its layers the cache by position, and caches by default."""
    config = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, use_cache=True,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
    ids = torch.randint(5, 40, (3, 12))
    model(input_ids=ids, labels=ids).loss.backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    recompute(model)
    model(input_ids=ids, labels=ids).loss.backward()
    again = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
