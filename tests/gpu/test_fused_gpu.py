"""Fused layers on a CUDA card: kernels, whole models, fresh masks in graphs, and the time.

Needs pytest, torch, triton and transformers alone. The last test prints what a step of
BERT-Large takes with and without (run with -s).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from memfit.strategies import Checkpointing, FusedLayers, Setup
from memfit.strategies.fused import fused_kernels_torch
from memfit.strategies.fused.fused_kernels import Drop, Seeds, keep_mask
from memfit.strategies.fused.fused_layers import fuse
from memfit.strategies.fused.layer_functions import dense_dropout_add_norm, joined_view
from memfit.strategies.packing.packed_model import PackedModel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# A step of the output's last bit at its largest value, and where sums were rounded before.
TOLERANCE = {BF16: 2**-7, FP16: 2**-10, FP32: 3e-6}
SHAPES = [(3, 312), (70, 768), (2816, 1024), (5, 4096)]
CASES = [(BF16, s) for s in SHAPES] + [(FP32, SHAPES[1]), (FP16, SHAPES[2])]
SMALL = {
    "vocab_size": 211, "num_labels": 3, "hidden_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 2, "intermediate_size": 512, "max_position_embeddings": 140,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    "electra": ("Electra", {"embedding_size": 64}),
    "ernie": ("Ernie", {}),
}
LARGE = {
    "vocab_size": 21128, "num_labels": 2, "hidden_size": 1024, "num_hidden_layers": 24,
    "num_attention_heads": 16, "intermediate_size": 4096,
}  # fmt: skip
TOKENS, TEXTS = 2816, 32


def drop_of(p: float, site: int = 5, number: int = 1) -> Drop:
    return Drop(p, torch.tensor([number * 0x9E3779B97F4A7C15 % 2**62], device="cuda"), site)


def randn(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest expected value."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max())


# ------------------------------------------------------------------------------ kernels


@pytest.mark.parametrize(("dtype", "shape"), CASES)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_norm_kernels_equal_the_plain_ones(
    dtype: torch.dtype, shape: tuple[int, int], p: float
) -> None:
    from memfit.strategies.fused import fused_kernels_triton

    torch.manual_seed(0)
    x, residual, d_output = randn(3, *shape, dtype=dtype)
    weight, bias = randn(2, shape[1], dtype=dtype)
    drop = drop_of(p) if p else None
    given = (x, residual, weight, bias, 1e-12, drop)
    expected = fused_kernels_torch.add_norm(*given)
    found = fused_kernels_triton.add_norm(*given)
    errors = [error(*pair) for pair in zip(found, expected, strict=True)]
    assert max(errors) <= TOLERANCE[dtype], errors
    back = (d_output, expected, weight, drop)
    pairs = zip(
        fused_kernels_triton.add_norm_backward(*back),
        fused_kernels_torch.add_norm_backward(*back),
        strict=True,
    )
    errors = [error(*pair) for pair in pairs]
    assert max(errors) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize(("dtype", "shape"), CASES)
@pytest.mark.parametrize("kind", ["erf", "tanh"])
def test_gelu_and_join_kernels_equal_the_plain_ones(
    dtype: torch.dtype, shape: tuple[int, int], kind: Any
) -> None:
    from memfit.strategies.fused import fused_kernels_triton

    torch.manual_seed(0)
    x, y, z = randn(3, *shape, dtype=dtype)
    found, expected = (k.gelu(x, kind) for k in (fused_kernels_triton, fused_kernels_torch))
    assert error(found, expected) <= TOLERANCE[dtype]
    ours, theirs = (
        k.gelu_backward(x, y.clone(), kind) for k in (fused_kernels_triton, fused_kernels_torch)
    )
    errors = [error(*pair) for pair in zip(ours, theirs, strict=True)]
    parts = (torch.cat([x, y], 1)[:, : shape[1]], y, z)
    joined, plain = (k.join(parts) for k in (fused_kernels_triton, fused_kernels_torch))
    assert torch.equal(joined[0], plain[0])
    errors.append(error(joined[1], plain[1]))
    assert max(errors) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_kernels_draw_exactly_the_mask_that_is_written_down(p: float) -> None:
    """With weights of 1 and x = 1, residual = 0, the sum itself is the scaled mask."""
    from memfit.strategies.fused import fused_kernels_triton

    ones, zeros = torch.ones(999, 1024, device="cuda"), torch.zeros(999, 1024, device="cuda")
    for site, number in ((0, 1), (47, 123456)):
        drop = drop_of(p, site, number)
        total = fused_kernels_triton.add_norm(ones, zeros, ones[0], zeros[0], 1e-12, drop).total
        assert torch.equal(total != 0, keep_mask(total.shape, drop))
        assert (
            abs(float((total == 0).double().mean()) - p) <= 4.5 * (p * (1 - p) / 999 / 1024) ** 0.5
        )
        assert abs(float(total.max()) * (1 - p) - 1) <= 1e-6


def test_the_gradient_passes_where_the_forward_pass_kept() -> None:
    x, residual, direction = randn(3, 64, 768).unbind()
    x.requires_grad_()
    weight, bias = torch.ones(768, device="cuda"), torch.zeros(768, device="cuda")
    drop = drop_of(0.3)
    same = torch.eye(768, device="cuda")  # a dense layer that changes nothing
    output = dense_dropout_add_norm(x, same, bias, residual, weight, bias, 1e-12, drop)
    (gradient,) = torch.autograd.grad(output, x, direction)
    assert torch.equal(gradient != 0, keep_mask(x.shape, drop))


# --------------------------------------------------------------------------- whole models


def build(name: str = "bert", dtype: torch.dtype = BF16, **changes: Any) -> Any:
    prefix, own = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**SMALL, **own, **changes})
    model = getattr(transformers, f"{prefix}ForSequenceClassification")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.03)
    return model.to("cuda", dtype).train()


def padded_batch(model: Any, seed: int = 1, rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(128) < torch.randint(3, 129, (rows, 1), generator=generator)
    ids = torch.randint(5, 211, (rows, 128), generator=generator)
    return {
        "input_ids": torch.where(mask, ids, model.config.pad_token_id).cuda(),
        "attention_mask": mask.long().cuda(),
        "labels": torch.randint(0, 3, (rows,), generator=generator).cuda(),
    }


def step(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits and all gradients as one vector, in fp32."""
    model.zero_grad()
    torch.manual_seed(7)
    output = model(**inputs)
    output.loss.backward()
    gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return output.logits.detach().float(), torch.cat(gradients)


