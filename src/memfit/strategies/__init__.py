"""Memory techniques, one a file or a folder with its kernels; registry.py is the order.

`base` has the contract. Others import the strategies themselves, `Setup`, `ORDER` and `by_name`
from here.
"""

from memfit.strategies.activation_checkpointing import Checkpointing
from memfit.strategies.adafactor import SmallStateOptimizer
from memfit.strategies.base import Fidelity, Setup, Strategy, called, find
from memfit.strategies.cuda_graphs import CudaGraphs
from memfit.strategies.freezing import Freezing
from memfit.strategies.frozen_features import FrozenFeatures
from memfit.strategies.fully_sharded import FullySharded
from memfit.strategies.fused.fused_layers import FusedLayers
from memfit.strategies.fused_attention import FusedAttention
from memfit.strategies.half_precision import HalfPrecision
from memfit.strategies.lora import Lora
from memfit.strategies.lowbit.gradient_release import GradientRelease
from memfit.strategies.lowbit.lowbit_adamw import LowBitAdamW
from memfit.strategies.lowbit.state_offload import StateOffload
from memfit.strategies.offload.activation_offload import ActivationOffload
from memfit.strategies.offload.optimizer_offload import OptimizerOffload
from memfit.strategies.packing.packing_strategy import Packing
from memfit.strategies.registry import (
    BY_NAME,
    ORDER,
    apply_all,
    by_name,
    copies_beside,
    ordered,
    title_of,
    wraps_layers,
)
from memfit.strategies.small_workspace import SmallWorkspace
from memfit.strategies.truncation import Truncation

__all__ = [
    "BY_NAME",
    "ORDER",
    "ActivationOffload",
    "Checkpointing",
    "CudaGraphs",
    "Fidelity",
    "Freezing",
    "FrozenFeatures",
    "FullySharded",
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
    "copies_beside",
    "find",
    "ordered",
    "title_of",
    "wraps_layers",
]
