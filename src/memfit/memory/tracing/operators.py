"""Operators that use memory differently on a CUDA device than on the CPU.

A sum over many rows is shared by several thread blocks, which leave their partial results
in global memory. PyTorch sizes that buffer by the launch, not by the result: the bias
gradient of a linear layer takes twice the memory of the gradient it is summed from.
(`setReduceConfig` in aten/src/ATen/native/cuda/Reduce.cuh.)

Autocast keeps one list of operators for each kind of device. The CPU's misses most of those
CUDA runs in fp32 (layer_norm, softmax, pow, sum ...), and each of them decides whether a
copy of an activation is made and kept. What is missing is added for the time of a trace.

The trace runs on fake CPU tensors, since a torch without CUDA has no others. Where the two
devices save different tensors for the backward pass, the CUDA behaviour is put in place of
the CPU's while the trace runs; buffers that only a CUDA kernel takes are added by formula.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from memfit.memory.cuda_context import threads_per_multiprocessor
from memfit.memory.tracing.attention_kernels import (
    ATTENTION_BACKWARD,
    attend,
    attention_temporaries,
)

_MOST_THREADS = 512  # of a block that reduces
_WARP = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256  # a thread adds up
_ACCUMULATOR_BYTES = 4  # half types are added in fp32


@dataclass(frozen=True)
class Multiprocessors:
    """How much a device runs at once."""

    count: int
    threads: int

    @classmethod
    def of(cls, capability: tuple[int, int], count: int) -> Multiprocessors:
        """So many multiprocessors of a compute capability."""
        return cls(count, threads_per_multiprocessor(capability))


def reduction_buffer_bytes(
    shape: Sequence[int], stride: Sequence[int], dims: Sequence[int], device: Multiprocessors
) -> int:
    """What adding up `dims` of a tensor takes beside its result; 0 where one block suffices."""
    reduced = {dim % len(shape) for dim in dims} if shape else set()
    inputs = math.prod(shape[dim] for dim in reduced)
    outputs = math.prod(shape) // max(inputs, 1)
    if inputs <= 1 or outputs == 0:
        return 0
    kept = [dim for dim in range(len(shape)) if dim not in reduced and shape[dim] > 1]
    fastest = min((stride[dim] for dim in reduced if shape[dim] > 1), default=1)
    if not kept or fastest < min(stride[dim] for dim in kept):
        return _along_rows(inputs, outputs, contiguous=fastest == 1, device=device)
    return _across_rows(inputs, outputs, _vector(shape, stride, reduced, kept), device)


def _across_rows(inputs: int, outputs: int, vector: int, device: Multiprocessors) -> int:
    """Neighbours in memory belong to different sums: each thread has its own."""
    width, height = _block(outputs // vector, inputs, _MOST_THREADS // vector)
    grid = -(-(outputs // vector) // width)
    if inputs < min(height * 16, _MOST_VALUES):
        return 0
    blocks = _blocks_per_sum(-(-inputs // height), grid, width * height, device)
    return _ACCUMULATOR_BYTES * outputs * blocks * width * vector if blocks > 1 else 0


def _along_rows(inputs: int, outputs: int, *, contiguous: bool, device: Multiprocessors) -> int:
    """Neighbours in memory belong to one sum: the threads of a row share it."""
    width, height = _block(
        inputs // 4 if contiguous and inputs >= 128 else inputs, outputs, _MOST_THREADS
    )
    values = -(-inputs // width)
    if values < min(height * 16, _MOST_VALUES):
        return 0
    blocks = _blocks_per_sum(-(-values // height), outputs, width * height, device)
    return _ACCUMULATOR_BYTES * outputs * blocks if blocks > 1 else 0


def _block(x: int, y: int, most: int) -> tuple[int, int]:
    wide, high = _power(x, most), _power(y, most)
    height = min(high, most // min(wide, _WARP))
    return min(wide, most // height), height


def _power(count: int, most: int) -> int:
    return most if count >= most else 1 << max(count, 1).bit_length() - 1


def _blocks_per_sum(values: int, grid: int, threads: int, device: Multiprocessors) -> int:
    target = device.count * (device.threads // threads)
    if values < _MOST_VALUES or grid > target:
        return 1
    return max(min(-(-target // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))


def _vector(
    shape: Sequence[int], stride: Sequence[int], reduced: set[int], kept: Sequence[int]
) -> int:
    """How many neighbouring sums a thread takes: four if all strides allow it."""
    inner = min(kept, key=lambda dim: stride[dim])
    if stride[inner] != 1:
        return 1
    width, pitch = shape[inner], []
    for dim in sorted({*reduced, *kept} - {inner}, key=lambda dim: stride[dim]):
        if dim in kept and stride[dim] == width:
            width *= shape[dim]  # one dimension with the inner one
        elif shape[dim] > 1:
            pitch.append(stride[dim])
    return math.gcd(4, width, *pitch)


_HALF = (torch.float16, torch.bfloat16)

# These take a `dtype` and are given fp32 there: no copy of the input is made.
_SET_DTYPE = {
    "aten::prod", "aten::prod.dim_int", "aten::softmax.int", "aten::log_softmax.int",
    "aten::cumprod", "aten::cumsum", "aten::linalg_vector_norm", "aten::linalg_matrix_norm",
    "aten::linalg_matrix_norm.str_ord", "aten::sum", "aten::sum.dim_IntList",
}  # fmt: skip

# Their arguments are promoted to the widest type among them.
_PROMOTED = {
    "aten::addcdiv", "aten::addcmul", "aten::atan2", "aten::bilinear", "aten::cross", "aten::dot",
    "aten::vdot", "aten::index_put", "aten::tensordot", "aten::scatter_add",
}  # fmt: skip

# Low precision on CUDA; on the CPU they are made of operators that are.
_LOWERED = {
    "aten::_convolution", "aten::_scaled_dot_product_flash_attention", "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_lstm_cell", "aten::addmv", "aten::addr", "aten::chain_matmul",
    "aten::convolution", "aten::cudnn_convolution", "aten::cudnn_convolution_transpose",
    "aten::einsum", "aten::gru_cell", "aten::linalg_multi_dot", "aten::lstm_cell", "aten::mv",
    "aten::rnn_relu_cell", "aten::rnn_tanh_cell",
}  # fmt: skip

# On the CPU's list, and on no list of CUDA's.
_ONLY_CPU = ("aten::cat", "aten::stack", "aten::cross_entropy_loss", "aten::index_copy")


@cache
def cuda_fp32_operators() -> frozenset[str]:
    """The operators this torch runs in fp32 under CUDA autocast and not under the CPU's."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = frozenset(
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has(name, "AutocastCUDA") and not has(name, "AutocastCPU")
    )
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
    return _SUPPLIED.get(func._schema.name) if _SUPPLIED else None


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

    def temporaries(self, func: Any, args: tuple[Any, ...], out: Any) -> Iterable[int]:
        """Bytes of the buffers a CUDA kernel takes and gives back within the operator."""
        formula = _TEMPORARIES.get(func)
        if formula is not None:
            return formula(args, out)
        if func in _REDUCTIONS:
            return (self._reduction(func, args),)
        return attention_temporaries(func, args) if func in ATTENTION_BACKWARD else ()

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