def setup_of(model: Any) -> Setup:
    args = transformers.TrainingArguments("unused", report_to=[])
    return Setup(model=model, args=args, device=torch.device("cuda"))


@pytest.mark.parametrize("name", FAMILIES)
def test_fp32_equals_the_stock_model_padded_and_packed(name: str) -> None:
    model = build(name, FP32, **NO_DROPOUT)
    batch = padded_batch(model)
    logits, gradient = step(model, batch)
    setup = setup_of(model)
    assert FusedLayers().unavailable(setup) == ""
    FusedLayers().apply(setup)
    ours, our_gradient = step(model, batch)
    with PackedModel(model) as packer:
        theirs, their_gradient = step(model, packer.pack(batch).to("cuda").inputs())
    for found, expected in ((ours, logits), (theirs, logits)):
        assert error(found, expected) <= 1e-5
    for found in (our_gradient, their_gradient):
        assert error(found, gradient) <= 1e-5
    setup.restore()
    assert error(step(model, batch)[1], gradient) <= 1e-5


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_half_precision_costs_fused_no_more_than_stock(dtype: torch.dtype) -> None:
    exact = build("bert", FP32, **NO_DROPOUT)
    batch = padded_batch(exact)
    logits, gradient = step(exact, batch)
    model = copy.deepcopy(exact).to(dtype)
    fuse_later = copy.deepcopy(exact)
    with PackedModel(model) as packer:
        stock, stock_gradient = step(model, packer.pack(batch).to("cuda").inputs())
    fuse(fuse_later, Seeds())
    fuse_later.to(dtype)  # weights may be converted after the layers are fused
    with PackedModel(fuse_later) as packer:
        ours, our_gradient = step(fuse_later, packer.pack(batch).to("cuda").inputs())
    stock_error = float((stock_gradient - gradient).norm() / gradient.norm())
    our_error = float((our_gradient - gradient).norm() / gradient.norm())
    assert our_error <= 1.1 * stock_error + 1e-3
    assert error(ours, logits) <= 2 * error(stock, logits) + 5e-3
    for layer in fuse_later.base_model.encoder.layer:
        own = layer.attention.self
        weights = [own.query.weight, own.key.weight, own.value.weight]
        assert joined_view(weights) is not None


def test_recomputed_layers_draw_the_same_masks() -> None:
    model = build(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.0)
    batch = padded_batch(model)
    fuse(model, Seeds())
    with PackedModel(model) as packer:
        inputs = packer.pack(batch).to("cuda").inputs()
        _, expected = step(model, inputs)
        setup = setup_of(model)
        Checkpointing().apply(setup)
        _, found = step(model, inputs)
        _, again = step(model, inputs)
    # Flash adds up the queries' gradients in whatever order blocks finish; a mask of another
    # draw would differ by more than the gradient itself.
    assert float((found - expected).norm() / expected.norm()) <= 1e-2
    assert float((again - expected).norm() / expected.norm()) <= 1e-2


