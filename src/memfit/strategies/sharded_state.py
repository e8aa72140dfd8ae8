"""Optimizer state divided over the ranks: each keeps the state of its share of the weights.

    backward   gradients are summed over the ranks, as without this strategy
    norm       of all gradients, the same on every rank
    update     each rank drops the gradients of weights that others own, and updates its own
    afterwards the owners send their weights to the others

This is the first stage of ZeRO (https://arxiv.org/abs/1910.02054). A weight has one owner, so the
share of a rank is no smaller than the largest weight.

The optimizer remains the one it is, with all parameters in its groups: schedules, loss scaling and
checkpoints find what they expect. An optimizer leaves a parameter without gradient alone and makes
no state for it; that is all the division there is. torch's ZeroRedundancyOptimizer makes an
optimizer of its own from a class, where users may give one that is made already; it keeps the
gradients of others' weights during the update, and for a checkpoint it brings the whole state of a
rank through the device at once.

The low-bit optimizer is told which parameters it keeps. Its sinks take the sums of all, since the
norm is of all; an update of a parameter that another rank keeps does nothing. Small parameters, a
thousandth of all, are kept and updated by every rank.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from transformers.optimization import Adafactor

from memfit.engine.exchange import Peers, in_messages
from memfit.errors import ConfigError
from memfit.i18n import N_, Message
from memfit.memory.device import synchronize
from memfit.memory.out_of_memory import retrying
from memfit.strategies.base import Fidelity, Setup, Strategy, plain_value
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.planning import (
    Axis,
    Combination,
    Effects,
    PlanFigures,
    TracePart,
)

_OPTIMS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
"""Optimizers that update each parameter independently of the others."""


@dataclass(frozen=True, slots=True)
class ShardedState(Strategy):
    """Each of several ranks keeps the optimizer's state of its share of the weights.

    Checkpoints are the usual ones, of the whole state: they go on with any number of ranks, with
    this strategy or without it.
    """

    name = "sharded_state"
    title = N_("sharded optimizer state")
    reason = "each of several ranks keeps only its share of the optimizer's state"
    shrinks = ("optimizer",)
    conflicts = frozenset({"optimizer_offload"})
    axis = Axis.OWN
    needs_ranks = True
    traced = TracePart.NONE

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    @property
    def effects(self) -> Effects:
        return Effects(divides_state=True)

    def is_pointless(self, beside: Combination) -> bool:
        return beside.effects.few_learn or beside.effects.state_on_host

    def explain(self, plan: PlanFigures) -> str:
        return Message(
            "each of {ranks} ranks keeps the optimizer's state of its share of the weights only, "
            "and sends these to the others: saves {saved}, costs {cost} of the step",
            ranks=str(plan.workload.ranks),
            **plan.saves(self),
        )

    def unavailable(self, setup: Setup) -> str:
        if setup.ranks.world_size == 1:
            return Message("it needs several processes; see --gpus")
        optim = str(plain_value(setup, "optim"))
        if optim not in _OPTIMS:
            return Message(
                "an update by optim={optim} may look at all weights at once", optim=repr(optim)
            )
        return ""

    def change(self, setup: Setup) -> None:
        setup.state_shares = StateShares(setup.ranks, setup.device)

        def undo() -> None:
            setup.state_shares = None

        setup.undo.append(undo)


def owners(params: Iterable[Tensor], ranks: int) -> dict[Tensor, int]:
    """Returns the rank that keeps each parameter's state: the largest first, to who has least."""
    order = sorted(params, key=lambda p: p.nbytes, reverse=True)
    return dict(zip(order, dealt([p.nbytes for p in order], ranks), strict=True))


def dealt(sizes: Iterable[int], ranks: int) -> list[int]:
    """Returns a rank for each of these, in their order: the one that has least so far."""
    held = [0] * ranks
    found = []
    for size in sizes:
        rank = held.index(min(held))
        held[rank] += size
        found.append(rank)
    return found


def largest_share(sizes: Sequence[int], ranks: int) -> float:
    """Returns the part of parameters of these sizes, largest first, of the rank with the most."""
    held = Counter[int]()
    for size, rank in zip(sizes, dealt(sizes, ranks), strict=True):
        held[rank] += size
    return max(held.values(), default=0) / max(sum(sizes), 1)


