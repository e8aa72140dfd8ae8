"""What else could be done: other permissions, a little more budget, smaller models.

All of it from quick prices: it is what to try next, not a promise.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.memory.depth import with_layers
from memfit.messages import Message
from memfit.planner.explain import gb, step_time
from memfit.planner.plan import Decision
from memfit.planner.space import ALLOWABLE, Asked, candidates
from memfit.planner.values import Candidate, Price, Pricer
from memfit.strategies import Fidelity

if TYPE_CHECKING:
    from memfit.planner.search import Planning

_FASTER = 0.9
"""A plan is worth more memory when its step takes at most this much of the time."""
_NOTICED = 1.05
"""What is not faster by this is not faster."""
_FAMILY = ((12, 768, 12), (6, 768, 12), (3, 768, 12))
"""Layers, width and heads of the smaller models people have: base, and what is cut from it."""
_USES = {
    "optimizer": ("gradient_release", "small_state_optimizer"),
    "lora": ("lora",),
    "freeze": ("freezing",),
    "truncate": ("truncation",),
}


@dataclass(frozen=True)
class Reach:
    """What one more permission makes possible."""

    name: str
    smallest: Price
    fastest: Price | None
    """The fastest that fits the budget; None where none does."""

    def decision(self, than: Price) -> Decision:
        """In a sentence, against the chosen plan."""
        best = self.fastest or self.smallest
        times = than.step_seconds / best.step_seconds
        fields = {
            "permission": self.name,
            "fidelity": str(best.candidate.fidelity),
            "bytes": gb(best.device_bytes),
            "step": step_time(best.step_seconds),
            "times": f"{times:.2g}x",
        }
        if self.fastest is None:
            return Decision(
                "allow.too_large",
                Message(
                    "--allow {permission} ({fidelity}): nothing that fits, {bytes} at least",
                    **fields,
                ),
            )
        if times < _NOTICED:
            return Decision(
                "allow.no_gain",
                Message(
                    "--allow {permission} ({fidelity}): nothing faster than this plan", **fields
                ),
            )
        return Decision(
            "allow",
            Message(
                "--allow {permission} ({fidelity}): {bytes}, a step in {step}, {times} as fast",
                **fields,
            ),
        )


@dataclass(frozen=True)
class More:
    """The next budget at which a plan is clearly faster."""

    budget_bytes: int
    price: Price

    def decision(self, than: Price) -> Decision:
        """In a sentence, against the chosen plan."""
        times = than.step_seconds / self.price.step_seconds
        fields = {
            "budget": gb(self.budget_bytes),
            "times": f"{times:.2g}x",
            "step": step_time(self.price.step_seconds),
        }
        return Decision(
            "more", Message("{budget} would make a step {times} as fast: {step}", **fields)
        )


@dataclass(frozen=True)
class Smaller:
    """A smaller model of the same family."""

    layers: int
    width: int
    price: Price

    def decision(self) -> Decision:
        """In a sentence."""
        fields = {
            "layers": str(self.layers),
            "width": str(self.width),
            "bytes": gb(self.price.device_bytes),
            "step": step_time(self.price.step_seconds),
        }
        return Decision(
            "smaller", Message("{layers} layers, {width} wide: {bytes}, a step in {step}", **fields)
        )


@dataclass(frozen=True)
class Alternatives:
    """All of it."""

    allow: tuple[Reach, ...]
    more: More | None
    smaller: tuple[Smaller, ...]


def alternatives(planning: Planning) -> Alternatives:
    """What else could be done than what is planned."""
    budget_bytes = planning.chosen.digest.budget_bytes
    chosen = planning.chosen.price
    assert chosen is not None
    return Alternatives(
        allow=tuple(reaches(planning.asked, planning.pricer, budget_bytes)),
        more=more_budget(planning.prices, chosen),
        smaller=tuple(smaller_models(planning.asked, planning.pricer, budget_bytes)),
    )


def reaches(asked: Asked, pricer: Pricer, budget_bytes: int) -> Iterator[Reach]:
    """What each permission that is not given would reach.

    Recomputing and the bus are priced only where nothing fits without them: each costs traces.
    """
    from memfit.planner.search import tier_of

    if asked.exact:
        return
    for name in ALLOWABLE:
        if name in asked.allow:
            continue
        wider = dataclasses.replace(asked, allow=asked.allow | {name}, left_out={})
        ways = _ways(wider, _USES[name])
        prices = [pricer.quick(one) for one in ways if not tier_of(one)]
        if _fastest(prices, budget_bytes) is None:
            prices = [pricer.quick(one) for one in ways]
        if prices:
            yield Reach(name, _smallest(prices), _fastest(prices, budget_bytes))


def _ways(asked: Asked, strategies: Sequence[str]) -> list[Candidate]:
    """By the first of these that anything can be done with: they are alternatives."""
    for name in strategies:
        found = candidates(asked, having=(name,))
        if ways := [one for one in found if one.fidelity > Fidelity.ROUNDING]:
            return ways
    return []


def more_budget(prices: Sequence[Price], chosen: Price) -> More | None:
    """The least memory at which a plan is a tenth faster than the chosen one."""
    faster = [
        one
        for one in prices
        if one.step_seconds <= _FASTER * chosen.step_seconds
        and one.device_bytes > chosen.device_bytes
    ]
    if not faster:
        return None
    best = _smallest(faster)
    return More(_rounded_up(best.device_bytes), best)


def smaller_models(asked: Asked, pricer: Pricer, budget_bytes: int) -> Iterator[Smaller]:
    """Models of the same family with fewer or narrower layers, each at its best."""
    from memfit.planner.search import price_all

    if asked.workload.given is not None:
        return  # its configuration alone does not say what a smaller one would be
    text: Any = asked.workload.config.get_text_config()
    other = pricer
    own = text.num_hidden_layers * text.hidden_size**2
    for layers, width, heads in _FAMILY:
        if layers > text.num_hidden_layers or layers * width**2 >= own:
            continue
        workload = dataclasses.replace(
            asked.workload, config=_shaped(asked.workload.config, layers, width, heads)
        )
        other = other.of(workload)
        narrower = dataclasses.replace(asked, workload=workload, judge=other.problem, left_out={})
        prices = price_all(narrower, other, budget_bytes, sys.maxsize)
        best = _fastest(prices, budget_bytes) or _smallest(prices)
        yield Smaller(layers, width, best)


def _shaped(config: Any, layers: int, width: int, heads: int) -> Any:
    """The same configuration with fewer, narrower layers."""
    shaped = copy.deepcopy(with_layers(config, layers))
    text = shaped.get_text_config()
    before = text.hidden_size
    if width >= before:
        return shaped
    text.num_attention_heads = heads
    if getattr(text, "intermediate_size", None):
        text.intermediate_size = text.intermediate_size * width // before
    if getattr(text, "embedding_size", None) == before:
        text.embedding_size = width
    text.hidden_size = width
    return shaped


def _fastest(prices: Iterable[Price], budget_bytes: int) -> Price | None:
    inside = [one for one in prices if one.device_bytes <= budget_bytes]
    return min(inside, key=lambda one: (one.step_seconds, one.device_bytes), default=None)


def _smallest(prices: Iterable[Price]) -> Price:
    return min(prices, key=lambda one: (one.device_bytes, one.step_seconds))


def _rounded_up(count: int) -> int:
    """To the next tenth of a gigabyte, as a budget is written."""
    return -(-count // 10**8) * 10**8
