"""Segments that grow: what torch's allocator does about gaps between tensors of changing size.

Packed batches are of another size every step. With fixed segments each new size leaves gaps that
the next does not fit into (a tenth of an fp32 run's memory, measured); segments of mapped pages
grow and shrink instead. Linux only, and not where the user said otherwise.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def segments_expand(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether memfit's runs have them on a CUDA card."""
    said = ",".join(environment.get(name, "") for name in _VARIABLES)
    return sys.platform == "linux" and "expandable_segments:False" not in said


def use_expandable_segments() -> None:
    """From the next segment on; before the model is moved, so that all of it has them."""
    if not segments_expand():
        return
    import torch

    settings: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    with contextlib.suppress(RuntimeError):  # a driver without virtual memory management
        (settings or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
