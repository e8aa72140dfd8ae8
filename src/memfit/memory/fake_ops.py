"""The commonest operators on fake tensors, without the way around through torch's own cache.

A trace is thousands of views and allocations. Fake tensors look each of them up by every property
of every argument, which takes longer than the operator itself does on the meta device. Those
listed here have shapes that follow from their first tensor alone, so that the meta kernel can be
asked at once. Others have a meta kernel written in Python, or take real indices that would be
turned into fake tensors first; their shapes are written down here. All others go the usual way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

_aten = torch.ops.aten
_FOLLOWS = frozenset(
    (
        # Views of the first tensor.
        _aten.view.default, _aten._unsafe_view.default, _aten.detach.default, _aten.alias.default,
        _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.expand.default,
        _aten.select.int, _aten.slice.Tensor, _aten.unsqueeze.default, _aten.squeeze.dim,
        _aten.as_strided.default,
        # New tensors on its device.
        _aten.mm.default, _aten.bmm.default, _aten.clone.default, _aten.sum.dim_IntList,
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
_WRITES = frozenset((_aten.linalg_vector_norm.out, _aten.where.self_out))
"""Into a tensor handed over, which has the right shape already."""
_CHANGES = frozenset(
    (
        _aten.add_.Tensor, _aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Scalar,
        _aten.div_.Tensor, _aten.bernoulli_.float, _aten.zero_.default, _aten.fill_.Scalar,
        _aten.copy_.default,
    )
)  # fmt: skip
"""Their first tensor, which they return."""
_CHANGES_LISTS = frozenset(
    (
        _aten._fused_adamw_.default, _aten._foreach_add_.Scalar, _aten._foreach_copy_.default,
        _aten._foreach_mul_.Tensor,
    )
)  # fmt: skip
"""Tensors in lists, and return nothing."""
_TO_COPY = _aten._to_copy.default
_STACK = _aten.stack.default
_NORMS = _aten._foreach_norm.Scalar
_SEVERAL = frozenset((_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int))


def run_directly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    """What the operator gives, or NotImplemented where it must go the usual way."""
    if func in _ALLOCATES:
        return _allocated(func, args, kwargs, mode)
    if func in _WRITES:
        return kwargs["out"] if _is_ours(kwargs["out"], mode) else NotImplemented
    if func in _CHANGES:
        return args[0] if _is_ours(args[0], mode) else NotImplemented
    if func in _CHANGES_LISTS:
        return None if all(_is_ours(one, mode) for one in args[0]) else NotImplemented
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
    several = func in _SEVERAL
    if not several and func not in _FOLLOWS:
        return NotImplemented
    device = getattr(args[0], "fake_device", None)
    for arg in args:
        if isinstance(arg, torch.Tensor) and not (
            _is_ours(arg, mode) and arg.fake_device == device
        ):
            return NotImplemented
    with in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    if several:
        return type(out)(FakeTensor(mode, one, device) for one in out)
    return FakeTensor(mode, out, device)


def _allocated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    first, device = args[0], kwargs.get("device")
    if isinstance(first, torch.Tensor):
        if not _is_ours(first, mode):
            return NotImplemented
        device = first.fake_device if device is None else device
    if kwargs.get("pin_memory") or (device is not None and device.type == "meta"):
        return NotImplemented
    with in_kernel_invocation_manager(mode):
        out = _ALLOCATES[func](*args, **{**kwargs, "device": torch.device("meta")})
    return FakeTensor(mode, out, device or torch.device("cpu"))


# ---- shapes written down: of the results, all of them contiguous and of the first tensor's type


def _addmm(_: Any, left: torch.Tensor, right: torch.Tensor) -> Any:
    return [(left.shape[0], right.shape[1])]


def _index_copy(self: torch.Tensor, dim: int, index: Any, source: Any) -> Any:
    del dim, index, source
    return [self.shape]


def _index_select(self: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
    shape = list(self.shape)
    if not shape:
        return None
    shape[dim] = index.numel()
    return [shape]


def _embedding(weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> Any:
    return [(*indices.shape, *weight.shape[1:])]


def _embedding_backward(grad: torch.Tensor, _: Any, count: int, *__: Any) -> Any:
    return [(count, grad.shape[-1])]


def _vector_norm(_: Any, __: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
    return [()] if dim is None and not keepdim else None


def _nll_loss(_: Any, __: Any, ___: Any, reduction: int, ____: Any) -> Any:
    return [(), ()] if reduction else None


def _nll_loss_backward(_: Any, self: torch.Tensor, *__: Any) -> Any:
    return [self.shape]


_SHAPES: dict[Any, Callable[..., Sequence[Sequence[int]] | None]] = {
    _aten.addmm.default: _addmm,
    _aten.index_copy.default: _index_copy,
    _aten.index_add.default: _index_copy,
    _aten.index_select.default: _index_select,
    _aten.embedding.default: _embedding,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten.nll_loss_forward.default: _nll_loss,
    _aten.nll_loss_backward.default: _nll_loss_backward,
}


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
    with in_kernel_invocation_manager(mode):
        made = torch.empty(shape, dtype=dtype, device="meta")
    return FakeTensor(mode, made, like.fake_device)


def _is_ours(tensor: Any, mode: Any) -> TypeGuard[FakeTensor]:
    return type(tensor) is FakeTensor and tensor.fake_mode is mode and tensor.constant is None
