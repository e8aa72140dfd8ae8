"""Which kernels run where: Triton on a card that has it, plain torch everywhere else."""

from __future__ import annotations

import functools
import importlib
from typing import Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memfit.fused.masks import Drop
from memfit.optim.backends import has_triton

Gelu = Literal["erf", "tanh"]
"""The exact GELU, or its approximation by tanh."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROW_PROGRAMS = 128
"""At most so many partial sums over rows."""
ROWS_PER_PROGRAM = 64
NORM_PROGRAMS = 528
"""Four to each multiprocessor of a large card."""
NORM_ROWS = 2


class Normed(NamedTuple):
    """What a normalisation gives, and what its backward needs."""

    output: Tensor
    total: Tensor
    mean: Tensor
    rstd: Tensor


class NormGradients(NamedTuple):
    """Of x and of the residual (one tensor where nothing is dropped); of the norm's parameters
    and the column sums of x's, which is the gradient of a bias added to x."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    bias: Tensor
    column_sum: Tensor


class Kernels(Protocol):
    """One way of computing; matrices of two dimensions, their rows contiguous."""

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        drop: Drop | None,
    ) -> Normed:
        """LayerNorm(dropout(x) + residual)."""

    def add_norm_backward(
        self, d_output: Tensor, normed: Normed, weight: Tensor, drop: Drop | None
    ) -> NormGradients:
        """Its gradients, from the sum it kept (its output is not read)."""

    def gelu(self, x: Tensor, kind: Gelu) -> Tensor:
        """GELU(x)."""

    def gelu_backward(
        self, x: Tensor, d_output: Tensor, kind: Gelu
    ) -> tuple[Tensor, Tensor, Tensor]:
        """GELU(x) once more, the gradient of x (in d_output's memory), and its column sums."""

    def join(self, parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Three matrices side by side in one, and its column sums."""


@functools.cache
def _module(name: str) -> Kernels:
    return cast(Kernels, importlib.import_module(f"memfit.fused.kernels_{name}"))


def pick_kernels(tensor: Tensor) -> Kernels:
    """The kernels for a tensor."""
    if isinstance(tensor, FakeTensor):
        return _module("traced")
    return _module("triton" if tensor.is_cuda and has_triton() else "torch")


def norm_programs(rows: int) -> int:
    """Programs that share the rows of a normalisation's backward evenly."""
    tiles = -(-rows // NORM_ROWS)
    return -(-tiles // -(-tiles // NORM_PROGRAMS))


def rows_per_program(rows: int) -> int:
    """Rows that one program of a column sum reads: few different numbers, each is compiled."""
    share = ROWS_PER_PROGRAM
    while share * ROW_PROGRAMS < rows:
        share *= 2
    return share
