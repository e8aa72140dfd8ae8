"""Fused layers in whole models: the stock model's numbers, with everything that stands beside."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from strategy_models import LateLink, batch_for, build, setup_for, step
from torch import Tensor, nn

from memfit.errors import ConfigError
from memfit.memory.tracing.fake_tensors import fake_trace
from memfit.memory.tracing.operators import CudaKernels
from memfit.strategies import ActivationOffload, Checkpointing, Fidelity, FusedLayers
from memfit.strategies.fused.fused_kernels import Seeds
from memfit.strategies.fused.fused_layers import (
    fuse,
    fusing_problem,
    move_projections,
    projecting_layers,
)
from memfit.strategies.fused.layer_functions import joined_view
from memfit.strategies.lowbit.gradient_sinks import KeptInt8
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.number_formats import to_lowbit
from memfit.strategies.offload.optimizer_offload import HostWeights
from memfit.strategies.packing.packed_model import PackedModel

FUSED = ("bert", "roberta", "electra", "ernie")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
every_family = pytest.mark.parametrize("name", FUSED)


def model_of(name: str = "bert", **changes: Any) -> Any:
    """Weights, biases and norms that are all different, so that no mistake hides in a 0 or 1."""
    model = build(name, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def fused(model: Any, *, per_call: bool = False) -> list[Any]:
    return fuse(model, Seeds(per_call=per_call))


def close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Logits, and gradients of the largest one: float32's rounding through four layers."""
    assert float((found[0] - expected[0]).abs().max()) <= 1e-6
    assert float((found[1] - expected[1]).abs().max()) <= 2e-6 * float(expected[1].abs().max())


def projections(model: Any) -> list[list[Tensor]]:
    layers = model.base_model.encoder.layer
    return [
        [getattr(one.attention.self, n).weight for n in ("query", "key", "value")] for one in layers
    ]


@every_family
def test_logits_and_gradients_are_the_stock_models(name: str) -> None:
    model = model_of(name, **NO_DROPOUT)
    batch = batch_for(model)
    expected = step(model, batch)
    fused(model)
    close(step(model, batch), expected)
    with PackedModel(model) as packer:
        close(step(model, packer.pack(batch).inputs()), expected)
    assert all(joined_view(weights) is not None for weights in projections(model))


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"])
def test_the_approximations_of_gelu_are_fused_too(activation: str) -> None:
    model = model_of(hidden_act=activation, **NO_DROPOUT)
    batch = batch_for(model)
    expected = step(model, batch)
    fused(model)
    close(step(model, batch), expected)


@every_family
def test_undone_it_is_the_stock_model_bit_for_bit(name: str) -> None:
    model = model_of(name)
    batch = batch_for(model)
    kinds = [type(module) for module in model.modules()]
    expected = step(model, batch)
    changes = fused(model)
    step(model, batch)
    while changes:
        changes.pop()()
    assert [type(module) for module in model.modules()] == kinds
    assert all(joined_view(weights) is None for weights in projections(model))
    found = step(model, batch)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_parameters_stay_the_same_objects_under_the_same_names(tmp_path: Path) -> None:
    model = model_of(**NO_DROPOUT)
    batch = batch_for(model)
    before = dict(model.named_parameters())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    fused(model)
    logits, _ = step(model, batch)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).train()
    assert float((step(again, batch)[0] - logits).abs().max()) <= 1e-6


def test_converted_moved_and_copied_models_are_joined_again() -> None:
    model = model_of(**NO_DROPOUT)
    batch = batch_for(model)
    expected = step(model, batch)
    fused(model)
    step(model, batch)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert all(joined_view(weights) is None for weights in projections(model))
    close(step(model, batch), expected)
    assert all(joined_view(weights) is not None for weights in projections(model))
    twin = copy.deepcopy(model)
    close(step(twin, batch), expected)
    assert all(joined_view(weights) is not None for weights in projections(twin))
    mine, other = (projections(one)[0][0] for one in (model, twin))
    assert mine.data_ptr() != other.data_ptr()
    half = copy.deepcopy(model).to(torch.bfloat16)
    logits, gradient = step(half, batch)
    assert gradient.dtype == torch.bfloat16
    assert float((logits - expected[0]).abs().max()) <= 0.05
    difference = (gradient.float() - expected[1]).norm() / expected[1].norm()
    assert float(difference) <= 0.05


# ---------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("layers", [None, 2])
def test_recomputation_draws_the_masks_of_the_forward_pass(layers: int | None) -> None:
    model = model_of()
    batch = batch_for(model)
    fused(model)
    expected = step(model, batch)
    setup = setup_for(model)
    Checkpointing(layers=layers).apply(setup)
    found = step(model, batch)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    setup.restore()


