"""Training with low-bit AdamW on a CUDA card: bits, graphs, no waiting, bytes and milliseconds.

Needs pytest and torch alone. The measured times are printed.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfit.memory.device import has_triton
from memfit.strategies.lowbit.gradient_sinks import KeptGradients, KeptInt8, LowBitSink
from memfit.strategies.lowbit.host_sink import HostGradients
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.number_formats import to_lowbit
from memfit.strategies.lowbit.step_scalars import LossScale

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
SINKS = {"kept": KeptGradients, "kept8": KeptInt8, "host": HostGradients}
CAPTURABLE = [name for name, sink in SINKS.items() if sink.capturable]


def make_model(width: int = 256) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
    return nn.Sequential(*layers, nn.Linear(width, 4)).cuda()


def batches(count: int, width: int = 256) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(count, 64, width, device="cuda", generator=generator)
    return [(rows, rows[:, :4].argmax(1)) for rows in x]


def setup(
    sink: str, *, dtype: torch.dtype = torch.bfloat16, backend: str = "auto", **settings: Any
) -> tuple[nn.Sequential, LowBitOptimizer, LowBitSink]:
    model = make_model()
    kept = to_lowbit(model, dtype)
    optimizer = LowBitOptimizer(model.parameters(), lr=1e-3, remainders=kept, backend=backend)
    return model, optimizer, SINKS[sink](optimizer, **settings)


def run_step(model: nn.Module, sink: LowBitSink, x: Tensor, y: Tensor, parts: int = 1) -> Tensor:
    dtype = next(model.parameters()).dtype
    sink.begin(parts)
    for index, (rows, labels) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
        sink.arm(index)
        loss = nn.functional.cross_entropy(model(rows.to(dtype)).float(), labels) / parts
        scale = sink.loss_scale
        (loss if scale is None else scale.apply(loss)).backward()
        sink.end_backward()
    return sink.finish()


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def test_exact_sinks_give_the_same_bits_on_the_card() -> None:
    results = []
    for name in ("kept", "host"):
        model, optimizer, attached = setup(name, max_grad_norm=0.1)
        for x, y in batches(4):
            run_step(model, attached, x, y)
        results.append(optimizer.fp32_state_dict(model))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


@pytest.mark.parametrize("sink", list(SINKS))
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_waits_for_the_host(sink: str) -> None:
    model, _, attached = setup(sink, max_grad_norm=1.0)
    data = batches(4)
    for x, y in data[:2]:
        run_step(model, attached, x, y)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for x, y in data[2:]:
            run_step(model, attached, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("sink", CAPTURABLE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_captured_step_replays_like_the_eager_one(sink: str, dtype: torch.dtype) -> None:
    """Learning rate, step count, clipping and noise change with every step; the graph does not."""
    data = batches(10)

    def scaled() -> dict[str, Any]:
        scale = LossScale("cuda", initial=2.0**10) if dtype == torch.float16 else None
        return {"max_grad_norm": 0.5, "loss_scale": scale}

    def rate(optimizer: LowBitOptimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / 10)

    eager, optimizer, attached = setup(sink, dtype=dtype, **scaled())
    norms = []
    for step, (x, y) in enumerate(data):
        rate(optimizer, step)
        norms.append(run_step(eager, attached, x, y).clone())
    expected = optimizer.fp32_state_dict(eager)

    model, optimizer, attached = setup(sink, dtype=dtype, **scaled())
    static_x, static_y = (t.clone() for t in data[0])
    stream = torch.cuda.Stream()
    replayed = []
    with torch.cuda.stream(stream):
        for step in range(2):
            rate(optimizer, step)
            replayed.append(run_step(model, attached, *data[step]).clone())
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            norm = run_step(model, attached, static_x, static_y)
        for step in range(2, 10):
            rate(optimizer, step)
            static_x.copy_(data[step][0])
            static_y.copy_(data[step][1])
            attached.prepare(0)
            graph.replay()
            replayed.append(norm.clone())
    torch.cuda.synchronize()
    assert int(optimizer.clock.counters[0]) == 10
    torch.testing.assert_close(torch.stack(replayed), torch.stack(norms), rtol=1e-5, atol=0)
    for name, value in optimizer.fp32_state_dict(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_captured_micro_batches_add_up_in_kept8() -> None:
    """One graph for every micro-batch; the end of the step runs as it is."""
    data = batches(6)
    eager, optimizer, attached = setup("kept8", max_grad_norm=0.5)
    for x, y in data:
        run_step(eager, attached, x, y, parts=2)
    expected = weights_of(eager)

    model, optimizer, attached = setup("kept8", max_grad_norm=0.5)
    run_step(model, attached, *data[0], parts=2)
    rows, labels = (t[:32].clone() for t in data[0])

    def micro() -> None:
        attached.arm(0)
        loss = nn.functional.cross_entropy(model(rows.bfloat16()).float(), labels) / 2
        loss.backward()
        attached.end_backward()

    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    attached.begin(2, replayed=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with torch.cuda.graph(graph, stream=stream):
            micro()
        for x, y in data[1:]:
            attached.begin(2, replayed=True)
            for index, (part, targets) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
                rows.copy_(part)
                labels.copy_(targets)
                attached.prepare(index)
                graph.replay()
            optimizer.step()
    torch.cuda.synchronize()
    assert int(optimizer.clock.counters[0]) == 6
    torch.testing.assert_close(weights_of(model), expected, rtol=0, atol=1e-6)


def test_fp16_overflow_skips_on_the_card() -> None:
    scale = LossScale("cuda", initial=2.0**12)
    model, _, sink = setup("kept8", dtype=torch.float16, loss_scale=scale)
    (x, y), (other, _) = batches(2)
    run_step(model, sink, x, y)
    before = weights_of(model)
    run_step(model, sink, other * 6e4, y)
    assert torch.equal(weights_of(model), before)
    assert float(scale.value) == 2.0**11
    run_step(model, sink, x, y)
    assert not torch.equal(weights_of(model), before)


@pytest.mark.parametrize("sink", ["kept8", "host"])
def test_resuming_on_the_card_is_bit_equal(sink: str) -> None:
    data = batches(6)
    whole, optimizer, attached = setup(sink, max_grad_norm=0.5)
    for x, y in data[:3]:
        run_step(whole, attached, x, y)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(whole.state_dict())
    for x, y in data[3:]:
        run_step(whole, attached, x, y)
    model, optimizer, attached = setup(sink, max_grad_norm=0.5)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    for x, y in data[3:]:
        run_step(model, attached, x, y)
    assert torch.equal(weights_of(whole), weights_of(model))


# ------------------------------------------------------------------------ memory and time


@needs_triton
@pytest.mark.parametrize(
    ("sink", "low", "high"),
    [("kept", 1.95, 2.3), ("kept8", 1.0, 1.3), ("host", 0.0, 0.6)],
)
def test_gradients_take_the_bytes_their_sink_says(sink: str, low: float, high: float) -> None:
    """The peak above weights and state, in bytes a parameter: 96 gradients of 8 MiB each."""
    gc.collect()  # graphs of the tests before
    others = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(1024, 4096, device="cuda").bfloat16()) for _ in range(96)]
    numel = sum(p.numel() for p in params)
    optimizer = LowBitOptimizer(params)
    attached = SINKS[sink](optimizer, max_grad_norm=1.0)
    direction = torch.randn(4096, device="cuda").bfloat16()

    def step() -> None:
        attached.begin()
        attached.arm(0)
        sum((p @ direction).float().sum() for p in params).backward()  # type: ignore[union-attr]
        attached.finish()

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    beside = torch.cuda.max_memory_allocated() - others - optimizer.state_bytes() - 2 * numel
    assert low <= beside / numel <= high, beside / numel


def test_the_torch_path_needs_16_mib_beside_the_state() -> None:
    p = nn.Parameter(torch.randn(4096, 4096, device="cuda").bfloat16())
    optimizer = LowBitOptimizer([p], backend="torch")
    p.grad = torch.randn_like(p)
    optimizer.step()
    p.grad = torch.randn_like(p)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 16 * 2**20


@needs_triton
@pytest.mark.parametrize("bits", [24, 16])
@pytest.mark.parametrize("sink", ["kept", "kept8"])
def test_a_step_of_bert_large_takes_milliseconds(
    bits: int, sink: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """325 M parameters in 148 large and 244 small tensors: the update alone, and its launches."""
    shapes = [(21128, 1024), (512, 1024), (1024, 1024)]
    shapes += 24 * ([(1024, 1024)] * 4 + [(4096, 1024), (1024, 4096)])
    params = [nn.Parameter(torch.randn(s, device="cuda").bfloat16() * 0.02) for s in shapes]
    params += [nn.Parameter(torch.zeros(1024, device="cuda").bfloat16()) for _ in range(244)]
    optimizer = LowBitOptimizer(params, master_bits=bits)
    attached = SINKS[sink](optimizer, max_grad_norm=1.0)
    grads = [torch.randn_like(p) * 1e-3 for p in params]
    times: list[float] = []
    for _ in range(12):
        attached.begin()
        attached.arm(0)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
            if sink == "kept8":
                attached._receive(p)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        events[0].record()
        attached.finish()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    median = sorted(times[2:])[5]
    with capsys.disabled():
        print(f"\n{sink}, {bits}-bit masters: {median:.2f} ms a step of BERT-Large")
    if torch.cuda.get_device_capability() >= (9, 0):
        assert median < 12
