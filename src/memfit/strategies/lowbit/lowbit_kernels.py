"""What an update's kernel is handed, and which run: Triton on a card, plain torch elsewhere."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memfit.memory.device import has_triton
from memfit.memory.tracing import traced_device
from memfit.memory.tracing.counting import count_kernel, count_reached
from memfit.strategies.offload.host_memory import HostMemory

BLOCK = 256
"""Elements that share one fp32 scale: 4 / 256 bytes an element for each moment."""

SMALL_NUMEL = 16384
"""Parameters up to this size (biases, norms, a fresh head) keep fp32 state: 0.1 % of a BERT."""

SMALL_STATE_BYTES = 5 * 4
"""An element's remainder, two moments, gradient and work space."""


class Hyper:
    """Columns of the table the update reads: one row a parameter group, fp32, on the device."""

    KEEP1, GAIN1, KEEP2, GAIN2, STEP_SIZE, ROOT_FACTOR, EPS, SHRINK = range(8)
    COLUMNS = 8


@dataclass(frozen=True, slots=True)
class StepScalars:
    """Numbers of this step that live on the device, so that a captured graph reads fresh ones."""

    hyper: Tensor  # fp32 [rows, Hyper.COLUMNS]
    key: Tensor  # int32 [], this step's noise
    grad_scale: Tensor  # fp32 [], clipping times the inverse loss scale
    gate: Tensor  # bool [], False skips the update


@dataclass(frozen=True, slots=True)
class CodedGradient:
    """A gradient kept in 8 bits: signed codes with one scale a block."""

    codes: Tensor  # int8 [n]
    scales: Tensor  # fp32 [blocks]
    hosted: bool = False
    """Whether the codes lie in host memory."""


@dataclass(frozen=True, slots=True)
class Addition:
    """How a gradient is added to one that is kept in 8 bits: kept = keep * kept + grad."""

    keep: Tensor  # fp32 [], 0 or 1
    key: Tensor  # int32 [], this step's noise
    stream: int
    block: int
    norm: Tensor  # fp32 [], becomes the sum's 2-norm


@dataclass(frozen=True, slots=True)
class LowBitState:
    """One parameter and its state, all flat; `stream` numbers its noise, `row` its group."""

    weight: Tensor
    correction: Tensor | None
    moment1: Tensor
    scale1: Tensor
    moment2: Tensor
    scale2: Tensor
    stream: int
    row: int
    block: int
    hosted: bool = False
    """Whether corrections and moments lie in host memory."""

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.weight.numel()


Work = list[tuple[LowBitState, Tensor | CodedGradient]]
"""Whole parameters, each with its gradient."""


class UpdateKernels(Protocol):
    """One way of computing the update; all ways give the same codes up to rounding."""

    def update(
        self, state: LowBitState, grad: Tensor | CodedGradient, scalars: StepScalars, start: int = 0
    ) -> None:
        """AdamW in place on elements `start` to `start + grad.numel()`; `start` on a block."""

    def update_many(self, work: Work, scalars: StepScalars) -> None:
        """The same on whole parameters, in as few launches as the way allows."""

    def accumulate(self, kept: CodedGradient, grad: Tensor, how: Addition) -> None:
        """kept = keep * kept + grad, rounded stochastically; `norm` becomes the sum's 2-norm."""


def blocks_of(numel: int, block: int) -> int:
    """How many scales a tensor has."""
    return -(-numel // block)


def flat(tensor: Tensor, name: str = "parameter") -> Tensor:
    """One dimension over the same memory."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"a {name} of shape {tuple(tensor.shape)} is not contiguous; "
            "call .contiguous() on it before training"
        )
    return tensor.detach().view(-1)


def new_coded(
    numel: int, block: int, device: torch.device, host: HostMemory | None = None
) -> CodedGradient:
    """An empty 8-bit gradient; its codes in host memory where that is given."""
    scales = torch.zeros(blocks_of(numel, block), device=device)
    if host is not None:
        return CodedGradient(host.zeros(numel, torch.int8), scales, hosted=True)
    return CodedGradient(torch.zeros(numel, dtype=torch.int8, device=device), scales)


BACKENDS = ("auto", "triton", "torch")


@functools.cache
def _module(name: str) -> UpdateKernels:
    return cast(
        UpdateKernels, importlib.import_module(f"memfit.strategies.lowbit.lowbit_kernels_{name}")
    )


def pick_kernels(backend: str, tensor: Tensor) -> UpdateKernels:
    """The kernels for a parameter: `auto` takes Triton on CUDA and torch elsewhere."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown optimizer backend {backend!r}; one of {', '.join(BACKENDS)}")
    if isinstance(tensor, FakeTensor):
        on = traced_device.device()
        tritons = on is None or (on.cuda and on.triton and backend != "torch")
        if tritons:
            return _TRACED
        from memfit.strategies.lowbit import lowbit_kernels_torch

        return lowbit_kernels_torch.TRACED
    if backend == "auto":
        backend = "triton" if tensor.is_cuda and has_triton() else "torch"
    return _module(backend)


class _TracedKernels:
    """A memory trace's view of Triton's kernels: in place, so nothing is born or dies."""

    # ruff: noqa: ARG002

    def update(
        self, state: LowBitState, grad: Tensor | CodedGradient, scalars: StepScalars, start: int = 0
    ) -> None:
        """One launch over the parameter and its state."""
        _count_update(state, grad, launches=1)

    def update_many(self, work: Work, scalars: StepScalars) -> None:
        """One launch for all, with two small copies before it; in a graph one for each."""
        count_kernel(launches=3, captured=len(work))
        for state, grad in work:
            _count_update(state, grad, launches=0)

    def accumulate(self, kept: CodedGradient, grad: Tensor, how: Addition) -> None:
        """One partial norm a tile, as the Triton kernel keeps them."""
        rest = (kept.scales, kept.scales, grad)
        if kept.hosted:
            count_kernel(*rest)
            count_reached(kept.codes, kept.codes)
        else:
            count_kernel(kept.codes, kept.codes, *rest)
        torch.linalg.vector_norm(torch.empty(-(-grad.numel() // 1024)), out=how.norm)


def _count_update(state: LowBitState, grad: Tensor | CodedGradient, *, launches: int) -> None:
    """Its traffic: the gradient is read, the rest is read and written, as far as it reaches."""
    given, away = (grad.codes, grad.hosted) if isinstance(grad, CodedGradient) else (grad, False)
    kept = (state.correction, state.moment1, state.moment2)
    parts = [tensor[: given.numel()] for tensor in kept if tensor is not None]
    weight = state.weight[: given.numel()]
    here: list[Tensor] = [weight, weight]
    there: list[Tensor] = []
    (there if state.hosted else here).extend((*parts, *parts))
    (there if away else here).append(given)
    count_kernel(*here, launches=launches)
    count_reached(*there)


_TRACED = _TracedKernels()