def test_every_pass_draws_other_masks_and_the_seed_repeats_them() -> None:
    model = model_of(attention_probs_dropout_prob=0.0)
    batch = batch_for(model)
    fused(model)
    torch.manual_seed(3)
    with torch.no_grad():
        drawn = [model.base_model(batch["input_ids"])[0] for _ in range(3)]
        torch.manual_seed(3)
        again = model.base_model(batch["input_ids"])[0]
    assert torch.equal(again, drawn[0])
    assert not torch.equal(drawn[1], drawn[0])
    assert not torch.equal(drawn[2], drawn[1])
    model.eval()
    with torch.no_grad():
        assert torch.equal(*(model(**batch).logits for _ in range(2)))


def test_two_passes_before_a_backward_keep_their_masks_apart() -> None:
    """As a loss of one's own may ask (R-Drop): with a seed a call it also holds recomputed."""
    model = model_of()
    batch = batch_for(model)
    fused(model, per_call=True)

    def twice() -> Tensor:
        model.zero_grad()
        torch.manual_seed(7)
        losses = [model(**batch).loss for _ in range(2)]
        (losses[0] + 2 * losses[1]).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected = twice()
    setup = setup_for(model)
    Checkpointing().apply(setup)
    assert torch.equal(twice(), expected)
    setup.restore()


def test_dropout_in_the_model_has_the_stock_models_strength() -> None:
    """The mean of many passes' logits is the same, and so is their spread."""
    model = model_of(num_hidden_layers=1, attention_probs_dropout_prob=0.0)
    batch = batch_for(model)
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        with torch.no_grad():
            outputs.append(
                torch.stack([model.base_model(batch["input_ids"])[0] for _ in range(400)])
            )
        fused(model)
    stock, ours = outputs
    error = (ours.mean(0) - stock.mean(0)).abs() / (stock.std(0) * (2 / 400) ** 0.5)
    assert float(error.max()) <= 5.5
    assert abs(float(ours.std(0).mean() / stock.std(0).mean()) - 1) <= 0.02


# --------------------------------------------------------------------- what stands beside


def test_frozen_and_adapted_layers_keep_their_projections_as_they_are() -> None:
    settings = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=2, lora_dropout=0.0, target_modules=["query", "value"]
    )
    adapted = get_peft_model(model_of(**NO_DROPOUT), settings)
    frozen = model_of(**NO_DROPOUT)
    for layer in frozen.base_model.encoder.layer[:2]:
        layer.requires_grad_(False)
    for model, fewer in ((adapted, 4), (frozen, 2)):
        batch = batch_for(model)
        expected = step(model, batch)
        changes = fused(model)
        close(step(model, batch), expected)
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        wrapped = sum(type(m) is not nn.Linear and type(m).__name__ == "Linear" for m in linears)
        assert wrapped == 3 * (4 - fewer)
        while changes:
            changes.pop()()


def test_gradients_arrive_one_parameter_at_a_time_whole_and_contiguous() -> None:
    """As sinks take them: used, and freed at once."""
    model = model_of(**NO_DROPOUT)
    batch = batch_for(model)
    _, expected = step(model, batch)
    fused(model)
    found: dict[int, Tensor] = {}

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        assert parameter.grad.is_contiguous()
        found[id(parameter)] = parameter.grad.clone()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    model.zero_grad()
    model(**batch).loss.backward()
    gradient = torch.cat([found[id(p)].flatten() for p in model.parameters() if id(p) in found])
    assert float((gradient - expected).abs().max()) <= 2e-6 * float(expected.abs().max())


def test_the_low_bit_step_inside_backward_trains_fused_layers() -> None:
    """Weights are converted after the layers are fused, and moved while backward runs."""
    model = model_of()
    batch = batch_for(model)
    fused(model)
    remainders = to_lowbit(model, small_numel=256)
    optimizer = LowBitOptimizer(
        model.parameters(), lr=5e-3, small_numel=256, remainders=remainders, backend="torch"
    )
    KeptInt8(optimizer)
    torch.manual_seed(0)
    losses = []
    for _ in range(20):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] <= 0.2 * losses[0]
    assert all(parameter.grad is None for parameter in model.parameters())
    for weights in projections(model):
        joined = joined_view(weights)
        assert joined is not None
        assert torch.equal(joined, torch.cat([weight.detach() for weight in weights]))


