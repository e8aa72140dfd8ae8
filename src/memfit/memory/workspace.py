"""Scratch memory of the matrix libraries, which PyTorch takes from its own allocator.

Each thread that multiplies matrices has a cuBLAS handle, and each handle a workspace that stays
until the process ends: the forward pass runs on one thread, the backward pass on another.
cuBLASLt shares the workspace of cuBLAS unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0.
(aten/src/ATen/cuda/CublasHandlePool.cpp.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from memfit.units import KIB, MIB

_LARGE_FROM_MAJOR = 9  # Hopper and Blackwell
_LARGE_BYTES = 32 * MIB
_SMALL_BYTES = 2 * 4096 * KIB + 8 * 16 * KIB  # cuBLAS's own default, :4096:2:16:8
_SEPARATE_LT_BYTES = 1 * MIB


def handle_workspace_bytes(
    capability: tuple[int, int], environment: Mapping[str, str] = os.environ
) -> int:
    """The workspace of one thread; CUBLAS_WORKSPACE_CONFIG (':4096:8') overrules the default."""
    pairs = re.findall(r":(\d+):(\d+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        cublas_bytes = sum(int(size) * KIB * int(count) for size, count in pairs)
    else:
        cublas_bytes = _LARGE_BYTES if capability[0] >= _LARGE_FROM_MAJOR else _SMALL_BYTES
    return cublas_bytes + _lt_bytes(environment)


def workspace_bytes(
    capability: tuple[int, int],
    *,
    backward: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """What stays allocated for the libraries: one handle forward, one more backward."""
    return handle_workspace_bytes(capability, environment) * (2 if backward else 1)


def _lt_bytes(environment: Mapping[str, str]) -> int:
    """cuBLASLt's own workspace, where it was told not to share."""
    if environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1") != "0":
        return 0
    size = environment.get("CUBLASLT_WORKSPACE_SIZE", "")
    return int(size) * KIB if size.isdigit() else _SEPARATE_LT_BYTES
