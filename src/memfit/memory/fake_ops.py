"""The commonest operators on fake tensors, without the way around through torch's own cache.

A trace is thousands of views and allocations. Fake tensors look each of them up by every property
of every argument, which takes longer than the operator itself does on the meta device. Those
listed here have shapes that follow from their first tensor alone, so that the meta kernel can be
asked at once; all others go the usual way.
"""

from __future__ import annotations

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
        _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.clone.default,
        _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor,
    )
)  # fmt: skip
_ALLOCATES = frozenset(
    (
        _aten.new_empty.default, _aten.new_zeros.default, _aten.empty_like.default,
        _aten.zeros_like.default, _aten.empty.memory_format, _aten.zeros.default,
    )
)  # fmt: skip
_WRITES = frozenset((_aten.linalg_vector_norm.out, _aten.where.self_out))
"""Into a tensor handed over, which has the right shape already."""
_SEVERAL = frozenset((_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int))


def run_directly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    """What the operator gives, or None where it must go the usual way."""
    if func in _ALLOCATES:
        return _allocated(func, args, kwargs, mode)
    if func in _WRITES:
        return kwargs["out"] if _is_ours(kwargs["out"], mode) else None
    several = func in _SEVERAL
    if not several and func not in _FOLLOWS:
        return None
    device = getattr(args[0], "fake_device", None)
    for arg in args:
        if isinstance(arg, torch.Tensor) and not (
            _is_ours(arg, mode) and arg.fake_device == device
        ):
            return None
    with in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    if several:
        return type(out)(FakeTensor(mode, one, device) for one in out)
    return FakeTensor(mode, out, device)


def _allocated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    first, device = args[0], kwargs.get("device")
    if isinstance(first, torch.Tensor):
        if not _is_ours(first, mode):
            return None
        device = first.fake_device if device is None else device
    if kwargs.get("pin_memory") or (device is not None and device.type == "meta"):
        return None
    with in_kernel_invocation_manager(mode):
        out = func(*args, **{**kwargs, "device": torch.device("meta")})
    return FakeTensor(mode, out, device or torch.device("cpu"))


def _is_ours(tensor: Any, mode: Any) -> TypeGuard[FakeTensor]:
    return type(tensor) is FakeTensor and tensor.fake_mode is mode and tensor.constant is None