def test_activations_on_the_host_come_back_the_same() -> None:
    model = model_of()
    batch = batch_for(model)
    fused(model)
    expected = step(model, batch)
    setup = setup_for(model)
    ActivationOffload(min_bytes=1).attach(setup, LateLink())
    for _ in range(2):
        found = step(model, batch)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    setup.restore()


def test_weights_on_the_host_are_left_where_they_are() -> None:
    model = model_of(**NO_DROPOUT)
    batch = batch_for(model)
    expected = step(model, batch)
    fused(model)
    hosted = HostWeights(model, model.base_model.encoder.layer, LateLink(), torch.device("cpu"))
    close(step(model, batch), expected)
    hosted.remove()
    close(step(model, batch), expected)


def test_a_layer_somebody_looks_into_is_left_alone() -> None:
    model = model_of(**NO_DROPOUT)
    batch = batch_for(model)
    seen: list[torch.Size] = []
    first, second = model.base_model.encoder.layer[:2]
    first.output.dense.register_forward_hook(lambda _m, _i, out: seen.append(out.shape))
    second.attention.self.key.register_forward_hook(lambda _m, _i, out: seen.append(out.shape))
    expected = step(model, batch)
    fused(model)
    close(step(model, batch), expected)
    assert len(seen) == 4


def test_autocast_runs_the_stock_layers() -> None:
    model = model_of(**NO_DROPOUT)
    batch = batch_for(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch).logits
        fused(model)
        assert torch.equal(model(**batch).logits, expected)


def test_a_trace_sees_what_the_layers_keep() -> None:
    """Of each token and layer: x, q, k, v, context, two sums, the norm's output, GELU's input."""
    width, inner, tokens = 32, 64, 48
    kept: dict[bool, list[int]] = {False: [], True: []}
    for fuses in kept:
        for depth in (2, 3):
            with fake_trace(CudaKernels((9, 0), 132)) as tracker:
                model = model_of(num_hidden_layers=depth)
                if fuses:
                    fused(model)
                before = tracker.live_bytes
                output = model(input_ids=torch.zeros(3, tokens // 3, dtype=torch.long))
                kept[fuses].append(tracker.live_bytes - before)
                output.logits.sum().backward()
    stock, ours = (deep - shallow for shallow, deep in kept.values())
    # Attention's own: a number a head and row, rows filled up to 32, and its random state.
    attention = 4 * 3 * 2 * 32 + 2 * 8
    # Beside the nine: a mean and a deviation a row of each norm.
    assert ours == 4 * tokens * (8 * width + inner + 2 * 2) + attention
    # The stock layer keeps GELU's output and two byte masks as well.
    assert stock == ours + tokens * (4 * inner + 2 * width)


# ----------------------------------------------------------------------- where it is offered


def test_it_is_exact_and_says_why_it_has_no_use_here() -> None:
    strategy = FusedLayers()
    assert strategy.fidelity is Fidelity.EXACT
    setup = setup_for(model_of())
    assert "CUDA" in strategy.unavailable(setup)
    with pytest.raises(ConfigError, match="CUDA"):
        strategy.apply(setup)
    card = replace(setup, device=torch.device("cuda"))
    assert strategy.unavailable(card) == ""
    half = setup_for(model_of(), bf16=True)
    assert "autocast" in strategy.unavailable(replace(half, device=torch.device("cuda")))


@pytest.mark.parametrize("name", ["albert", "distilbert", "modernbert", "mpnet", "qwen3"])
def test_other_families_are_refused_with_a_reason(name: str) -> None:
    assert "not built of BERT's layers" in fusing_problem(build(name))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "relu"}, "its activation is relu"),
        ({"chunk_size_feed_forward": 4}, "in pieces"),
        ({"is_decoder": True}, "is a decoder"),
    ],
)
def test_unusual_berts_are_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason in fusing_problem(build("bert", **changes))


def test_layers_of_ones_own_are_refused() -> None:
    model = build("bert")
    for layer in model.base_model.encoder.layer:
        for part in (layer.attention.output, layer.intermediate):
            part.__class__ = type("Own", (type(part),), {"forward": lambda _, *args: args[0]})
    assert "no layer" in fusing_problem(model)


def test_projections_go_to_the_device_as_neighbours() -> None:
    model = model_of()
    before = [[part.clone() for part in parts] for parts in projections(model)]
    layers = projecting_layers(model)
    fused(model)
    move_projections(layers, torch.device("cpu"))
    for parts, were in zip(projections(model), before, strict=True):
        assert joined_view(parts) is not None
        assert all(torch.equal(part, was) for part, was in zip(parts, were, strict=True))
