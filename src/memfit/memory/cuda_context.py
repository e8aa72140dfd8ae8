"""The CUDA context and the libraries' workspaces: device memory beside a step's tensors.

Each thread that multiplies matrices has a cuBLAS handle, and each handle a workspace that stays
until the process ends: the forward pass runs on one thread, the backward pass on another. A
linear layer with a bias goes through cuBLASLt, which has a small workspace of its own unless
TORCH_CUBLASLT_UNIFIED_WORKSPACE=1. (aten/src/ATen/cuda/CublasHandlePool.cpp, CUDABlas.cpp.)

Left allocated by 71 stock runs on an H200: 65 MiB, 66 with checkpointing, since then the backward
thread runs linear layers too, and 64 for a model without biases.

It grows with the card, since every thread it can run at once gets a stack, and with every cuBLAS
handle and kernel that is loaded. On an H200 (benchmarks/memory_gpu.py): 527 MiB at first, 619 with
the first kernel, 64 more with each of two cuBLAS handles (8 where their workspaces are small), 751
to 785 in training. A measured value replaces the prediction wherever there is a GPU to ask.

A measurement counts only when the libraries are loaded: before the first product of each thread it
misses both handles. `load_libraries` makes them, small, whatever the process did before.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from memfit.memory import nvml
from memfit.units import KIB, MIB

if TYPE_CHECKING:
    import torch

LARGE_WORKSPACE_FROM = (9, 0)  # Hopper and Blackwell
_LARGE_BYTES = 32 * MIB
_SMALL_BYTES = 2 * 4096 * KIB + 8 * 16 * KIB  # cuBLAS's own default, :4096:2:16:8
_LT_BYTES = 1 * MIB
VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
SMALL = ":4096:2:16:8"


def handle_workspace_bytes(
    capability: tuple[int, int], environment: Mapping[str, str] = os.environ
) -> int:
    """cuBLAS's workspace of one thread; CUBLAS_WORKSPACE_CONFIG (':4096:8') overrules it."""
    pairs = re.findall(r":(\d+):(\d+)", environment.get(VARIABLE, ""))
    if pairs:
        return sum(int(size) * KIB * int(count) for size, count in pairs)
    return _LARGE_BYTES if capability >= LARGE_WORKSPACE_FROM else _SMALL_BYTES


def lt_workspace_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """cuBLASLt's workspace of one thread; nothing where it was told to share cuBLAS's."""
    if environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "1":
        return 0
    size = environment.get("CUBLASLT_WORKSPACE_SIZE", "")
    return int(size) * KIB if size.isdigit() else _LT_BYTES


