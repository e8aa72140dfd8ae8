"""Which kernels run where: Triton on a card that has it, plain torch everywhere else."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memfit import traced
from memfit.memory.counting import count_kernel, count_reached
from memfit.optim.layout import Addition, CodedGradient, Kernels, LowBitState, StepScalars, Work

BACKENDS = ("auto", "triton", "torch")


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported (Windows has none by default)."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _module(name: str) -> Kernels:
    return cast(Kernels, importlib.import_module(f"memfit.optim.kernels_{name}"))


def pick_kernels(backend: str, tensor: Tensor) -> Kernels:
    """The kernels for a parameter: `auto` takes Triton on CUDA and torch elsewhere."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown optimizer backend {backend!r}; one of {', '.join(BACKENDS)}")
    if isinstance(tensor, FakeTensor):
        on = traced.device()
        tritons = on is None or (on.cuda and on.triton and backend != "torch")
        return _TRACED if tritons else _module("traced")
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
