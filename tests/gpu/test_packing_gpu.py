"""Packing on a CUDA card: every kernel, whole models, no waiting for the device, CUDA graphs.

Needs pytest, torch and transformers alone. Numbers are compared with fp32 or fp64 ones of the
same card, and half precision with what half precision itself costs the padded model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from memfit.engine.packed_batch import weighted_loss
from memfit.strategies.packing.packed_attention import (
    Packed,
    choose_kernel,
    efficient,
    flash,
    repadded,
)
from memfit.strategies.packing.packed_model import PackedModel, packing_problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

LENGTHS = (37, 0, 128, 1, 64, 90, 0, 128)
HEADS, WIDTH = 4, 64
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-5}
KERNELS = {"flash": flash, "efficient": efficient, "repadded": repadded}


def cu_seqlens(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    ends = torch.tensor((0, *lengths)).cumsum(0)
    return ends.to("cuda", torch.int32)


def qkv(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (sum(LENGTHS), HEADS, WIDTH)
    return [
        torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_()
        for _ in range(3)
    ]


def reference(q: Tensor, k: Tensor, v: Tensor, scaling: float, reach: int | None) -> Tensor:
    """fp64 softmax attention under a mask of blocks and bands."""
    text = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).cuda()
    allowed = text[:, None] == text
    if reach is not None:
        token = torch.arange(len(text), device="cuda")
        allowed = allowed & ((token[:, None] - token).abs() <= reach)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


CASES = [
    ("flash", torch.bfloat16, None),
    ("flash", torch.float16, None),
    ("flash", torch.bfloat16, 16),
    ("flash", torch.float16, 3),
    ("efficient", torch.float32, None),
    ("efficient", torch.float16, None),
    ("efficient", torch.bfloat16, None),
    ("repadded", torch.float32, None),
    ("repadded", torch.float32, 16),
    ("repadded", torch.float16, 16),
    ("repadded", torch.bfloat16, None),
]


@pytest.mark.parametrize(("kernel", "dtype", "reach"), CASES)
def test_kernels_equal_the_reference_with_their_gradients(
    kernel: str, dtype: torch.dtype, reach: int | None
) -> None:
    leaves = qkv(dtype)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = reference(*exact, 0.125, reach)
    output = KERNELS[kernel](*leaves, Packed(cu_seqlens(), 128, 0.0, 0.125, reach))
    assert output.dtype == dtype
    tolerance = TOLERANCE[dtype]
    assert _error(output, expected) <= tolerance
    direction = torch.randn_like(output)
    ours = torch.autograd.grad(output, leaves, direction)
    theirs = torch.autograd.grad(expected, exact, direction.double())
    for mine, other in zip(ours, theirs, strict=True):
        assert _error(mine, other) <= tolerance


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("flash", torch.bfloat16),
        ("flash", torch.float16),
        ("repadded", torch.float32),
    ],
)
def test_dropout_drops_its_share_and_scales_the_rest(kernel: str, dtype: torch.dtype) -> None:
    """With one-hot values the output is the weights themselves."""
    length, p = 64, 0.25
    torch.manual_seed(0)
    q, k = torch.randn(2, 2 * length, 16, length, device="cuda", dtype=dtype)
    v = torch.eye(length, device="cuda", dtype=dtype).repeat(2, 1)
    v = v[:, None, :].expand(2 * length, 16, length).contiguous()
    cu = cu_seqlens((length, length))

    def weights(dropout: float) -> Tensor:
        return KERNELS[kernel](q, k, v, Packed(cu, length, dropout, 0.02)).float()

    exact, kept = weights(0.0), weights(p)
    dropped = float((kept == 0).float().mean())
    # Flash rounds the probability to 1/255; the draws' own spread is below 0.002 here.
    assert abs(dropped - p) < 0.008
    survivors = kept != 0
    ratio = kept[survivors] / exact[survivors]
    assert abs(float(ratio.mean()) - 1 / (1 - p)) < 0.01
    assert not torch.equal(kept != 0, weights(p) != 0)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("flash", torch.bfloat16), ("repadded", torch.float32)],
)
def test_the_backward_pass_uses_the_draw_of_the_forward_pass(
    kernel: str, dtype: torch.dtype
) -> None:
    """Attention is linear in v: <d sum(out * g) / dv, v> is sum(out * g) of the same draw."""
    q, k, v = qkv(dtype)
    torch.manual_seed(3)
    output = KERNELS[kernel](q, k, v, Packed(cu_seqlens(), 128, 0.5, 0.125))
    torch.manual_seed(3)
    again = KERNELS[kernel](q, k, v, Packed(cu_seqlens(), 128, 0.5, 0.125))
    assert torch.equal(output, again)
    direction = output.detach()
    (gradient,) = torch.autograd.grad(output, v, direction)
    left = float((gradient.double() * v.detach().double()).sum())
    right = float(direction.double().square().sum())
    assert abs(left - right) <= 1e-2 * abs(right)


def test_the_kernel_is_the_best_the_card_and_the_precision_allow() -> None:
    half = torch.empty(4, 2, 64, device="cuda", dtype=torch.float16)
    full = half.float()
    new_card = torch.cuda.get_device_capability() >= (8, 0)
    assert choose_kernel(half, None) is (flash if new_card else efficient)
    assert choose_kernel(half, 8) is (flash if new_card else repadded)
    assert choose_kernel(full, None) is efficient
    assert choose_kernel(full, None, 0.1) is repadded
    assert choose_kernel(full, 8) is repadded
    assert choose_kernel(full[..., :6], None) is repadded
    with _flash_off():
        assert choose_kernel(half, None) is efficient


SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "num_labels": 3,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 140,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DISTILBERT = {
    "vocab_size": 211,
    "num_labels": 3,
    "dim": 128,
    "n_layers": 3,
    "n_heads": 2,
    "hidden_dim": 256,
    "max_position_embeddings": 140,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}
MODERNBERT = {
    **{name: value for name, value in SHAPE.items() if "dropout" not in name},
    "num_hidden_layers": 4,
    "local_attention": 32,
    "pad_token_id": 0,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SHAPE),
    "roberta": ("Roberta", {**SHAPE, "type_vocab_size": 1, "pad_token_id": 1}),
    "electra": ("Electra", {**SHAPE, "embedding_size": 64}),
    "albert": ("Albert", {**SHAPE, "embedding_size": 64, "classifier_dropout_prob": 0.0}),
    "distilbert": ("DistilBert", DISTILBERT),
    "modernbert-mean": ("ModernBert", {**MODERNBERT, "classifier_pooling": "mean"}),
    "modernbert-cls": ("ModernBert", {**MODERNBERT, "classifier_pooling": "cls"}),
}
every_model = pytest.mark.parametrize("name", MODELS)


def build(name: str, **changes: Any) -> Any:
    prefix, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**settings, **changes})
    model = getattr(transformers, f"{prefix}ForSequenceClassification")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.03)
    return model.cuda().train()


def padded_batch(model: Any, seed: int = 1, rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 129, (rows, 1), generator=generator)
    mask = torch.arange(128) < lengths
    ids = torch.randint(5, 211, (rows, 128), generator=generator)
    return {
        "input_ids": torch.where(mask, ids, model.config.pad_token_id),
        "attention_mask": mask.long(),
        "labels": torch.randint(0, 3, (rows,), generator=generator),
    }


def step(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits and all gradients as one vector, in fp32."""
    model.zero_grad()
    output = model(**{n: x.cuda() if isinstance(x, Tensor) else x for n, x in inputs.items()})
    output.loss.backward()
    gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return output.logits.detach().float(), torch.cat(gradients)