def drop_workspaces() -> None:
    """Give all of them back; each is taken anew by the next product of its thread and stream."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()


@contextlib.contextmanager
def small_workspaces() -> Iterator[None]:
    """Inside, cuBLAS's workspaces have the size of older cards; a size the user set stays.

    Torch tells cuBLAS the size it reads now, whatever the size of the workspace it has: one made
    under the small setting would be written to far beyond its end under the large one. So all are
    given back on the way in and on the way out.
    """
    if VARIABLE in os.environ:
        drop_workspaces()
        yield
        return
    os.environ[VARIABLE] = SMALL
    drop_workspaces()
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        with contextlib.suppress(RuntimeError):  # of a card that no longer answers
            drop_workspaces()


def workspace_bytes(
    capability: tuple[int, int],
    *,
    backward: bool = True,
    recompute: bool = False,
    biases: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """All that stays allocated for the libraries once a step has run."""
    handles = 2 if backward else 1
    lt_handles = (1 + (backward and recompute)) if biases else 0
    return handles * handle_workspace_bytes(
        capability, environment
    ) + lt_handles * lt_workspace_bytes(environment)


def take_workspaces(device: torch.device) -> None:
    """One small linear layer on the current stream, forward and backward.

    cuBLAS takes a workspace at a thread's first product on a stream, and keeps it. In the middle
    of a first step it would lie between activations, and its whole page of 20 MiB with it, when
    they are gone: 40 MB of a BERT-Base's graphs on an H200. Before the first step it lies at the
    end of what stays. Those that earlier trainings took on other streams are given back.
    """
    drop_workspaces()
    import torch

    half = torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = torch.bfloat16 if half else torch.float16
    with torch.enable_grad():
        weight = torch.zeros(16, 16, device=device, dtype=dtype, requires_grad=True)
        bias = torch.zeros(16, device=device, dtype=dtype, requires_grad=True)
        out = torch.nn.functional.linear(weight, weight, bias)
        torch.autograd.grad(out.sum(), (weight, bias))


_BASE_BYTES = 8 * MIB
_PER_THREAD_BYTES = 2.31 * KIB
_KERNELS_BYTES = 18 * MIB
_HANDLES = 2  # one forward, one backward
_OUTSIDE = 2  # a handle holds twice its workspace outside the allocator; a small one, once

_STREAMS_BYTES = 70 * MIB
"""The first stream of one's own makes torch create all 32 of its pool, each with a queue on the
card: 73.4 MB in every run on an H200."""

PAGE_BYTES = 20 * MIB
"""torch's allocator holds a request against its limit, then maps whole pages of this size: it may
hold up to a page more than it was allowed."""

LOADED_LATER_BYTES = 8 * MIB
"""Kernels that a training loads after the libraries: its own, another batch shape's, those of an
evaluation. On an H200: 2 to 6 MB beyond what is measured before the first step."""

_GRAPH_BYTES_PER_KERNEL = 4_600
"""What the driver keeps for each kernel of each captured graph, outside the allocator: seven
runs of five or six graphs of 970 to 2,070 kernels took 92 to 113 MB more than launched ones."""

USUAL_GRAPHED_KERNELS = 6_000
"""Of all graphs together, where nobody has counted them."""

_THREADS_PER_MULTIPROCESSOR = {
    (7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536,
}  # fmt: skip

_MOST_THREADS = 2048

_first_bytes: dict[int, int] = {}
"""By device: the context when it was created, until somebody asks for it again."""


def threads_per_multiprocessor(capability: tuple[int, int]) -> int:
    """The threads a multiprocessor holds at once."""
    return _THREADS_PER_MULTIPROCESSOR.get(capability, _MOST_THREADS)


def predicted_context_bytes(capability: tuple[int, int], multiprocessors: int) -> int:
    """The context of a training process on a card nobody has measured.

    base + kernels + multiprocessors x threads x stack + cuBLAS, with an H200's stack.
    """
    threads = multiprocessors * threads_per_multiprocessor(capability)
    stacks_bytes = round(threads * _PER_THREAD_BYTES)
    cublas_bytes = _HANDLES * _OUTSIDE * handle_workspace_bytes(capability, environment={})
    return _BASE_BYTES + _KERNELS_BYTES + stacks_bytes + cublas_bytes


_RANGE_SHARE = 1.25
"""How far the rule may be off on large cards. Of three cards whose context is known, of three
generations (cards.toml), it is within 5 %."""

_REPORTED_BYTES = 400 * 10**6
"""What people report of gaming cards since CUDA 11.7 (250 to 400 MB), whatever their size. Of small
cards the rule says less, and nobody has published a measurement of one."""


def context_range(capability: tuple[int, int], multiprocessors: int) -> tuple[int, int]:
    """The least and the most that the context of a card nobody has measured may take."""
    ruled = predicted_context_bytes(capability, multiprocessors)
    return ruled, max(round(_RANGE_SHARE * ruled), _REPORTED_BYTES)


def run_context_bytes(
    context_bytes: int,
    capability: tuple[int, int],
    environment: Mapping[str, str] = os.environ,
    *,
    streams: bool = False,
    graphed_kernels: float = 0,
) -> int:
    """The context of one run on a card whose usual one is known.

    `environment` may make cuBLAS's workspaces small, in a process that has not made them yet;
    `streams` are those of copies and graphs, `graphed_kernels` the kernels of all graphs together.
    """
    context_bytes -= _saved_by_small_handles(capability, environment)
    graphs_bytes = round(graphed_kernels * _GRAPH_BYTES_PER_KERNEL)
    return context_bytes + (_STREAMS_BYTES if streams else 0) + graphs_bytes


def with_large_handles(context_bytes: int, capability: tuple[int, int]) -> int:
    """The usual context, from one measured with small handles, as `load_libraries` makes them."""
    return context_bytes + _saved_by_small_handles(capability, {VARIABLE: SMALL})


def _saved_by_small_handles(capability: tuple[int, int], environment: Mapping[str, str]) -> int:
    large = handle_workspace_bytes(capability, environment={})
    small = handle_workspace_bytes(capability, environment)
    return _HANDLES * (_OUTSIDE * large - small) if small < large else 0


def own_context_bytes(index: int = 0) -> int | None:
    """The context as the driver's books have it; None where they do not tell processes apart."""
    import torch

    with nvml.open_device(index) as device:
        own_bytes = None if device is None else device.use().own_bytes
    return None if own_bytes is None else own_bytes - torch.cuda.memory_reserved(index)


def measured_context_bytes(index: int = 0, *, load: bool = True) -> int | None:
    """The context of this process on a device, what other processes hold left out; or None.

    With `load`, the libraries of a training step are loaded first, so that they are counted. Where
    the driver does not tell processes apart, the answer of the call that created the context is
    given once more: only that call could see what others held before.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    with nvml.open_device(index) as device:
        fresh = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        others_bytes = device.use().used_bytes if device is not None and fresh else None
        if load:
            load_libraries(index)
        else:
            torch.zeros(1, device=torch.device("cuda", index))
        if fresh:  # leave the allocator as empty as it was
            drop_workspaces()
            torch.cuda.empty_cache()
        reserved_bytes = torch.cuda.memory_reserved(index)
        own_bytes = device.use().own_bytes if device is not None else None
        if own_bytes is not None:
            return own_bytes - reserved_bytes
        if others_bytes is not None and device is not None:
            _first_bytes[index] = device.use().used_bytes - others_bytes - reserved_bytes
            return _first_bytes[index]
        if index in _first_bytes:
            return _first_bytes.pop(index)
    # Neither the driver's books nor a moment before the context: all use is taken as our own.
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return total_bytes - free_bytes - reserved_bytes


@functools.cache
def load_libraries(index: int) -> None:
    """Runs a small product of each precision, forward and backward, once in a process.

    A handle keeps the size that CUBLAS_WORKSPACE_CONFIG has when it is made, outside torch's
    allocator, and uses none of it: torch hands its own workspace over. So it is made small: 112 MiB
    less of an H200's context for the rest of the process.
    """
    import torch

    device = torch.device("cuda", index)
    dtypes = [torch.float32, torch.float16]
    if torch.cuda.get_device_capability(index) >= (8, 0):
        dtypes.append(torch.bfloat16)
    with small_workspaces(), torch.enable_grad():
        for dtype in dtypes:
            weight = torch.zeros(64, 64, device=device, dtype=dtype, requires_grad=True)
            normed = torch.nn.functional.layer_norm(weight @ weight, (64,))
            torch.autograd.grad(normed.sum(), weight)
        torch.cuda.synchronize(index)
