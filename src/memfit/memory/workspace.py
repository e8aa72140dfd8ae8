"""Scratch memory of the matrix libraries, which PyTorch takes from its own allocator.

Each thread that multiplies matrices has a cuBLAS handle, and each handle a workspace that stays
until the process ends: the forward pass runs on one thread, the backward pass on another. A
linear layer with a bias goes through cuBLASLt, which has a small workspace of its own unless
TORCH_CUBLASLT_UNIFIED_WORKSPACE=1. (aten/src/ATen/cuda/CublasHandlePool.cpp, CUDABlas.cpp.)

Left allocated by 71 stock runs on an H200: 65 MiB, 66 with checkpointing, since then the backward
thread runs linear layers too, and 64 for a model without biases.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping

from memfit.units import KIB, MIB

_LARGE_FROM_MAJOR = 9  # Hopper and Blackwell
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
    return _LARGE_BYTES if capability[0] >= _LARGE_FROM_MAJOR else _SMALL_BYTES


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
