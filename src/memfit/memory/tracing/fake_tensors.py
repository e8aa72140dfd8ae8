"""Runs a step on tensors that have a shape and no memory.

A trace is thousands of views and allocations. Fake tensors look each of them up by every property
of every argument, which takes longer than the operator itself does on the meta device. Those
listed here have shapes that follow from their first tensor alone, so that the meta kernel can be
asked at once. Others have a meta kernel written in Python, or take real indices that would be
turned into fake tensors first; their shapes are written down here. All others go the usual way,
once for each shape of their arguments: a plan makes dozens of traces of the same layers.

What touches a weight is fake: it costs nothing, however large the model. What follows from
the batch alone (ids, masks, positions) is real, so that what a model asks of it (is
anything padded? where does each text end?) gets its true answer.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, TypeGuard

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
from memfit.i18n import t
from memfit.memory.components import Component
from memfit.memory.tracing.counting import current
from memfit.memory.tracing.operators import CudaKernels, supplied_operator
from memfit.memory.tracing.tracker import _BACKWARD_NODE, _DEVICE, Tracker, tensors_in

_aten = torch.ops.aten
_CPU, _META = torch.device("cpu"), torch.device("meta")

_VIEWS = frozenset(
    (
        _aten.view.default, _aten._unsafe_view.default, _aten.detach.default, _aten.alias.default,
        _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.expand.default,
        _aten.select.int, _aten.slice.Tensor, _aten.unsqueeze.default, _aten.squeeze.dim,
        _aten.as_strided.default,
    )
)  # fmt: skip
"""Of the first tensor: more than half of all operators of a trace."""

_FOLLOWS = _VIEWS | frozenset(
    (
        # New tensors on the first one's device.
        _aten.bmm.default, _aten.clone.default, _aten.sum.dim_IntList,
        _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor,
    )
)  # fmt: skip

_ELEMENTWISE = frozenset(
    (
        _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.mul.Scalar,
        _aten.gelu.default, _aten.gelu_backward.default, _aten.tanh.default,
        _aten.tanh_backward.default,
    )
)  # fmt: skip
"""Of contiguous tensors alike, another such one."""

_ALLOCATES = {
    _aten.new_empty.default: _aten.new_empty.default,
    _aten.new_zeros.default: _aten.new_empty.default,
    _aten.empty_like.default: _aten.empty_like.default,
    _aten.zeros_like.default: _aten.empty_like.default,
    _aten.empty.memory_format: _aten.empty.memory_format,
    _aten.zeros.default: _aten.empty.memory_format,
}
"""And which of them makes the same without writing to it."""

_EMPTY_LIKE = _aten.empty_like.default

_POSITIONAL = {_aten.new_empty.default: 2, _EMPTY_LIKE: 1, _aten.empty.memory_format: 1}
"""How many arguments have no name."""

_USUAL = frozenset(("dtype", "device", "pin_memory"))
"""Arguments beside which the result is contiguous, if what it is like is."""

_WRITES = frozenset(
    (
        _aten.linalg_vector_norm.out, _aten.where.self_out, _aten.sub.out, _aten.logical_and.out,
        _aten.bitwise_right_shift.Tensor_Scalar_out,
    )
)  # fmt: skip
"""Into a tensor handed over, which has the right shape already."""

_TO_COPY = _aten._to_copy.default
_STACK = _aten.stack.default
_NORMS = _aten._foreach_norm.Scalar
_SEVERAL = frozenset((_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int))


def run_directly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    """What the operator gives, or NotImplemented where it must go the usual way."""
    if func in _VIEWS:
        return _followed(func, args, kwargs, mode)
    if func in _ALLOCATES:
        return _allocated(func, args, kwargs, mode)
    if func in _WRITES:
        return kwargs["out"] if _is_ours(kwargs["out"], mode) else NotImplemented
    if _changes(func):
        first = args[0]
        if isinstance(first, (tuple, list)):
            return None if all(_is_ours(one, mode) for one in first) else NotImplemented
        return first if _is_ours(first, mode) else NotImplemented
    if func in _SHAPES:
        return _shaped(_SHAPES[func], args, kwargs, mode)
    if func is _TO_COPY:
        return _copied(args[0], mode, **kwargs)
    if func is _STACK:
        return _stacked(*args, mode=mode)
    if func is _NORMS:
        return _norms(*args, mode=mode, **kwargs)
    if func in _ELEMENTWISE and _are_alike(args, mode):
        return _empty(args[0].shape, args[0].dtype, args[0], mode)
    if func in _FOLLOWS or func in _SEVERAL:
        return _followed(func, args, kwargs, mode)
    return NotImplemented


def _followed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    device: Any = getattr(args[0], "fake_device", None)
    for arg in args:
        if isinstance(arg, torch.Tensor) and not (
            _is_ours(arg, mode) and arg.fake_device == device
        ):
            return NotImplemented
    out = _on_meta(mode, func, *args, **kwargs)
    if isinstance(out, (tuple, list)):
        return type(out)(_fake(mode, one, device) for one in out)
    return _fake(mode, out, device)


@cache
def _changes(func: Any) -> bool:
    """Whether an operator writes to its first argument, a tensor or a list, and makes nothing."""
    schema = func._schema
    written = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
    return (
        any(written[:1])
        and schema.name.endswith("_")
        and torch.Tag.inplace_view not in func.tags
        and (not schema.returns or not any(written[1:]))
    )


def _allocated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    first, device = args[0], kwargs.get("device")
    if isinstance(first, torch.Tensor):
        if not _is_ours(first, mode):
            return NotImplemented
        device = first.fake_device if device is None else device
    if kwargs.get("pin_memory") or (device is not None and device.type == "meta"):
        return NotImplemented
    alike = _ALLOCATES[func]
    if len(args) == _POSITIONAL[alike] and not kwargs.keys() - _USUAL:
        # As below, without a meta kernel written in Python.
        shape, dtype = args[-1], kwargs.get("dtype")
        if isinstance(first, torch.Tensor):
            dtype = dtype or first.dtype
            shape = first.shape if alike is _EMPTY_LIKE else shape
        if alike is not _EMPTY_LIKE or first.is_contiguous():
            made = _on_meta(mode, torch.empty, shape, dtype=dtype, device=_META)
            return _fake(mode, made, device or _CPU)
    out = _on_meta(mode, alike, *args, **{**kwargs, "device": _META})
    return _fake(mode, out, device or _CPU)


# ---- shapes written down: of the results, all of them contiguous and of the first tensor's type


_SHAPES: dict[Any, Callable[..., Sequence[Sequence[int]] | None]] = {
    _aten.mm.default: lambda left, right: [(left.shape[0], right.shape[1])],
    _aten.addmm.default: lambda _, left, right: [(left.shape[0], right.shape[1])],
    _aten.index_copy.default: lambda self, *_: [self.shape],
    _aten.index_add.default: lambda self, *_: [self.shape],
    _aten.index_select.default: lambda self, dim, index: _selected(self.shape, dim, index),
    _aten.embedding.default: lambda weight, ids, *_: [(*ids.shape, *weight.shape[1:])],
    _aten.embedding_dense_backward.default: lambda grad, _, count, *__: [(count, grad.shape[-1])],
    _aten.linalg_vector_norm.default: (
        lambda _, __=2, dim=None, keepdim=False: [()] if dim is None and not keepdim else None
    ),
    _aten.nll_loss_forward.default: lambda _, __, ___, reduction, *____: (
        [(), ()] if reduction else None
    ),
    _aten.nll_loss_backward.default: lambda _, self, *__: [self.shape],
}


def _selected(shape: Sequence[int], dim: int, index: torch.Tensor) -> list[list[int]] | None:
    sizes = list(shape)
    if not sizes:
        return None
    sizes[dim] = index.numel()
    return [sizes]


def _shaped(
    shapes: Callable[..., Sequence[Sequence[int]] | None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: Any,
) -> Any:
    """Empty tensors of these shapes; floating-point tensors among the arguments decide the rest."""
    floats = [one for one in args if isinstance(one, torch.Tensor) and one.is_floating_point()]
    first = floats[0] if floats else None
    if kwargs or not _is_ours(first, mode):
        return NotImplemented
    for one in floats:
        if not _is_ours(one, mode) or one.dtype is not first.dtype:
            return NotImplemented
    found = shapes(*args)
    if found is None:
        return NotImplemented
    out = tuple(_empty(shape, first.dtype, first, mode) for shape in found)
    return out if len(out) > 1 else out[0]


def _are_alike(args: tuple[Any, ...], mode: Any) -> bool:
    """Whether an elementwise operator gives what its first argument is like: no broadcast."""
    first = args[0]
    if not (_is_ours(first, mode) and first.is_floating_point() and first.is_contiguous()):
        return False
    for one in args[1:]:
        if isinstance(one, torch.Tensor):
            if not (
                _is_ours(one, mode)
                and one.dtype is first.dtype
                and one.shape == first.shape
                and one.is_contiguous()
                and one.fake_device == first.fake_device
            ):
                return False
        elif not isinstance(one, int | float):
            return False
    return True


def _copied(tensor: Any, mode: Any, *, dtype: Any = None, device: Any = None, **more: Any) -> Any:
    if more or not _is_ours(tensor, mode) or not tensor.is_contiguous():
        return NotImplemented
    if device is not None and device != tensor.fake_device:
        return NotImplemented
    return _empty(tensor.shape, dtype or tensor.dtype, tensor, mode)


def _stacked(tensors: Sequence[Any], dim: int = 0, *, mode: Any) -> Any:
    """Numbers in a row: the norms of all gradients."""
    first = tensors[0]
    if dim or not all(_is_ours(one, mode) and one.dim() == 0 for one in tensors):
        return NotImplemented
    if any(one.dtype is not first.dtype for one in tensors):
        return NotImplemented
    return _empty((len(tensors),), first.dtype, first, mode)


def _norms(tensors: Sequence[Any], *_: Any, mode: Any, **named: Any) -> Any:
    if named or not all(_is_ours(one, mode) and one.is_floating_point() for one in tensors):
        return NotImplemented
    return [_empty((), one.dtype, one, mode) for one in tensors]


def _empty(shape: Sequence[int], dtype: torch.dtype, like: FakeTensor, mode: Any) -> FakeTensor:
    made = _on_meta(mode, torch.empty, shape, dtype=dtype, device=_META)
    return _fake(mode, made, like.fake_device)


def _on_meta(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a meta kernel, as torch's in_kernel_invocation_manager does at three times the cost."""
    with torch._C._DisableTorchDispatch():
        mode.in_kernel_invocation = True
        try:
            with torch._C._PreserveDispatchKeyGuard():
                torch._C._set_meta_in_tls_dispatch_include(True)
                return func(*args, **kwargs)
        finally:
            mode.in_kernel_invocation = False


