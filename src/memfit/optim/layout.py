"""What a kernel is handed: one parameter's low-bit state and the step's numbers on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memfit.optim.pinned import HostMemory

BLOCK = 256
"""Elements that share one fp32 scale: 4 / 256 bytes an element for each moment."""

SMALL_NUMEL = 16384
"""Parameters up to this size (biases, norms, a fresh head) keep fp32 state: 0.1 % of a BERT."""


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


class Kernels(Protocol):
    """One way of computing the update; all ways give the same codes up to rounding."""

    def update(
        self, state: LowBitState, grad: Tensor | CodedGradient, scalars: StepScalars, start: int = 0
    ) -> None:
        """AdamW in place on elements `start` to `start + grad.numel()`; `start` on a block."""

    def update_many(self, work: Work, scalars: StepScalars) -> None:
        """The same on whole parameters, in as few launches as the way allows."""

    def accumulate(self, kept: CodedGradient, grad: Tensor, how: Addition) -> None:
        """kept = keep * kept + grad, rounded stochastically; `norm` becomes the sum's 2-norm."""


def one_by_one(
    update: Callable[[LowBitState, Tensor | CodedGradient, StepScalars], None],
) -> Callable[[Work, StepScalars], None]:
    """The `update_many` of a way that gains nothing from having several at once."""

    def update_many(work: Work, scalars: StepScalars) -> None:
        for state, grad in work:
            update(state, grad, scalars)

    return update_many


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