def test_a_fused_step_never_waits_for_the_device() -> None:
    model = build()
    fuse(model, Seeds())
    with PackedModel(model) as packer:
        inputs = packer.pack(padded_batch(model)).to("cuda").inputs(labels=False)
        model(**inputs).logits.sum().backward()  # the first call compiles and joins
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(**inputs).logits.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


# -------------------------------------------------------------------------------- graphs


@cache
def side_stream() -> torch.cuda.Stream:
    """One for all: autograd ties a parameter's accumulation to the stream it first ran on."""
    return torch.cuda.Stream()


@contextmanager
def on_side_stream() -> Iterator[None]:
    side = side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def captured(body: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Replays the body, and keeps alive what it reads; its result lies where it lay before."""
    with on_side_stream():
        for _ in range(2):
            body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side_stream()):
        output = body()

    def replay(_: Any = body) -> Tensor:
        graph.replay()
        return output

    return replay


def gradient_graph(model: Any, batch: dict[str, Tensor]) -> Callable[[], Tensor]:
    """A graph whose result is the gradient as one vector."""
    with PackedModel(model) as packer:
        static = packer.pack(batch, pad_to_tokens=1024, pad_to_rows=8, max_seqlen=128).to("cuda")

        def body() -> Tensor:
            logits = model(**static.inputs(labels=False)).logits
            loss = torch.nn.functional.cross_entropy(logits.float(), batch["labels"])
            found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            return torch.cat([g.float().flatten() for g in found if g is not None])

        return captured(body)


def test_every_replay_draws_fresh_masks_and_the_seed_repeats_them() -> None:
    model = build(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.0)
    batch = padded_batch(model)
    fuse(model, Seeds())
    replay = gradient_graph(model, batch)
    drawn = [replay().clone() for _ in range(4)]
    for one, other in pairwise(drawn):
        assert float((one - other).norm() / one.norm()) >= 0.05
    repeated = []
    for _ in range(2):
        torch.manual_seed(11)
        repeated.append(replay().clone())
    assert float((repeated[0] - repeated[1]).norm() / repeated[0].norm()) <= 1e-2


def test_recomputation_in_a_graph_draws_the_masks_of_its_replay() -> None:
    """The same seed, with and without recomputation, each from a graph of its own."""
    found = []
    for recompute in (False, True):
        model = build(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.0)
        fuse(model, Seeds())
        if recompute:
            Checkpointing().apply(setup_of(model))
        replay = gradient_graph(model, padded_batch(model))
        for seed in (1, 2):
            torch.manual_seed(seed)
            found.append(replay().clone())
    for plain, again in ((found[0], found[2]), (found[1], found[3])):
        assert float((plain - again).norm() / plain.norm()) <= 1e-2
    assert float((found[0] - found[1]).norm() / found[0].norm()) >= 0.05


# ---------------------------------------------------------------------------------- time


@pytest.fixture
def large() -> Iterator[Any]:
    """BERT-Large in bf16, each gradient freed once it is there."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**LARGE))
    model.to(BF16).train()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    yield model
    del model
    torch.cuda.empty_cache()


def large_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((TEXTS, 1), TOKENS // TEXTS)
    mask = torch.arange(128) < lengths
    ids = torch.randint(5, 21128, (TEXTS, 128), generator=generator)
    return {"input_ids": torch.where(mask, ids, 0), "attention_mask": mask.long()}


def timed(model: Any, label: str) -> tuple[float, float]:
    """Milliseconds of a replayed forward and backward, and the peak above the weights in MiB."""
    with PackedModel(model) as packer:
        static = packer.pack(large_batch(), pad_to_tokens=TOKENS, max_seqlen=128).to("cuda")

        def body() -> Tensor:
            loss = model(**static.inputs(labels=False)).logits.float().square().mean()
            loss.backward()
            return loss.detach()

        replay = captured(body)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with on_side_stream():
            body()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    for _ in range(10):
        replay()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(50):
        replay()
    torch.cuda.synchronize()
    milliseconds = (time.perf_counter() - begin) * 20
    print(f"\n{label}: {milliseconds:.2f} ms a step, {peak:.0f} MiB above the weights")
    return milliseconds, peak


def test_a_step_of_bert_large_is_faster_and_smaller(large: Any) -> None:
    stock_ms, stock_peak = timed(large, "stock")
    changes = fuse(large, Seeds())
    ours_ms, our_peak = timed(large, "fused")
    while changes:
        changes.pop()()
    assert ours_ms <= 0.9 * stock_ms
    # 24 of 34 bytes a token and unit of width are kept.
    assert our_peak <= 0.8 * stock_peak