def _fake(mode: Any, made: torch.Tensor, device: torch.device) -> FakeTensor:
    """Returns `FakeTensor(mode, made, device)` for a CPU.

    The constructor checks what is known here, which takes longer than all the rest of it.
    """
    if device != _CPU:
        return FakeTensor(mode, made, device)
    fake: FakeTensor = torch.Tensor._make_subclass(
        FakeTensor, made, made.requires_grad, dispatch_device=True, device_for_backend_keys=_CPU
    )
    torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    vars(fake).update(_state_of_fakes(mode))
    return fake


@lru_cache(maxsize=1)
def _state_of_fakes(mode: Any) -> dict[str, Any]:
    """What the constructor writes into every fake CPU tensor of a mode."""
    made = _on_meta(mode, torch.empty, (), device=_META)
    return dict(vars(FakeTensor(mode, made, _CPU)))


def _is_ours(tensor: Any, mode: Any) -> TypeGuard[FakeTensor]:
    return type(tensor) is FakeTensor and tensor.fake_mode is mode and tensor.constant is None


# ---- all others: the usual way for the first arguments of each shape


def run_once(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    """Returns what the operator gives; its results for arguments like earlier ones are known."""
    if not _is_pure(func):
        return func(*args, **kwargs)
    try:
        key = (func, torch.get_default_dtype(), _described((args, kwargs), mode))
        known = _results.get(key)
    except TypeError:  # an argument that is not described here
        return func(*args, **kwargs)
    if known is not None:
        several, shapes = known
        made = [None if one is None else _strided(mode, *one) for one in shapes]
        return several(made) if several is not None else made[0]
    out = func(*args, **kwargs)
    several = type(out) if isinstance(out, (tuple, list)) else None
    results = out if several is not None else (out,)
    if several in (None, tuple, list) and _are_fresh(results, (args, kwargs), mode):
        shapes = [None if t is None else (t.shape, t.stride(), t.dtype) for t in results]
        if len(_results) >= _MOST_RESULTS:
            _results.clear()
        _results[key] = (several, shapes)
    return out


_results: dict[Hashable, tuple[Any, list[Any]]] = {}
"""By operator and arguments, the kind of sequence and the shapes, strides and types of results."""

_MOST_RESULTS = 50_000

_DESCRIBED = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout,
     torch.memory_format)
)  # fmt: skip


