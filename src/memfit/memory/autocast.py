"""CUDA's autocast rules, on the CPU's autocast.

Autocast keeps one list of operators for each kind of device. The CPU's misses most of those
CUDA runs in fp32 (layer_norm, softmax, pow, sum ...), and each of them decides whether a
copy of an activation is made and kept. What is missing is added for the time of a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

_HALF = (torch.float16, torch.bfloat16)

# These take a `dtype` and are given fp32 there: no copy of the input is made.
_SET_DTYPE = {
    "aten::prod",
    "aten::prod.dim_int",
    "aten::softmax.int",
    "aten::log_softmax.int",
    "aten::cumprod",
    "aten::cumsum",
    "aten::linalg_vector_norm",
    "aten::linalg_matrix_norm",
    "aten::linalg_matrix_norm.str_ord",
    "aten::sum",
    "aten::sum.dim_IntList",
}

# Their arguments are promoted to the widest type among them.
_PROMOTED = {
    "aten::addcdiv",
    "aten::addcmul",
    "aten::atan2",
    "aten::bilinear",
    "aten::cross",
    "aten::dot",
    "aten::vdot",
    "aten::index_put",
    "aten::tensordot",
    "aten::scatter_add",
}

# Low precision on CUDA; on the CPU they are made of operators that are.
_LOWERED = {
    "aten::_convolution",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_lstm_cell",
    "aten::addmv",
    "aten::addr",
    "aten::chain_matmul",
    "aten::convolution",
    "aten::cudnn_convolution",
    "aten::cudnn_convolution_transpose",
    "aten::einsum",
    "aten::gru_cell",
    "aten::linalg_multi_dot",
    "aten::lstm_cell",
    "aten::mv",
    "aten::rnn_relu_cell",
    "aten::rnn_tanh_cell",
}

# On the CPU's list, and on no list of CUDA's.
_ONLY_CPU = ("aten::cat", "aten::stack", "aten::cross_entropy_loss", "aten::index_copy")


def cuda_fp32_operators() -> set[str]:
    """The operators this torch runs in fp32 under CUDA autocast and not under the CPU's."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has(name, "AutocastCUDA") and not has(name, "AutocastCPU")
    }
    return names - _SET_DTYPE - _PROMOTED - _LOWERED


def install_cuda_autocast(library: Any) -> None:
    """Register what the CPU's autocast lacks; the caller destroys the library."""
    for name in cuda_fp32_operators():
        library.impl(name, _in_fp32(_overload(name)), "AutocastCPU")
    for name in _SET_DTYPE:
        library.impl(name, _with_fp32_result(_overload(name)), "AutocastCPU")
    for name in _PROMOTED:
        library.impl(name, _promoted(_overload(name)), "AutocastCPU")
    for name in _ONLY_CPU:
        library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")


def _overload(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def _cast(dtype: torch.dtype) -> Callable[[Any], Any]:
    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in (*_HALF, torch.float32):
            return value.to(dtype)
        return value

    return cast


def _in_fp32(op: Any) -> Callable[..., Any]:
    cast = _cast(torch.float32)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


def _with_fp32_result(op: Any) -> Callable[..., Any]:
    position = [argument.name for argument in op._schema.arguments].index("dtype")
    keyword = op._schema.arguments[position].kwarg_only

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            if not args[0].is_floating_point():
                return op(*args, **kwargs)
            if keyword:
                kwargs["dtype"] = kwargs.get("dtype") or torch.float32
            elif len(args) > position:
                chosen = args[position] or torch.float32
                args = (*args[:position], chosen, *args[position + 1 :])
            else:
                kwargs["dtype"] = kwargs.get("dtype") or torch.float32
            return op(*args, **kwargs)

    return kernel


def _promoted(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            seen: set[torch.dtype] = set()
            tree_map(lambda v: seen.add(v.dtype) if isinstance(v, torch.Tensor) else None, args)
            if torch.float32 in seen and seen & set(_HALF):
                args = tree_map(_cast(torch.float32), args)
            return op(*args, **kwargs)

    return kernel
