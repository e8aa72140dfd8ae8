"""The order in which strategies are applied, memfit's own and a user's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit.errors import ConfigError, nearest
from memfit.strategies.activation_checkpointing import Checkpointing
from memfit.strategies.adafactor import SmallStateOptimizer
from memfit.strategies.base import Setup, Strategy, called
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
from memfit.strategies.small_workspace import SmallWorkspace
from memfit.strategies.truncation import Truncation

# First what changes which weights learn from which texts, then the precision, then how a
# layer runs, then how weights are stored and stepped, and last the step as a whole.
ORDER: tuple[type[Strategy], ...] = (
    Freezing,
    Lora,
    Truncation,
    HalfPrecision,
    FrozenFeatures,
    FusedAttention,
    Packing,
    FusedLayers,
    Checkpointing,
    ActivationOffload,
    LowBitAdamW,
    GradientRelease,
    StateOffload,
    OptimizerOffload,
    SmallStateOptimizer,
    FullySharded,
    SmallWorkspace,
    CudaGraphs,
)
"""memfit's own strategies."""

BY_NAME: dict[str, type[Strategy]] = {kind.name: kind for kind in ORDER}


def by_name(name: str) -> type[Strategy]:
    """The strategy of that name."""
    if name not in BY_NAME:
        hint = nearest(name, BY_NAME)
        raise ConfigError("there is no strategy {name}.{hint}", name=repr(name), hint=hint)
    return BY_NAME[name]


def title_of(name: str) -> str:
    """Returns what plans call the strategy of that name; the name itself if it is not known."""
    return called(BY_NAME[name]) if name in BY_NAME else name


def ordered(strategies: Iterable[Strategy]) -> list[Strategy]:
    """The strategies in the order they are applied; two that conflict are refused."""
    chosen = sorted(strategies, key=_place)
    names = [strategy.name for strategy in chosen]
    for strategy in chosen:
        if names.count(strategy.name) > 1:
            raise ConfigError("the strategy {name} is given twice", name=repr(strategy.name))
        beside = sorted(strategy.conflicts & set(names))
        if beside:
            raise ConfigError(
                "{name} cannot be used together with {other}",
                name=strategy.name,
                other=beside[0],
            )
    return chosen


def _place(strategy: Strategy) -> float:
    """A user's own strategy comes where the one it extends does, or before the step as a whole."""
    places = [place for place, kind in enumerate(ORDER) if isinstance(strategy, kind)]
    return places[0] if places else ORDER.index(SmallWorkspace) - 0.5


def apply_all(strategies: Sequence[Strategy], setup: Setup) -> None:
    """Change the setup by each strategy in turn; one that cannot work here says why."""
    for strategy in ordered(strategies):
        strategy.apply(setup)


def copies_beside(strategies: Iterable[Strategy]) -> bool:
    """Whether something is copied to or from the host on a stream beside the computation."""
    return any(
        isinstance(one, ActivationOffload | OptimizerOffload)
        or (isinstance(one, GradientRelease) and one.mode == "host")
        for one in strategies
    )


def wraps_layers(strategies: Iterable[Strategy]) -> bool:
    """Whether layers are called through a strategy: recomputing cannot be put around them later."""
    wrapping = (ActivationOffload, OptimizerOffload, FrozenFeatures)
    return any(isinstance(one, wrapping) for one in strategies)
