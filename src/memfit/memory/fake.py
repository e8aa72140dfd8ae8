"""Running a step on tensors that have a shape and no memory.

What touches a weight is fake: it costs nothing, however large the model. What follows from
the batch alone (ids, masks, positions) is real, so that what a model asks of it (is
anything padded? where does each text end?) gets its true answer.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

from memfit.errors import TraceError
from memfit.memory.components import Component
from memfit.memory.counting import current
from memfit.memory.fake_ops import run_directly
from memfit.memory.operators import CudaKernels, supplied_operator
from memfit.memory.trace import _BACKWARD_NODE, _DEVICE, Tracker, tensors_in
from memfit.messages import t

_ADD = torch.ops.aten.add.Tensor
_LAYER_NORM = torch.ops.aten.native_layer_norm.default
_ARANGE = {
    torch.ops.aten.arange.default,
    torch.ops.aten.arange.start,
    torch.ops.aten.arange.start_step,
}
_RAND = torch.ops.aten.rand.default
_SCALAR = torch.ops.aten.scalar_tensor.default
_INDEX = torch.ops.aten.index.Tensor
# Larger tensors are not worth their memory: they are fake like the rest.
_LARGEST_REAL_ELEMENTS = 2**26
_LARGEST_REAL_FLOAT_BYTES = 2**26


class FakeTracker(Tracker):  # type: ignore[no-untyped-call]
    """A tracker over fake tensors, which speaks the dialect of one kind of device."""

    def __init__(self, kernels: CudaKernels | None = None) -> None:
        super().__init__()
        self._kernels = kernels
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:
            tensor = args[0]
            return tensor.fake_device if isinstance(tensor, FakeTensor) else func(tensor)
        kwargs = kwargs or {}
        if self._kernels is not None and func is _ADD and self._accumulates(args):
            if (counter := current()) is not None:
                counter.see(func, args, kwargs, args[0])
            return args[0].add_(args[1])
        out = self._run(func, args, kwargs)
        if func is _LAYER_NORM:
            out = self._with_fp32_statistics(args, out)
        if (counter := current()) is not None:
            if self._on_host:
                counter.see_on_host(func, args, out)
            else:
                counter.see(func, args, kwargs, out)
        if func is not _LAYER_NORM and func._schema.is_mutable and _is_real(args):
            return args[0]  # changed in place: no memory is new
        self.record(out)
        if self._kernels is not None:
            for nbytes in self._kernels.temporaries(func, args, out):
                self.transient(nbytes)
        return out

    def resized(self, tensor: torch.Tensor) -> None:
        """As in the base; what has a size anew is on the device."""
        super().resized(tensor)
        if (counter := current()) is not None:
            counter.on_device(tensor)

    def _with_fp32_statistics(self, args: tuple[Any, ...], out: Any) -> Any:
        """Layer norm's mean and deviation of half inputs: fp32 on CUDA, or beside fp32 weights."""
        weight = args[2]
        if out[1].dtype is torch.float32 or (
            self._kernels is None and (weight is None or weight.dtype is not torch.float32)
        ):
            return out
        return (out[0], out[1].float(), out[2].float())

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        supplied = supplied_operator(func)
        if supplied is not None:
            return supplied(*args, **kwargs)
        if self.component is Component.ACTIVATIONS and _is_known(func, args, kwargs):
            with unset_fake_temporarily():
                # No layer is skipped: the number drawn is the largest.
                out = torch.ones(()) if func is _RAND else func(*args, **kwargs)
            if not _too_large(out):
                return out
        if (out := run_directly(func, args, kwargs, self.mode)) is not NotImplemented:
            return out
        if func is _INDEX:
            with unset_fake_temporarily():
                args = (args[0], _as_positions(args[1]))
        try:
            return func(*args, **kwargs)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedOperatorException,
        ) as error:
            raise TraceError(self._unsupported(func)) from error

    def _unsupported(self, func: Any) -> str:
        name = func._schema.name
        where = t(" in {module}", module=self.module) if self.module else ""
        return t(
            "the memory trace cannot run {name}{where}: its result depends on values the trace "
            "does not have. Supply one of the right shape with "
            'memfit.memory.operators.register_operator("{name}", function).',
            name=name,
            where=where,
        )

    def _accumulates(self, args: tuple[Any, ...]) -> bool:
        """Whether this is autograd adding two gradients, which it does in place.

        Autograd only refrains from it where a tensor is not a plain one, as here.
        """
        if len(args) != 2 or torch.is_grad_enabled() or _BACKWARD_NODE() is None:
            return False
        a, b = args
        return (
            isinstance(b, torch.Tensor)
            and a.shape == b.shape
            and a.dtype == b.dtype
            and _covers_its_elements(a)
        )


@contextmanager
def fake_trace(kernels: CudaKernels | None = None) -> Iterator[FakeTracker]:
    """Fake tensors and a tracker over them; with `kernels`, as a CUDA device would run."""
    tracker = FakeTracker(kernels)
    installed = contextlib.nullcontext() if kernels is None else kernels.installed()
    with _quiet(), tracker.mode, installed, tracker:
        yield tracker


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs a shape that does not come out as an error; here it is raised as one."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _is_known(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator's values follow from the batch alone: no weight took part."""
    tensors = list(tensors_in((args, tuple(kwargs.values()))))
    if tensors:
        return all(not isinstance(t, FakeTensor) and t.device.type == "cpu" for t in tensors)
    dtype = kwargs.get("dtype")
    if func in _ARANGE:
        return all(isinstance(arg, int) for arg in args) and (
            dtype is None or not dtype.is_floating_point
        )
    if func is _SCALAR or args[:1] == ([],):
        return True  # one number: a mask's minimum, or a layer's chance to be skipped
    if dtype is None or dtype.is_floating_point or dtype.is_complex or not args:
        return False
    size = args[0]
    return isinstance(size, (list, tuple)) and math.prod(size) <= _LARGEST_REAL_ELEMENTS


def _too_large(out: Any) -> bool:
    """Floating-point values are kept only while they are few."""
    return any(
        t.is_floating_point() and t.untyped_storage().nbytes() > _LARGEST_REAL_FLOAT_BYTES
        for t in tensors_in(out)
    )


def _as_positions(indices: Any) -> list[Any]:
    """A known mask used as an index, as the positions it marks: their number is known too."""
    out: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
            out += [index] if isinstance(index, FakeTensor) else index.nonzero().unbind(1)
        else:
            out.append(index)
    return out


def _is_real(args: tuple[Any, ...]) -> bool:
    first = args[0] if args else None
    return isinstance(first, torch.Tensor) and not isinstance(first, FakeTensor)


def _covers_its_elements(tensor: torch.Tensor) -> bool:
    """No element of the tensor shares its place: an expanded one does."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
