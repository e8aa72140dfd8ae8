"""Which fused kernels run where, and the dropout masks they compute instead of storing.

The seed is a number on the device, drawn from torch's own generator: `torch.manual_seed` decides
it, and a captured graph draws another one at every replay. Forward and backward compute the same
mask from it. It is not the mask torch's dropout would draw from the same generator.

    key1 = mix(low(seed) + site * STRIDE)      key2 = mix(high(seed) ^ key1)
    draw = half2(half1(index + key1) + key2)   dropped where its upper 24 bits are below p * 2^24
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memfit.memory.device import has_triton
from memfit.memory.tracing.counting import count_kernel

# A finalizer with little bias, found by search: github.com/skeeto/hash-prospector. All below 2^31,
# so that every language reads them as the same type.
FACTOR_A = 0x21F0AAAD

FACTOR_B = 0x735A2D97

SITE_STRIDE = 0x61C88647

DRAW_BITS = 24

_UINT32 = 0xFFFFFFFF


class Drop(NamedTuple):
    """What one dropout needs to draw its mask, as often as it is asked to."""

    p: float
    seed: Tensor
    """int64, one element, on the device."""
    site: int
    """Which dropout of the model this is."""

    @property
    def threshold(self) -> int:
        """Draws below this are dropped."""
        return int(self.p * 2**DRAW_BITS + 0.5)

    @property
    def scale(self) -> float:
        """What the kept elements are multiplied by."""
        return 1.0 / (1.0 - self.p)


class Seeds:
    """Where dropouts get their seed: one a forward pass, or one a call.

    One a forward pass costs one small kernel; all recomputation in backward then has to belong
    to the last forward pass. One a call is drawn where the mask is needed, like torch's own:
    right for any order of passes, since recomputation puts the generator back.
    """

    def __init__(self, *, per_call: bool = False) -> None:
        self.per_call = per_call
        self._current: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Seeds:
        # A copied model's dropouts ask the same object as its copied hook draws for.
        return self

    def advance(self, device: torch.device) -> None:
        """A forward pass begins, outside of anything that is recomputed."""
        if not self.per_call:
            self._current = _draw(device)

    def take(self, device: torch.device) -> Tensor:
        """The seed for a dropout on this device."""
        if self.per_call or self._current is None or self._current.device != device:
            return _draw(device)
        return self._current


def _draw(device: torch.device) -> Tensor:
    return torch.randint(2**62, (1,), device=device)


def keep_mask(shape: torch.Size, drop: Drop) -> Tensor:
    """The mask in plain torch, bit for bit as the kernels draw it."""
    seed = drop.seed.reshape(())
    key1 = _mix((seed + drop.site * SITE_STRIDE) & _UINT32)
    key2 = _mix((seed >> 32 & _UINT32) ^ key1)
    index = torch.arange(shape.numel(), device=drop.seed.device) & _UINT32
    x = (index + key1) & _UINT32
    x = x ^ (x >> 16)
    x = x * FACTOR_A & _UINT32
    x = ((x ^ (x >> 15)) + key2) & _UINT32
    x = x * FACTOR_B & _UINT32
    x = x ^ (x >> 15)
    return (x >> (32 - DRAW_BITS) >= drop.threshold).view(shape)


def _mix(x: Tensor) -> Tensor:
    """The finalizer on 32 bits, in int64: torch has no unsigned product."""
    x = x ^ (x >> 16)
    x = x * FACTOR_A & _UINT32
    x = x ^ (x >> 15)
    x = x * FACTOR_B & _UINT32
    return x ^ (x >> 15)


Gelu = Literal["erf", "tanh"]
"""The exact GELU, or its approximation by tanh."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

ROW_PROGRAMS = 128
"""The most partial sums over rows."""

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


class FusedKernels(Protocol):
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
def _module(name: str) -> FusedKernels:
    return cast(
        FusedKernels, importlib.import_module(f"memfit.strategies.fused.fused_kernels_{name}")
    )


def pick_kernels(tensor: Tensor) -> FusedKernels:
    """The kernels for a tensor."""
    if isinstance(tensor, FakeTensor):
        return _TRACED
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


class _TracedKernels:
    """A memory trace's view of the kernels: what they allocate, and nothing else."""

    # ruff: noqa: ARG002

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        drop: Drop | None,
    ) -> Normed:
        """The output, the sum, and two numbers a row."""
        mean, rstd = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
        count_kernel(x, residual, x, x)
        return Normed(torch.empty_like(x), torch.empty_like(x), mean, rstd)

    def add_norm_backward(
        self, d_output: Tensor, normed: Normed, weight: Tensor, drop: Drop | None
    ) -> NormGradients:
        """One or two gradients, and partial sums that go at once."""
        rows, columns = d_output.shape
        d_residual = torch.empty_like(normed.total)
        d_x = d_residual if drop is None else torch.empty_like(normed.total)
        count_kernel(d_output, normed.total, d_residual, None if drop is None else d_x)
        sums = _column_sums(weight, norm_programs(rows), 3 * columns).view(3, columns)
        return NormGradients(d_x, d_residual, sums[0], sums[1], sums[2])

    def gelu(self, x: Tensor, kind: Gelu) -> Tensor:
        """One matrix."""
        count_kernel(x, x)
        return torch.empty_like(x)

    def gelu_backward(
        self, x: Tensor, d_output: Tensor, kind: Gelu
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One matrix; the other takes the gradient's memory."""
        rows, columns = x.shape
        programs = -(-rows // rows_per_program(rows))
        count_kernel(x, x, d_output, d_output)
        return torch.empty_like(x), d_output, _column_sums(x, programs, columns)

    def join(self, parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """One matrix as large as the three."""
        rows, columns = parts[0].shape
        programs = -(-rows // rows_per_program(rows))
        joined = parts[0].new_empty(rows, 3 * columns)
        count_kernel(joined, joined)
        return joined, _column_sums(joined, programs, 3 * columns)


def _column_sums(like: Tensor, programs: int, columns: int) -> Tensor:
    partial = like.new_empty(programs, columns, dtype=torch.float32)
    count_kernel(partial, partial)  # written by the kernel before, then summed by one of its own
    del partial
    return like.new_empty(columns)


_TRACED = _TracedKernels()
