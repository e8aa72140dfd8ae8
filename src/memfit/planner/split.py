"""A candidate's strategies by what they decide, so that each part is traced once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memfit.planner.shallow import Strategies
from memfit.strategies import CudaGraphs, LowBitAdamW, Strategy

_POLICY = ("checkpointing", "activation_offload")
_UPDATING = ("lowbit_adamw", "gradient_release", "optimizer_offload", "small_state_optimizer")
_NEITHER = ("cuda_graphs", "small_workspace", "state_offload", "truncation")
"""What changes neither the layers' events nor the update's."""


@dataclass(frozen=True)
class Split:
    """A candidate's strategies by what they decide."""

    family: Strategies
    updating: Strategies
    policy: Strategies
    count: int
    """Layers the policy is for."""
    graphs: CudaGraphs | None
    keeps: bool
    """Whether gradients stay in `.grad` until the update."""
    passes: int
    """How often a micro-batch runs in one step."""
    short_masters: bool
    small_workspace: bool
    hosted_state: int = 0
    """Bytes of each parameter's low-bit state that lie in host memory."""
    hosted_gradient: int = 0
    """The same of its gradient."""

    @property
    def hosted_bytes(self) -> int:
        """Of each parameter, what lies in host memory instead of on the card."""
        return self.hosted_state + self.hosted_gradient

    @cached_property
    def packed(self) -> bool:
        """Whether micro-batches have no padding."""
        return any(one.name == "packing" for one in self.family)

    @cached_property
    def copies(self) -> bool:
        """Whether something travels to the host beside the computation."""
        names = {one.name for one in (*self.policy, *self.updating)}
        sent = any(getattr(one, "mode", "") == "host" for one in self.updating)
        return sent or bool(names & {"activation_offload", "optimizer_offload"})

    @cached_property
    def as_counted(self) -> Split:
        """The same without what counts do not depend on."""
        return dataclasses.replace(
            self,
            short_masters=False,
            small_workspace=False,
            graphs=None,
            hosted_state=0,
            hosted_gradient=0,
        )


def split_up(strategies: Strategies, depth: int) -> Split:
    """A candidate's strategies, for a model of so many layers."""
    names = {one.name: one for one in strategies}
    low_bit: Any = names.get("lowbit_adamw")
    release: Any = names.get("gradient_release")
    hosted: Any = names.get("state_offload")
    policy = tuple(one for one in strategies if one.name in _POLICY)
    sized: Any = next((one for one in policy if getattr(one, "layers", None)), None)
    count = 0 if not policy else (sized.layers if sized else depth)
    outside = (*_POLICY, *_UPDATING, *_NEITHER)
    mode = release.mode if release else ""
    graphs: Any = names.get("cuda_graphs")
    return Split(
        family=tuple(one for one in strategies if one.name not in outside),
        updating=tuple(_normal(one) for one in strategies if one.name in _UPDATING),
        policy=tuple(_of_all_layers(one) for one in policy),
        count=count,
        graphs=graphs,
        keeps=release is None and "optimizer_offload" not in names,
        passes=2 if mode == "two_pass" else 1,
        short_masters=low_bit is not None and low_bit.master_bits == 16,
        small_workspace="small_workspace" in names,
        hosted_state=(2 + (low_bit.master_bits == 24)) if hosted else 0,
        hosted_gradient=int(hosted is not None and hosted.gradients),
    )


def _normal(strategy: Strategy) -> Strategy:
    """The same as far as memory's layout and the counts go."""
    if isinstance(strategy, LowBitAdamW):
        return LowBitAdamW(24, strategy.dtype)
    return strategy


def _of_all_layers(strategy: Any) -> Strategy:
    every: Strategy = dataclasses.replace(strategy, layers=None)
    return every