@every_model
def test_fp32_packed_equals_padded(name: str) -> None:
    model = build(name)
    batch = padded_batch(model)
    logits, gradient = step(model, batch)
    with PackedModel(model) as packer:
        ours, our_gradient = step(model, packer.pack(batch).inputs())
        bucket = packer.pack(batch, pad_to_tokens=1024, pad_to_rows=10, max_seqlen=128)
        theirs, their_gradient = step(model, bucket.inputs())
    assert _error(ours, logits) <= 1e-5
    assert float((our_gradient - gradient).abs().max() / gradient.abs().max()) <= 1e-5
    assert _error(theirs[:8], logits) <= 1e-5
    assert float((their_gradient - gradient).abs().max() / gradient.abs().max()) <= 1e-5


@every_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("older_card", [False, True])
def test_half_precision_costs_packed_no_more_than_padded(
    name: str, dtype: torch.dtype, older_card: bool
) -> None:
    exact = build(name)
    batch = padded_batch(exact)
    logits, gradient = step(exact, batch)
    model = copy.deepcopy(exact).to(dtype)
    padded_logits, padded_gradient = step(model, batch)
    with PackedModel(model) as packer, _flash_off(older_card):
        ours, our_gradient = step(model, packer.pack(batch).inputs())
    padded_error = float((padded_gradient - gradient).norm() / gradient.norm())
    our_error = float((our_gradient - gradient).norm() / gradient.norm())
    # No bound on the error itself: bf16 alone is 6 to 12 % away in these models, padded too.
    assert our_error <= 1.25 * padded_error + 1e-3
    assert _error(ours, logits) <= 2 * _error(padded_logits, logits) + 5e-3


