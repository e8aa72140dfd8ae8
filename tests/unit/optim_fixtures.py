"""Small models, data and loops that the low-bit optimizer's tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memfit.strategies.lowbit.gradient_release import make_sink
from memfit.strategies.lowbit.gradient_sinks import LowBitSink
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.number_formats import to_lowbit

SMALL = 64  # in tiny models, so that their matrices count as large


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
    for phase in sink.phases:
        parts = zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)
        for index, (rows, labels) in enumerate(parts):
            sink.arm(index, phase)
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
