"""Which strategies make sense together, and into what batches may be cut beside them."""

from __future__ import annotations

from memfit.errors import ConfigError
from memfit.planner.batches import batches_of
from memfit.planner.values import Workload
from memfit.runtime.batching import MicroBatching
from memfit.strategies import (
    ActivationOffload,
    Checkpointing,
    CudaGraphs,
    Freezing,
    FrozenFeatures,
    GradientRelease,
    Lora,
    LowBitAdamW,
    OptimizerOffload,
    Packing,
    SmallStateOptimizer,
    SmallWorkspace,
    StateOffload,
    Strategy,
    ordered,
)

Option = tuple[Strategy, ...]

_PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Into how many micro-batches the largest batch may be cut."""


def together(strategies: Option, free: Option) -> Option | None:
    """All of them in their order; None where two conflict. Free ones give way."""
    names = {one.name for one in strategies}
    added = [
        one
        for one in free
        if not one.conflicts & names
        and not any(one.name in other.conflicts for other in strategies)
    ]
    try:
        return tuple(ordered([*strategies, *added]))
    except ConfigError:
        return None


def senseless(strategies: Option) -> bool:
    """Whether one of them would have nothing to do beside the others."""
    kinds = {type(one): one for one in strategies}
    release = kinds.get(GradientRelease)
    few_learn = any(kind in kinds for kind in (Lora, Freezing, FrozenFeatures))
    few = (OptimizerOffload, SmallStateOptimizer, StateOffload)
    if few_learn and (release or any(kind in kinds for kind in few)):
        return True  # gradients and state are small already
    again = kinds.get(Checkpointing)
    if StateOffload in kinds and isinstance(again, Checkpointing) and again.part == "mlp":
        return True  # whole layers are computed again before the bus is used
    hosted = kinds.get(OptimizerOffload)
    # The last resort: weights on the host go with all layers recomputed, or with none.
    last = isinstance(hosted, OptimizerOffload) and hosted.weights
    if last and (ActivationOffload in kinds or (again is not None and again != Checkpointing())):
        return True
    frozen = kinds.get(Freezing)
    nothing_kept = FrozenFeatures in kinds or (
        isinstance(frozen, Freezing) and frozen.what == "encoder"
    )
    if nothing_kept and (Checkpointing in kinds or ActivationOffload in kinds):
        return True
    if CudaGraphs in kinds:
        host = isinstance(release, GradientRelease) and release.mode == "host"
        return host or LowBitAdamW not in kinds or Packing not in kinds
    return False


def wasteful(strategies: Option, every: set[Strategy]) -> bool:
    """Whether it holds scratch memory that costs nothing to leave out: graphs parse no setting."""
    kinds = {type(one) for one in strategies}
    return CudaGraphs in kinds and SmallWorkspace not in kinds and SmallWorkspace() in every


def limits_for(workload: Workload, strategies: Option) -> list[MicroBatching]:
    """The whole effective batch at once, or in ever smaller parts down to the longest row."""
    whole = [MicroBatching()]
    if needs_whole_batches(strategies):
        return whole
    batches = batches_of(workload, strategies)
    longest = batches.longest_tokens
    if any(isinstance(one, Packing) for one in strategies):
        most = batches.worst_tokens
        counts = {batches.usual_most_tokens(), *(-(-most // parts) for parts in _PARTS)}
    else:
        rows = min(workload.effective_rows, len(workload.lengths))
        most = rows * longest
        counts = {-(-rows // parts) * longest for parts in _PARTS}
    smaller = sorted({max(one, longest) for one in counts} - {most}, reverse=True)
    return whole + [MicroBatching(max_tokens=one) for one in smaller if one < most]


def needs_whole_batches(strategies: Option) -> bool:
    """Whether a step of several micro-batches is another update rule, or is not captured."""
    release = next((one for one in strategies if isinstance(one, GradientRelease)), None)
    if release is None:
        # Gradients kept in `.grad` would be the graph's own memory, written anew each time.
        return any(isinstance(one, CudaGraphs) for one in strategies)
    return release.mode == "two_pass" or (release.mode == "release" and not release.accumulate)