@every_model
def test_models_on_the_card_are_recognised(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert packing_problem(build(name).to(dtype)) == ""


@every_model
def test_a_packed_step_never_waits_for_the_device(name: str) -> None:
    model = build(name).to(torch.bfloat16)
    with PackedModel(model) as packer:
        inputs = packer.pack(padded_batch(model)).to("cuda").inputs(labels=False)
        model(**inputs).logits.sum().backward()  # the first call may load kernels
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(**inputs).logits.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


# transformers has no checkpointing for ALBERT's shared layers.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "albert"])
def test_checkpointed_layers_recompute_with_boundaries_and_the_same_dropout(name: str) -> None:
    bert_like = name in ("bert", "roberta", "electra")
    changes = {"attention_probs_dropout_prob" if bert_like else "attention_dropout": 0.5}
    gradients = []
    for checkpointing in (False, True):
        model = build(name, **changes).to(torch.bfloat16)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with PackedModel(model) as packer:
            torch.manual_seed(5)
            gradients.append(step(model, packer.pack(padded_batch(model)).inputs())[1])
    # Flash adds up the queries' gradients in whatever order blocks finish.
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) <= 1e-2


def _capture(model: Any, static: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    def forward_backward() -> Tensor:
        logits = model(**static.inputs(labels=False)).logits
        loss = weighted_loss(logits.float(), static.labels, static.row_weight / 8)
        loss.backward()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward_backward()
    torch.cuda.current_stream().wait_stream(side)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = forward_backward()
    return graph, loss


SHAPES = {"pad_to_tokens": 1024, "pad_to_rows": 10, "max_seqlen": 128}


@pytest.mark.parametrize("name", ["bert", "modernbert-mean", "distilbert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_captured_graph_serves_batches_of_any_lengths(name: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    with PackedModel(model) as packer:
        static = packer.pack(padded_batch(model, 0), **SHAPES).to("cuda")
        graph, loss = _capture(model, static)
        for seed in (1, 2, 3):
            batch = padded_batch(model, seed)
            static.copy_from(packer.pack(batch, **SHAPES))
            model.zero_grad(set_to_none=False)
            graph.replay()
            torch.cuda.synchronize()
            found = torch.cat([p.grad.float().flatten() for p in model.parameters()])
            eager = copy.deepcopy(model)
            expected = eager(**{n: x.cuda() for n, x in batch.items()})
            for parameter in eager.parameters():
                parameter.grad = torch.zeros_like(parameter)
            expected.loss.backward()
            gradient = torch.cat([p.grad.float().flatten() for p in eager.parameters()])
            loss_found, loss_expected = float(loss.detach()), float(expected.loss.detach())
            assert abs(loss_found - loss_expected) <= tolerance * loss_expected
            assert float((found - gradient).norm() / gradient.norm()) <= 3 * tolerance


def test_every_replay_draws_fresh_attention_dropout() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = build("bert", attention_probs_dropout_prob=0.3).to(dtype)
        with PackedModel(model) as packer:
            static = packer.pack(padded_batch(model), **SHAPES).to("cuda")
            graph, loss = _capture(model, static)
            losses = set()
            for _ in range(5):
                graph.replay()
                losses.add(float(loss))
        assert len(losses) == 5


def test_batches_are_pinned_and_copied_without_waiting() -> None:
    model = build("bert")
    with PackedModel(model) as packer:
        pinned = packer.pack(padded_batch(model)).pin_memory()
        assert pinned.input_ids.is_pinned()
        moved = pinned.to("cuda", non_blocking=True)
        assert torch.equal(moved.input_ids.cpu(), pinned.input_ids)
        assert moved.cu_seqlens.is_cuda


class _flash_off:  # noqa: N801
    """torch's own switch, as on a card before capability 8.0."""

    def __init__(self, off: bool = True) -> None:
        self._off = off

    def __enter__(self) -> None:
        torch.backends.cuda.enable_flash_sdp(not self._off)

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.enable_flash_sdp(True)


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest expected value."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max())
