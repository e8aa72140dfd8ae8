"""Operators that use memory differently on a CUDA device than on the CPU.

The trace runs on fake CPU tensors, since a torch without CUDA has no others. Where the two
devices save different tensors for the backward pass, the CUDA behaviour is put in place of
the CPU's while the trace runs; buffers that only a CUDA kernel takes are added by formula.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.memory.attention import attend, attention_temporaries
from memfit.memory.autocast import install_cuda_autocast
from memfit.memory.reductions import Multiprocessors, reduction_buffer_bytes

_aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def _grouped_mm(a: Any, b: Any, offs: Any = None, *_: Any, **__: Any) -> Any:
    """The product of mixture-of-experts layers, whose shapes torch knows for bf16 only."""
    if a.dim() == 2 and b.dim() == 2:
        return a.new_empty((offs.numel(), a.shape[0], b.shape[1]))
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _efficient_backward(_grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    """Of packed texts without dropout: torch's own rule of shapes takes too few arguments."""
    made = [one.new_empty(one.shape) for one in (query, key, value)]
    return (*made, query.new_empty(0))


_SUPPLIED: dict[str, Callable[..., Any]] = {
    "aten::_grouped_mm": _grouped_mm,
    "aten::_efficient_attention_backward": _efficient_backward,
}


def register_operator(name: str, function: Callable[..., Any]) -> None:
    """Supply what the trace cannot know: `function` stands in for the operator `name`.

    It is called with the operator's own arguments (fake tensors) and returns tensors of the
    shape the real operator would, for instance the largest possible one:

        register_operator("aten::nonzero", lambda x: x.new_empty(x.numel(), x.dim(), dtype=int))
    """
    _SUPPLIED[_canonical(name)] = function


def unregister_operator(name: str) -> None:
    """Take a supplied operator back."""
    _SUPPLIED.pop(_canonical(name), None)


def supplied_operator(func: Any) -> Callable[..., Any] | None:
    """What was registered for this operator, if anything was."""
    return _SUPPLIED.get(func._schema.name)


def _canonical(name: str) -> str:
    return name if "::" in name else f"aten::{name}"


class CudaKernels:
    """What a CUDA device of one compute capability does with memory."""

    def __init__(
        self, capability: tuple[int, int], multiprocessors: int, *, autocast: bool = False
    ) -> None:
        self.capability = capability
        self._multiprocessors = Multiprocessors.of(capability, multiprocessors)
        self._autocast = autocast

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run operators on fake tensors as CUDA composes them; undone on leaving."""
        make: Any = torch.library.Library
        library = make("aten", "IMPL")
        with warnings.catch_warnings():
            # torch warns of any override; these are taken back below.
            warnings.simplefilter("ignore")
            library.impl("dropout", _dropout, "AutogradCPU")
            library.impl("softmax.int", _softmax, "AutogradCPU")
            library.impl("log_softmax.int", _log_softmax, "AutogradCPU")
            library.impl("rms_norm", _rms_norm, "AutogradCPU")
            library.impl("scaled_dot_product_attention", self._attention, "AutogradCPU")
            if self._autocast:
                install_cuda_autocast(library)
        try:
            yield
        finally:
            library._destroy()

    def _attention(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(query, FakeTensor):
            op = _aten.scaled_dot_product_attention.default
            return op._op_dk(_COMPOSITE, query, *args, **kwargs)
        return attend(self.capability, query, *args, **kwargs)

    def temporaries(self, func: Any, args: tuple[Any, ...], out: Any) -> Iterator[int]:
        """Bytes of the buffers a CUDA kernel takes and gives back within the operator."""
        formula = _TEMPORARIES.get(func)
        if formula is not None:
            yield from formula(args, out)
        elif func in _REDUCTIONS:
            yield self._reduction(func, args)
        else:
            yield from attention_temporaries(func, args)

    def _reduction(self, func: Any, args: tuple[Any, ...]) -> int:
        tensor = args[0]
        place = _REDUCTIONS[func]
        dims = args[place] if place is not None and len(args) > place else None
        if dims is None or dims == []:
            dims = range(tensor.dim())
        dims = [dims] if isinstance(dims, int) else dims
        return reduction_buffer_bytes(tensor.shape, tensor.stride(), dims, self._multiprocessors)


def _dropout(x: Any, p: float, train: bool) -> Any:
    if not isinstance(x, FakeTensor):
        return _aten.dropout.default._op_dk(_COMPOSITE, x, p, train)
    if not train or p == 0 or x.numel() == 0:
        return x
    return _aten.native_dropout(x, p, train)[0]


def _softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    if isinstance(x, FakeTensor) and x.dtype is torch.float16 and dtype is torch.float32:
        # One kernel reads half and writes fp32; the CPU makes an fp32 copy of its input.
        return _aten._softmax(x, dim, True)
    return _aten.softmax.int._op_dk(_COMPOSITE, x, dim, dtype)


def _log_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    if isinstance(x, FakeTensor) and x.dtype is torch.float16 and dtype is torch.float32:
        return _aten._log_softmax(x, dim, True)
    return _aten.log_softmax.int._op_dk(_COMPOSITE, x, dim, dtype)


def _rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    if isinstance(x, FakeTensor):
        return _aten._fused_rms_norm(x, shape, weight, eps)[0]
    return _aten.rms_norm.default._op_dk(_COMPOSITE, x, shape, weight, eps)


def _embedding_backward(args: tuple[Any, ...], out: Any) -> Iterator[int]:
    """Sorting the indices and one partial row for every ten of them.

    Up to 3072 indices a kernel without sorting is used. See `embedding_backward_cuda_kernel`.
    """
    indices = args[1]
    count = indices.numel()
    if count <= 3072:
        return
    yield 4 * count * indices.element_size()
    segments = count // 10 + min(count, args[2])
    width = -(-out.shape[-1] // 32) * 32
    yield segments * width * 4


def _norms(args: tuple[Any, ...], _out: Any) -> Iterator[int]:
    """One partial sum for every chunk of 65536 elements of the longest tensor."""
    tensors = args[0]
    chunks = max(-(-t.numel() // 65536) for t in tensors)
    yield len(tensors) * chunks * 4


def _layer_norm_backward(args: tuple[Any, ...], out: Any) -> Iterator[int]:
    """Partial sums of the two parameter gradients, one row for every 64 or so."""
    grad, shape = args[0], args[2]
    width = math.prod(shape)
    rows = grad.numel() // width
    if out[1] is not None and rows > 64:
        yield 2 * min(rows // 64 + 1, 64) * width * 4


# Operators that add up, and which argument names the dimensions.
_REDUCTIONS: dict[Any, int | None] = {
    _aten.sum.default: None,
    _aten.sum.dim_IntList: 1,
    _aten.mean.default: None,
    _aten.mean.dim: 1,
    _aten.linalg_vector_norm.default: 2,
    _aten.amax.default: 1,
    _aten.logsumexp.default: 1,
}

_TEMPORARIES: dict[Any, Callable[[tuple[Any, ...], Any], Iterator[int]]] = {
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten._foreach_norm.Scalar: _norms,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
}
