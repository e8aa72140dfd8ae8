"""The CUDA context: what a process takes on the card beside what PyTorch allocates.

It grows with the card, since every thread it can run at once gets a stack, and with every cuBLAS
handle and kernel that is loaded. On an H200 (benchmarks/memory_gpu.py): 527 MiB at first, 619 with
the first kernel, 64 more with each of two cuBLAS handles (8 where their workspaces are small), 751
to 785 in training. A measured value replaces the prediction wherever there is a GPU to ask.

A measurement counts only when the libraries are loaded: before the first product of each thread it
misses both handles. `load_libraries` makes them, small, whatever the process did before.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

from memfit.memory import nvml
from memfit.memory.workspace import (
    drop_workspaces,
    handle_workspace_bytes,
    small_workspaces,
)
from memfit.units import KIB, MIB

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
    large = handle_workspace_bytes(capability, environment={})
    small = handle_workspace_bytes(capability, environment)
    if small < large:
        context_bytes -= _HANDLES * (_OUTSIDE * large - small)
    graphs_bytes = round(graphed_kernels * _GRAPH_BYTES_PER_KERNEL)
    return context_bytes + (_STREAMS_BYTES if streams else 0) + graphs_bytes


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
