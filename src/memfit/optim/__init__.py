"""Low-bit AdamW with split master weights, and the ways gradients can reach it.

adamw.py      LowBitAdamW: 5 or 4 bytes a parameter, a torch.optim.Optimizer
formats.py    how numbers are stored; kernels_torch.py and kernels_triton.py compute
small.py      biases and norms: fp32, flat
sinks.py      where gradients go: kept.py, release.py, host.py
scaling.py    fp16 loss scale on the device
convert.py    fp32 model -> bf16 or fp16 weights, nothing lost
checkpoint.py save, load, fp32 export
"""

from __future__ import annotations

from typing import Any

from memfit.errors import nearest
from memfit.optim.adamw import LowBitAdamW
from memfit.optim.convert import Remainders, to_lowbit
from memfit.optim.host import HostGradients
from memfit.optim.kept import KeptGradients, KeptInt8
from memfit.optim.layout import BLOCK, SMALL_NUMEL
from memfit.optim.release import GradientRelease, TwoPassRelease
from memfit.optim.scaling import LossScale
from memfit.optim.sinks import GradientSink

SINKS: dict[str, type[GradientSink]] = {
    sink.name: sink
    for sink in (KeptGradients, KeptInt8, HostGradients, TwoPassRelease, GradientRelease)
}
"""Every sink by name; the first that fits the memory is the best in fidelity and time."""

__all__ = [
    "BLOCK",
    "SINKS",
    "SMALL_NUMEL",
    "GradientRelease",
    "GradientSink",
    "HostGradients",
    "KeptGradients",
    "KeptInt8",
    "LossScale",
    "LowBitAdamW",
    "Remainders",
    "TwoPassRelease",
    "make_sink",
    "to_lowbit",
]


def make_sink(name: str, optimizer: LowBitAdamW, **settings: Any) -> GradientSink:
    """Attach the sink of this name: kept, kept8, host, two_pass or release."""
    if name not in SINKS:
        raise ValueError(f"no gradient sink {name!r}; {', '.join(SINKS)}.{nearest(name, SINKS)}")
    return SINKS[name](optimizer, **settings)