class StateShares:
    """Who keeps the state of which parameter, and what follows from it for an optimizer."""

    def __init__(self, ranks: Peers, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._optimizer: Optimizer | None = None
        self._owner: dict[Tensor, int] = {}
        self._messages: list[tuple[int, tuple[Tensor, ...]]] = []

    def keeps(self, p: Tensor) -> bool:
        """Whether this rank updates the parameter; one that came later is updated by all."""
        return self._owner.get(p, self._ranks.rank) == self._ranks.rank

    def divide(self, optimizer: Optimizer) -> None:
        """Have this optimizer keep and update this rank's share from now on."""
        self._drop_others(optimizer)
        if optimizer is self._optimizer:
            return
        if not _updates_each_alone(optimizer):
            raise ConfigError(
                Message(
                    "sharded_state cannot be used with {optimizer}: its update may look at all "
                    "weights at once",
                    optimizer=type(optimizer).__name__,
                )
            )
        self._optimizer = optimizer
        learning = [p for p in _parameters(optimizer) if p.requires_grad]
        if isinstance(optimizer, LowBitOptimizer):
            learning = [p for p in learning if p.numel() > optimizer.small_numel]
            optimizer.keeps = self.keeps
        self._owner = owners(learning, self._ranks.world_size)
        self._messages = list(_in_turn(self._owner, self._ranks.world_size))
        self._drop_others(optimizer)
        optimizer.register_load_state_dict_pre_hook(self._without_others)
        optimizer.step = types.MethodType(self._sharing(optimizer.step), optimizer)  # type: ignore[method-assign]

    def _sharing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step of which every rank makes its part."""

        @functools.wraps(plain)
        def step(optimizer: Optimizer, *given: Any, **named: Any) -> Any:
            if not isinstance(optimizer, LowBitOptimizer):
                for p in self._of_others():
                    p.grad = None
            result = plain(*given, **named)
            if self._ranks.together:
                with retrying(self._device):
                    self.spread()
            return result

        return step

    @torch.no_grad()
    def spread(self) -> None:
        """Gives every rank the weights that the others have updated."""
        sent = []
        for owner, unit in self._messages:
            (message, *more) = [p.detach() for p in unit]
            if more or not message.is_contiguous():
                message = torch.cat([p.detach().reshape(-1) for p in unit])
            sent.append((owner, unit, message, self._ranks.launch_from(owner, message)))
        for owner, unit, message, work in sent:
            self._ranks.settle(work)
            if owner != self._ranks.rank and message.data_ptr() != unit[0].data_ptr():
                parts = torch.split(message, [p.numel() for p in unit])
                for p, part in zip(unit, parts, strict=True):
                    p.copy_(part.view_as(p))

    # ---- checkpoints ----

    @contextmanager
    def whole(self, *, sizes_only: bool = False) -> Iterator[None]:
        """Inside, the first rank's optimizer has the state of all; every rank must come here.

        It is brought to host memory one tensor at a time. `sizes_only`: with no values.
        """
        if self._optimizer is None or not self._ranks.together:
            yield
            return
        try:
            self._collect(self._optimizer.state, sizes_only=sizes_only)
            yield
        finally:
            self._drop_others(self._optimizer)

    def bring_masters(self) -> None:
        """Leaves with the first rank what half-precision weights cannot hold, until it trains on.

        It saves the model that was trained, and does that alone.
        """
        if isinstance(self._optimizer, LowBitOptimizer) and self._ranks.together:
            self._collect(self._optimizer.state, only="correction")

    def _collect(
        self, state: dict[Tensor, Any], *, sizes_only: bool = False, only: str = ""
    ) -> None:
        synchronize(self._device)  # kernels may still write state that is in host memory
        first, params = self._ranks.rank == 0, list(self._owner)
        described = {
            number: {
                name: _on(value, "meta") for name, value in state[p].items() if only in ("", name)
            }
            for number, p in enumerate(params)
            if not first and self.keeps(p) and p in state
        }
        for rank, states in enumerate(self._ranks.gathered(described)):
            for number, values in states.items():
                if first:
                    state[params[number]] = {n: _empty(value) for n, value in values.items()}
                elif rank != self._ranks.rank:
                    continue
                for name in () if sizes_only else values:
                    if isinstance(values[name], Tensor):
                        self._ranks.to_first(state[params[number]][name], rank)

    def _drop_others(self, optimizer: Optimizer) -> None:
        for p in self._of_others():
            optimizer.state.pop(p, None)

    def _of_others(self) -> list[Tensor]:
        """The parameters that other ranks keep."""
        return [p for p in self._owner if not self.keeps(p)]

    def _without_others(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Before the optimizer's own `load_state_dict`."""
        mine = [self.keeps(p) for p in _parameters(optimizer)]
        others = {index for index, kept in enumerate(mine) if not kept}
        state = {index: one for index, one in state_dict["state"].items() if index not in others}
        return {**state_dict, "state": state}


def _updates_each_alone(optimizer: Optimizer) -> bool:
    """Whether an update of some parameters is that part of the update of all."""
    if isinstance(optimizer, LBFGS):
        return False
    known = [one for one in type(optimizer).__mro__ if one.__module__.startswith("torch.optim.")]
    return isinstance(optimizer, Adafactor | LowBitOptimizer) or known[:1] != [Optimizer]


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """All of them, in the order in which state dicts number them."""
    return (p for group in optimizer.param_groups for p in group["params"])


def _in_turn(owner: dict[Tensor, int], ranks: int) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """The messages, those of one owner beside those of the others."""
    each = [in_messages([p for p in owner if owner[p] == rank]) for rank in range(ranks)]
    for units in itertools.zip_longest(*each):
        yield from ((rank, unit) for rank, unit in enumerate(units) if unit is not None)


def _on(value: Any, device: str) -> Any:
    return value.detach().to(device) if isinstance(value, Tensor) else value


def _empty(value: Any) -> Any:
    return torch.empty_like(value, device="cpu") if isinstance(value, Tensor) else value
