"""Memory techniques, one a file; registry.py is the order."""

from memfit.strategies.activation_offload import ActivationOffload
from memfit.strategies.adafactor import SmallStateOptimizer
from memfit.strategies.attention import FusedAttention
from memfit.strategies.base import Fidelity, Setup, Strategy
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.features import FrozenFeatures
from memfit.strategies.freezing import Freezing
from memfit.strategies.fused_layers import FusedLayers
from memfit.strategies.graphs import CudaGraphs
from memfit.strategies.half_precision import HalfPrecision
from memfit.strategies.lora import Lora
from memfit.strategies.lowbit import LowBitAdamW
from memfit.strategies.optimizer_offload import OptimizerOffload
from memfit.strategies.packing import Packing
from memfit.strategies.registry import BY_NAME, ORDER, apply_all, by_name, called, ordered
from memfit.strategies.release import GradientRelease
from memfit.strategies.state_offload import StateOffload
from memfit.strategies.truncation import Truncation
from memfit.strategies.workspace import SmallWorkspace

__all__ = [
    "BY_NAME",
    "ORDER",
    "ActivationOffload",
    "Checkpointing",
    "CudaGraphs",
    "Fidelity",
    "Freezing",
    "FrozenFeatures",
    "FusedAttention",
    "FusedLayers",
    "GradientRelease",
    "HalfPrecision",
    "Lora",
    "LowBitAdamW",
    "OptimizerOffload",
    "Packing",
    "Setup",
    "SmallStateOptimizer",
    "SmallWorkspace",
    "StateOffload",
    "Strategy",
    "Truncation",
    "apply_all",
    "by_name",
    "called",
    "ordered",
]