@cache
def _is_pure(func: Any) -> bool:
    """Whether an operator makes new tensors, and writes to none."""
    schema = func._schema
    return not schema.is_mutable and all(one.alias_info is None for one in schema.returns)


def _described(value: Any, mode: Any) -> Hashable:
    """All that the shape of a result can follow from; TypeError where something else is given."""
    kind = type(value)
    if kind in _DESCRIBED:
        return (kind, value)  # 1, 1.0 and True are equal
    if kind in (tuple, list, torch.Size):
        return tuple([_described(one, mode) for one in value])
    if kind is dict:
        return tuple([(name, _described(one, mode)) for name, one in value.items()])
    if kind is FakeTensor:
        if not (_is_ours(value, mode) and value.fake_device == _CPU):
            raise TypeError
    elif not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise TypeError
    return (kind, value.shape, value.stride(), value.dtype)


def _are_fresh(results: Sequence[Any], given: Any, mode: Any) -> bool:
    """Whether each is a whole fake tensor of its own, as `_strided` makes them."""
    args, kwargs = given
    everything = tensors_in((args, tuple(kwargs.values())))
    storages = {t.untyped_storage()._cdata for t in everything}
    for one in results:
        if one is None:
            continue
        if not (_is_ours(one, mode) and one.fake_device == _CPU and one.storage_offset() == 0):
            return False
        storage = one.untyped_storage()
        last = sum(
            (size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True)
        )
        whole = (last + 1) * one.element_size() if one.numel() else 0
        if storage._cdata in storages or storage.nbytes() != whole:
            return False
        storages.add(storage._cdata)
    return True


