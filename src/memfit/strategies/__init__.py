"""Memory techniques, one a file; registry.py is the order."""

from memfit.strategies.base import Fidelity, Setup, Strategy
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.graphs import CudaGraphs
from memfit.strategies.lowbit import LowBitAdamW
from memfit.strategies.packing import Packing
from memfit.strategies.registry import BY_NAME, ORDER, apply_all, by_name, ordered
from memfit.strategies.release import GradientRelease

__all__ = [
    "BY_NAME",
    "ORDER",
    "Checkpointing",
    "CudaGraphs",
    "Fidelity",
    "GradientRelease",
    "LowBitAdamW",
    "Packing",
    "Setup",
    "Strategy",
    "apply_all",
    "by_name",
    "ordered",
]
