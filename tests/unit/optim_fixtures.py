"""Small models, data and loops that the low-bit optimizer's tests share."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from memfit.strategies.lowbit import number_formats
from memfit.strategies.lowbit.gradient_sinks import KeptGradients, KeptInt8, LowBitSink
from memfit.strategies.lowbit.host_sink import HostGradients
from memfit.strategies.lowbit.lowbit_kernels import LowBitState, StepScalars, blocks_of
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.number_formats import to_lowbit

SMALL = 64  # in tiny models, so that their matrices count as large
KINDS = [
    (torch.bfloat16, True),
    (torch.bfloat16, False),
    (torch.float16, True),
    (torch.float16, False),
    (torch.float32, False),
]
SINKS: dict[str, type[LowBitSink]] = {
    "kept": KeptGradients,
    "kept8": KeptInt8,
    "host": HostGradients,
}
TENSORS = ("weight", "correction", "moment1", "scale1", "moment2", "scale2")


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 3))


def batches(count: int, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, rows, 32, generator=generator)
    return [(part, part[:, :3].argmax(1)) for part in x]


def loss_of(model: nn.Module, x: Tensor, y: Tensor, share: float = 1.0) -> Tensor:
    dtype = next(model.parameters()).dtype
    return nn.functional.cross_entropy(model(x.to(dtype)).float(), y) * share


def lowbit(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> LowBitOptimizer:
    """The model converted, and its optimizer."""
    bits = settings.get("master_bits", 24)
    kept = to_lowbit(model, dtype, master_bits=bits, small_numel=SMALL)
    defaults = {"lr": 1e-3, "small_numel": SMALL, "remainders": kept}
    return LowBitOptimizer(model.parameters(), **{**defaults, **settings})


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]
) -> list[float]:
    """The plainest loop there is."""
    losses = []
    for x, y in data:
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def make_sink(name: str, optimizer: LowBitOptimizer, **settings: Any) -> LowBitSink:
    return SINKS[name](optimizer, **settings)


def with_sink(
    sink: str, dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> tuple[nn.Sequential, LowBitOptimizer, LowBitSink]:
    """Model, optimizer and the sink of this name."""
    model = make_model()
    optimizer = lowbit(model, dtype)
    return model, optimizer, make_sink(sink, optimizer, **settings)


def run_step(
    model: nn.Module, sink: LowBitSink, x: Tensor, y: Tensor, micro_batches: int = 1
) -> Tensor:
    """The loop of `SinkExecutor`."""
    sink.begin(micro_batches)
    parts = zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)
    for index, (rows, labels) in enumerate(parts):
        sink.arm(index)
        loss = loss_of(model, rows, labels, 1 / micro_batches)
        scale = sink.loss_scale
        (loss if scale is None else scale.apply(loss)).backward()
        sink.end_backward()
    return sink.finish()


def flat_masters(optimizer: LowBitOptimizer, model: nn.Module) -> Tensor:
    return torch.cat([t.reshape(-1) for t in optimizer.fp32_state_dict(model).values()])


def flat_weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def moved_apart(one: Tensor, other: Tensor) -> float:
    """How far two results of `make_model` are apart, as a share of the way gone."""
    start = flat_weights(make_model())
    return float((one - other).norm() / (one - start).norm())


def make_state(
    numel: int, dtype: torch.dtype, correct: bool, *, block: int = 256, stream: int = 3
) -> LowBitState:
    """A parameter in the middle of training."""
    generator = torch.Generator().manual_seed(numel)
    blocks = blocks_of(numel, block)
    draw = lambda low, high, kind: torch.randint(  # noqa: E731
        low, high, (numel,), dtype=kind, generator=generator
    )
    master = torch.randn(numel, generator=generator) * 0.05
    weight, correction = number_formats.split_master(master, dtype, correct=correct)
    return LowBitState(
        weight=weight.clone(),
        correction=correction,
        moment1=draw(-127, 128, torch.int8),
        scale1=torch.rand(blocks, generator=generator) * 1e-3,
        moment2=draw(1, 256, torch.uint8),
        scale2=torch.rand(blocks, generator=generator) * 1e-3,
        stream=stream,
        row=1,
        block=block,
    )


def copy_of(state: LowBitState) -> LowBitState:
    values = {name: getattr(state, name) for name in TENSORS}
    fresh = {k: None if v is None else v.clone() for k, v in values.items()}
    return dataclasses.replace(state, **fresh)


def make_scalars(*, gate: bool = True) -> StepScalars:
    hyper = torch.zeros(2, 8)
    hyper[1] = torch.tensor([0.9, 0.1, 0.999, 0.001, 1e-4, 16.0, 1e-8, 1 - 2e-7])
    return StepScalars(
        hyper, torch.tensor(12345, dtype=torch.int32), torch.tensor(0.7), torch.tensor(gate)
    )


def make_grad(numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(numel + 1)
    size = torch.exp(torch.randn(numel, generator=generator))
    return (torch.randn(numel, generator=generator) * size * 1e-3).to(dtype)


def codes_apart(one: LowBitState, other: LowBitState) -> dict[str, float]:
    """The largest difference in codes, in scales (relative) and in masters (24-bit units)."""
    apart = {
        name: float((getattr(one, name).int() - getattr(other, name).int()).abs().max())
        for name in ("moment1", "moment2")
    }
    for name in ("scale1", "scale2"):
        a, b = getattr(one, name), getattr(other, name)
        apart[name] = float(((a - b).abs() / a.clamp_min(1e-30)).max())
    a, b = (number_formats.join_master(s.weight, s.correction) for s in (one, other))
    bits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 20}[one.weight.dtype]
    bits += 8 if one.correction is not None else 0
    exponent = torch.frexp(torch.maximum(a.abs(), b.abs())).exponent.clamp_min(-13) - 1
    apart["master"] = float(((a - b).abs() / torch.exp2(exponent.double() - bits)).max())
    return apart
