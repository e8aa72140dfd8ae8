"""Offload and recomputation on a CUDA card: bits, bytes, no waiting, seconds.

Needs pytest, torch and transformers alone. Where a plain step itself is not the same twice (atomic
additions), an offloaded one may differ by as much; where it is, by not one bit.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from memfit.strategies import ActivationOffload, Checkpointing, OptimizerOffload, Setup
from memfit.strategies.offload.activation_offload import ActivationHost
from memfit.strategies.offload.host_memory import CudaLink
from memfit.strategies.packing.packed_model import PackedModel
from memfit.training.limits import pinned_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

MIB = 2**20
LAYERS = 8
SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "num_labels": 3,
    "hidden_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "max_position_embeddings": 140,
    "attn_implementation": "eager",
}
SPECIAL = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SHAPE),
    "albert": ("Albert", {**SHAPE, "embedding_size": 128}),
    "modernbert": ("ModernBert", {**SHAPE, **SPECIAL, "eos_token_id": 3, "mlp_dropout": 0.1}),
}


def build(name: str = "bert", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    prefix, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**settings, **changes})
    model = getattr(transformers, f"{prefix}ForSequenceClassification")(config)
    return model.to("cuda", dtype).train()


def batch_for(model: Any, rows: int = 16, tokens: int = 128, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(tokens) < torch.randint(3, tokens + 1, (rows, 1), generator=generator)
    ids = torch.randint(5, 1000, (rows, tokens), generator=generator)
    batch = {
        "input_ids": torch.where(mask, ids, model.config.pad_token_id),
        "attention_mask": mask.long(),
        "labels": torch.arange(rows) % 3,
    }
    return {name: column.cuda() for name, column in batch.items()}


def setup_for(model: nn.Module, **training: Any) -> Setup:
    args = transformers.TrainingArguments("unused", report_to=[], **training)
    return Setup(model=model, args=args, device=torch.device("cuda", 0))


def offload(model: nn.Module, **settings: Any) -> tuple[Setup, ActivationHost, CudaLink]:
    setup = setup_for(model)
    link = CudaLink(setup.device)
    return setup, ActivationOffload(**settings).attach(setup, link), link


def gradient_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    model.zero_grad()
    torch.manual_seed(7)
    model(**inputs).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_same(found: Tensor, plain: Tensor, again: Tensor) -> None:
    """No further away than one plain step is from another; equal where these are."""
    noise = float((plain - again).abs().max())
    assert float((found - plain).abs().max()) <= 4 * noise


def peak_bytes(body: Callable[[], Any]) -> int:
    """Of the second call: the first one loads kernels and chooses algorithms."""
    for _ in range(2):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        body()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def seconds_of(body: Callable[[], Any], count: int = 5) -> float:
    times = []
    for _ in range(count + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        body()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[count // 2]


# ---- recomputation ----


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_layers_give_the_same_gradients_for_less_memory(name: str) -> None:
    model = build(name)
    inputs = batch_for(model)
    plain, again = gradient_of(model, inputs), gradient_of(model, inputs)
    plain_peak = peak_bytes(lambda: gradient_of(model, inputs))
    Checkpointing().apply(setup_for(model))
    assert_same(gradient_of(model, inputs), plain, again)
    assert peak_bytes(lambda: gradient_of(model, inputs)) < 0.85 * plain_peak


# ---- activations ----


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recomputed", [False, True])
def test_offloaded_activations_give_the_same_gradients(name: str, recomputed: bool) -> None:
    model = build(name)
    inputs = batch_for(model)
    plain, again = gradient_of(model, inputs), gradient_of(model, inputs)
    if recomputed:
        Checkpointing().apply(setup_for(model))
    _, host, _ = offload(model)
    for _ in range(3):
        assert_same(gradient_of(model, inputs), plain, again)
    assert host.copied_bytes > 0


def test_batches_of_changing_size_reuse_the_pinned_memory() -> None:
    model = build()
    plain = {rows: gradient_of(model, batch_for(model, rows)) for rows in (4, 16, 9)}
    again = {rows: gradient_of(model, batch_for(model, rows)) for rows in plain}
    offload(model)
    gradient_of(model, batch_for(model, 16))
    reserved = pinned_bytes()
    for rows in (4, 16, 9, 16, 4):
        assert_same(gradient_of(model, batch_for(model, rows)), plain[rows], again[rows])
    assert pinned_bytes() == reserved


def test_the_peak_falls_by_all_but_a_few_layers_and_is_the_same_every_step() -> None:
    model = build(dtype=torch.bfloat16)
    inputs = batch_for(model, rows=64)
    plain = peak_bytes(lambda: gradient_of(model, inputs))
    _, host, _ = offload(model)
    peaks = {peak_bytes(lambda: gradient_of(model, inputs)) for _ in range(3)}
    a_layer = host.copied_bytes / (LAYERS - 1)
    assert len(peaks) == 1
    assert plain - peaks.pop() > (LAYERS - 4) * a_layer
    print(
        f"\nplain {plain / MIB:.0f} MiB, a layer {a_layer / MIB:.0f} MiB, fell by "
        f"{(plain - peak_bytes(lambda: gradient_of(model, inputs))) / MIB:.0f} MiB"
    )


def test_offload_beside_recomputation_is_the_smallest() -> None:
    model = build(dtype=torch.bfloat16, num_hidden_layers=16)
    inputs = batch_for(model, rows=128)
    Checkpointing().apply(setup_for(model))
    recomputed = peak_bytes(lambda: gradient_of(model, inputs))
    _, host, _ = offload(model)
    both = peak_bytes(lambda: gradient_of(model, inputs))
    hidden = 128 * 128 * 512 * 2
    assert host.copied_bytes == 15 * hidden
    # The gradients that have come meanwhile take some of it back.
    assert recomputed - both > 4 * hidden


def test_an_offloaded_step_never_waits_for_the_device() -> None:
    model = build(dtype=torch.bfloat16)
    with PackedModel(model) as packer:
        batch = packer.pack({n: x.cpu() for n, x in batch_for(model).items()}).to("cuda")
        inputs = batch.inputs(labels=False)
        setup, host, _ = offload(model, min_bytes=1024)
        model(**inputs).logits.sum().backward()  # loads kernels, pins memory
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(**inputs).logits.sum().backward()
            host.settle()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert host.copied_bytes > 0
        setup.restore()


def test_copies_beside_the_computation_beat_torchs_own_offload() -> None:
    model = build(dtype=torch.bfloat16)
    inputs = batch_for(model, rows=128)

    def waiting() -> None:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            gradient_of(model, inputs)

    plain = seconds_of(lambda: gradient_of(model, inputs))
    theirs = seconds_of(waiting)
    offload(model)
    ours = seconds_of(lambda: gradient_of(model, inputs))
    print(f"\nplain {plain * 1e3:.1f} ms, ours {ours * 1e3:.1f} ms, save_on_cpu {theirs * 1e3:.1f}")
    assert ours < 0.9 * theirs


def test_a_graph_that_is_dropped_in_flight_hurts_nobody() -> None:
    model = build()
    inputs = batch_for(model)
    plain, again = gradient_of(model, inputs), gradient_of(model, inputs)
    offload(model)
    for _ in range(3):
        loss = model(**inputs).loss
        del loss
        assert_same(gradient_of(model, inputs), plain, again)


# ---- optimizer ----


def make_optimizer(setup: Setup, model: nn.Module) -> Any:
    assert setup.make_optimizer is not None
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return setup.make_optimizer(groups, setup.args)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_update_is_adamws_on_the_gradients_that_came(weights: bool, dtype: Any) -> None:
    """The reference gets the very gradients of the run, so not one bit may differ."""
    model = build()
    setup = setup_for(model, learning_rate=1e-3, max_grad_norm=0.5)
    masters = {p: p.detach().to("cpu", copy=True) for p in model.parameters()}
    sums: dict[Tensor, Tensor] = {}

    def note(p: Tensor) -> None:
        arrived = p.grad.to("cpu", torch.float32, copy=True)  # type: ignore[union-attr]
        sums[p] = sums[p] + arrived if p in sums else arrived

    for p in model.parameters():  # before the optimizer's own hooks, so called first
        p.register_post_accumulate_grad_hook(note)
    OptimizerOffload(weights=weights, dtype=dtype).apply(setup)
    optimizer = make_optimizer(setup, model)
    groups = [
        {"params": [masters[p] for p in group["params"]], "weight_decay": group["weight_decay"]}
        for group in optimizer.param_groups
    ]
    reference = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    for number in range(3):
        for part in range(2):
            model(**batch_for(model, seed=2 * number + part)).loss.backward()
        assert all(p.grad is None for p in model.parameters())
        for p, master in masters.items():
            master.grad = sums[p]
        norm = nn.utils.clip_grad_norm_(list(masters.values()), 0.5)
        sums.clear()
        assert float(optimizer.measure()) == float(norm)
        optimizer.step()
        reference.step()
    state = model.state_dict()
    setup.restore()
    for name, p in model.named_parameters():
        assert torch.equal(state[name].cpu(), masters[p].to(state[name].dtype))
        assert torch.equal(p.detach().cpu(), masters[p])  # undone, a weight has all its bits again


def test_neither_gradients_nor_state_are_on_the_device() -> None:
    model = build(num_hidden_layers=16, vocab_size=20_000)
    weights = sum(p.nbytes for p in model.parameters())
    inputs = batch_for(model, rows=2, tokens=16)
    gradient_of(model, inputs)  # the libraries' own memory comes with the first products
    model.zero_grad()
    setup = setup_for(model)
    before = torch.cuda.memory_allocated()
    OptimizerOffload().apply(setup)
    optimizer = make_optimizer(setup, model)

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()

    peak = peak_bytes(step)
    assert torch.cuda.memory_allocated() - before < 8 * MIB
    # 64 MiB of slots, the gradient of the embeddings, a small batch.
    assert peak < 160 * MIB < weights
    print(f"\nweights {weights / MIB:.0f} MiB, above them at the peak {peak / MIB:.0f} MiB")


# ---- weights ----


@pytest.mark.parametrize("name", ["bert", "modernbert"])
@pytest.mark.parametrize("beside", ["nothing", "checkpointing", "activations", "both"])
def test_layers_fetched_in_time_give_the_same_gradients(name: str, beside: str) -> None:
    model = build(name)
    inputs = batch_for(model)
    plain, again = gradient_of(model, inputs), gradient_of(model, inputs)
    setup = setup_for(model)
    if beside in ("checkpointing", "both"):
        Checkpointing().apply(setup)
    if beside in ("activations", "both"):
        ActivationOffload().apply(setup)
    OptimizerOffload(weights=True).apply(setup)
    for _ in range(3):
        assert_same(gradient_of(model, inputs), plain, again)
    setup.restore()
    assert_same(gradient_of(model, inputs), plain, again)


def test_about_two_layers_of_weights_are_on_the_device() -> None:
    model = build(num_hidden_layers=16)
    a_layer = sum(p.nbytes for p in model.bert.encoder.layer[0].parameters())
    inputs = batch_for(model, rows=2, tokens=16)
    gradient_of(model, inputs)  # the libraries' own memory comes with the first products
    model.zero_grad()
    setup = setup_for(model)
    full = torch.cuda.memory_allocated()
    OptimizerOffload(weights=True).apply(setup)
    optimizer = make_optimizer(setup, model)

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()

    step()
    gc.collect()
    assert full - torch.cuda.memory_allocated() > 15 * a_layer
    peak = peak_bytes(step)
    # Two layers' weights, 64 MiB of gradients on their way, a small batch.
    assert peak < 2 * a_layer + 100 * MIB
    setup.restore()


# ---- all of it ----


@pytest.mark.parametrize(("weights", "limit_gib"), [(False, 1.0), (True, 0.6)])
def test_bert_large_trains_all_its_parameters_in_a_gibibyte(
    weights: bool, limit_gib: float
) -> None:
    """32 texts of 2,700 tokens a step in two packed micro-batches, everything offloaded."""
    changes = {
        "vocab_size": 21128,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 512,
        "attn_implementation": "sdpa",
    }
    with torch.device("cuda"):
        model = build(**changes)
    setup = setup_for(model, learning_rate=2e-5)
    with PackedModel(model) as packer:
        Checkpointing().apply(setup)
        ActivationOffload().apply(setup)
        OptimizerOffload(weights=weights, dtype="bfloat16").apply(setup)
        optimizer = make_optimizer(setup, model)
        batches = [_texts(seed) for seed in range(2)]

        def step() -> None:
            for batch in batches:
                inputs = packer.pack(batch).to("cuda").inputs()
                (model(**inputs).loss / len(batches)).backward()
            optimizer.step()

        gc.collect()
        torch.cuda.empty_cache()
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            step()
        peak_gib = torch.cuda.max_memory_allocated() / 2**30
        seconds = seconds_of(step, 3)
        setup.restore()
    print(f"\nweights away: {weights}, peak {peak_gib:.2f} GiB, {seconds:.3f} s a step")
    assert peak_gib <= limit_gib


def _texts(seed: int) -> dict[str, Tensor]:
    """16 texts of 84 tokens on average, as in hotel reviews cut at 128."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(128) < torch.randint(41, 129, (16, 1), generator=generator)
    ids = torch.randint(5, 21128, (16, 128), generator=generator)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask.long(),
        "labels": torch.arange(16) % 2,
    }