def _strided(mode: Any, shape: Any, stride: Any, dtype: torch.dtype) -> FakeTensor:
    made = _on_meta(mode, torch.empty_strided, shape, stride, dtype=dtype, device=_META)
    return _fake(mode, made, _CPU)


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
            return args[0] if _is_ours(args[0], self.mode) else args[0].add_(args[1])
        out = self._run(func, args, kwargs)
        if func is _LAYER_NORM:
            out = self._with_fp32_statistics(args, out)
        if (counter := current()) is not None:
            if self._on_host:
                counter.see_on_host(func, args, out)
            else:
                counter.see(func, args, kwargs, out)
        first = args[0] if args else None
        is_real = isinstance(first, torch.Tensor) and not isinstance(first, FakeTensor)
        if func is not _LAYER_NORM and is_real and func._schema.is_mutable:
            return first  # changed in place: no memory is new
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
        return (out[0], *(_strided(self.mode, t.shape, t.stride(), torch.float32) for t in out[1:]))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        supplied = supplied_operator(func)
        if supplied is not None:
            return supplied(*args, **kwargs)
        if self.component is Component.ACTIVATIONS and _is_known(func, args, kwargs):
            with unset_fake_temporarily():
                # No layer is skipped: the number drawn is the largest.
                out = torch.ones(()) if func is _RAND else func(*args, **kwargs)
            # Floating-point values are kept only while they are few.
            if not any(
                t.is_floating_point() and t.untyped_storage().nbytes() > _LARGEST_REAL_FLOAT_BYTES
                for t in tensors_in(out)
            ):
                return out
        if (out := run_directly(func, args, kwargs, self.mode)) is not NotImplemented:
            return out
        if func is _INDEX:
            with unset_fake_temporarily():
                args = (args[0], _as_positions(args[1]))
        try:
            return run_once(func, args, kwargs, self.mode)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedOperatorException,
        ) as error:
            raise TraceError(
                "the memory trace cannot run {name}{where}: its result depends on values the trace "
                "does not have. Supply one of the right shape with "
                'memfit.memory.register_operator("{name}", function).',
                name=func._schema.name,
                where=t(" in {module}", module=self.module) if self.module else "",
            ) from error

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
    # torch logs a shape that does not come out as an error; here it is raised as one.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with tracker.mode, installed, tracker:
            yield tracker
    finally:
        logger.disabled = before


def _is_known(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator's values follow from the batch alone: no weight took part."""
    if args and type(args[0]) is FakeTensor:
        return False
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


def _as_positions(indices: Any) -> list[Any]:
    """A known mask used as an index, as the positions it marks: their number is known too."""
    out: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
            out += [index] if isinstance(index, FakeTensor) else index.nonzero().unbind(1)
        else:
            out.append(index)
    return out


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
