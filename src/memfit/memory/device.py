"""What the device at hand is and has: the rest of memfit asks here, not torch.

cuda    NVIDIA's cards: everything. One that acts as another (`cards.acted_card`) is described so.
rocm    AMD's cards, which torch calls `cuda` as well
mps     Apple's, which share the computer's memory
xpu     Intel's
cpu

The three in the middle train with what torch does alike on every device: sdpa, autocast, micro-
batches, recomputing. Their memory is read by torch's own counters, and tensors are counted as on a
CPU. Nothing of it was run on the real thing.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import psutil

from memfit.memory import nvml
from memfit.memory.cards import TRITON_FROM, acted_card, kept_rows, match_card
from memfit.memory.cuda_context import (
    context_range,
    measured_context_bytes,
    own_context_bytes,
    predicted_context_bytes,
)
from memfit.units import MIB

if TYPE_CHECKING:
    import torch


_HIGH, _LOW = "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"


def kind_of(device: torch.device) -> str:
    """What memfit calls this kind of device."""
    import torch

    return "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type


def is_cuda(device: torch.device) -> bool:
    """Whether this is one of NVIDIA's cards."""
    return kind_of(device) == "cuda"


def has_cuda() -> bool:
    """Whether this machine has a card of NVIDIA's; creates no context."""
    import torch

    return torch.cuda.is_available() and torch.version.hip is None


def best_device() -> torch.device:
    """The device that this machine computes on: its accelerator, else the CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda")
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found


def lower_watermarks(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has Apple's allocator keep to the recommended working set; what the user set stays.

    By default it takes 1.7 times as much, and the system swaps. Torch reads both when it first
    allocates.
    """
    if _HIGH not in environment and _LOW not in environment:
        environment[_HIGH], environment[_LOW] = "1.0", "0.9"


def torch_module(device: torch.device) -> Any:
    """torch.cuda, torch.mps, torch.xpu or torch.cpu: streams, counters and random numbers."""
    import torch

    kind = kind_of(device)
    if kind == "mps":
        lower_watermarks()
    return torch.cuda if kind == "rocm" else getattr(torch, kind)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was asked for."""
    if kind_of(device) != "cpu":
        torch_module(device).synchronize()


def empty_cache(device: torch.device) -> None:
    """Returns the unused memory of the device's allocator to the system."""
    if kind_of(device) != "cpu":
        torch_module(device).empty_cache()


def random_state(device: torch.device) -> torch.Tensor | None:
    """The state of the device's generator; None for a CPU, whose generator is torch's own."""
    module, kind = torch_module(device), kind_of(device)
    if kind == "cpu":
        return None
    state: torch.Tensor = module.get_rng_state() if kind == "mps" else module.get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor | None) -> None:
    """Restores the state of the device's generator."""
    if state is None:
        return
    module = torch_module(device)
    if kind_of(device) == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)


def held_bytes(device: torch.device) -> int:
    """Bytes that an accelerator's allocator holds; on a CPU, all memory of the process."""
    kind = kind_of(device)
    if kind == "cpu":
        return int(psutil.Process().memory_info().rss)
    module = torch_module(device)
    return int(
        module.driver_allocated_memory() if kind == "mps" else module.memory_reserved(device)
    )


def working_set_bytes(device: torch.device) -> tuple[int, int]:
    """What is free and what there is, of an accelerator that is not NVIDIA's.

    Apple's devices have the computer's memory: what is recommended of it is all there is.
    """
    module = torch_module(device)
    if kind_of(device) == "mps":
        total_bytes = int(module.recommended_max_memory())
        free_bytes = min(total_bytes - held_bytes(device), psutil.virtual_memory().available)
        return max(int(free_bytes), 0), total_bytes
    free_bytes, total_bytes = module.mem_get_info(device)
    return int(free_bytes), int(total_bytes)


def limit_allocator(device: torch.device, limit_bytes: int | None) -> None:
    """Limits the allocator of an accelerator, if torch can; None removes the limit."""
    module, kind = torch_module(device), kind_of(device)
    if kind == "cpu" or not hasattr(module, "set_per_process_memory_fraction"):
        return
    total_bytes = working_set_bytes(device)[1]
    share = 1.0 if limit_bytes is None else min(limit_bytes / total_bytes, 1.0)
    module.set_per_process_memory_fraction(share, *(() if kind == "mps" else (device,)))


def index_of(device: torch.device) -> int:
    """The number of a CUDA device."""
    import torch

    return torch.cuda.current_device() if device.index is None else device.index


def name_of(device: torch.device) -> str:
    """The name of a card, of one that acts as another both; else the kind and the processor."""
    import platform

    module, acted = torch_module(device), acted_card()
    if not hasattr(module, "get_device_name"):
        return f"{device.type} ({platform.processor() or platform.machine()})"
    name = str(module.get_device_name(device))
    return name if acted is None else f"{acted.name} ({name})"


def capability(device: torch.device | None = None) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    import torch

    acted = acted_card()
    return torch.cuda.get_device_capability(device) if acted is None else acted.capability


@functools.cache
def has_triton() -> bool:
    """Whether Triton's kernels run here (Windows has no Triton by default)."""
    import torch

    if importlib.util.find_spec("triton") is None:
        return False
    return not torch.cuda.is_available() or capability() >= TRITON_FROM


def usual_context_bytes(index: int) -> int:
    """The context that a training process is expected to have on a CUDA device."""
    import torch

    if (acted := acted_card()) is not None:
        return acted.context_bytes
    found = torch.cuda.get_device_properties(index)
    return predicted_context_bytes((found.major, found.minor), found.multi_processor_count)


def most_context_bytes(index: int) -> int:
    """The most that the context of a training process may take on a CUDA device."""
    import torch

    if (acted := acted_card()) is not None:
        return acted.context_bytes
    found = torch.cuda.get_device_properties(index)
    return context_range((found.major, found.minor), found.multi_processor_count)[1]


def context_bytes(index: int, *, load: bool = True) -> int | None:
    """The context of this process on a CUDA device; None where it cannot be measured.

    With `load`, the libraries of a training step are loaded first; without, only the driver's
    books are read. The context of a card that acts as another says nothing of that other.
    """
    if acted_card() is not None:
        return None
    return measured_context_bytes(index) if load else own_context_bytes(index)


def free_and_total_bytes(index: int, own_bytes: int) -> tuple[int, int]:
    """What is free of a CUDA device and what it has, where this process holds `own_bytes`."""
    if (acted := acted_card()) is not None:
        return max(acted.usable_bytes - own_bytes, 0), acted.total_bytes
    free_bytes, total_bytes = nvml.free_and_total_bytes(index)
    return max(free_bytes - _refused_bytes(index), 0), total_bytes


@functools.cache
def _refused_bytes(index: int) -> int:
    """What the driver calls free and does not give, if `memfit doctor --measure` found that out."""
    import torch

    rows = kept_rows()
    if not rows:
        return 0
    found = torch.cuda.get_device_properties(index)
    known = match_card(found.name, found.total_memory)
    refused_mib = rows.get("" if known is None else known.name, {}).get("refused_mib", 0)
    return round(refused_mib * MIB) if isinstance(refused_mib, (int, float)) else 0
