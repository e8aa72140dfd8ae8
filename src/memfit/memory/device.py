"""What the device at hand is and has: the rest of memfit asks here, not torch.

A card that acts as another (`cards.acted_card`) is described as that one.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

from memfit.memory import nvml
from memfit.memory.cards import TRITON_FROM, acted_card, match_card
from memfit.memory.cuda_context import (
    context_range,
    measured_context_bytes,
    own_context_bytes,
    predicted_context_bytes,
)
from memfit.memory.measured_cards import kept_rows
from memfit.units import MIB

if TYPE_CHECKING:
    import torch


def index_of(device: torch.device) -> int:
    """The number of a CUDA device."""
    import torch

    return torch.cuda.current_device() if device.index is None else device.index


def name_of(device: torch.device) -> str:
    """The name of a CUDA device; of one that acts as another, both."""
    import torch

    name, acted = torch.cuda.get_device_name(device), acted_card()
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

    found = torch.cuda.get_device_properties(index)
    known = match_card(found.name, found.total_memory)
    row = kept_rows().get("" if known is None else known.name, {})
    refused_mib = row.get("refused_mib", 0)
    return round(refused_mib * MIB) if isinstance(refused_mib, (int, float)) else 0
