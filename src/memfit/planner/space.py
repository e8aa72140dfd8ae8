"""Which ways of training there are for a task, a card and what the user allows.

A way is one option of every axis and one limit of the micro-batches. Strategies say themselves on
which axis they lie, which options they offer there, what they conflict with and beside what they
are pointless; this module asks each in the registry's order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from memfit.config.schema import ALLOWABLE
from memfit.engine.micro_batches import MicroBatching
from memfit.errors import ConfigError, nearest
from memfit.i18n import Message
from memfit.memory.cards import DeviceProfile
from memfit.memory.device import kind_of
from memfit.planner.candidates import Candidate
from memfit.planner.workload import Workload, batches_of
from memfit.strategies import (
    ORDER,
    Axis,
    Combination,
    Fidelity,
    Option,
    Strategy,
    asked_together,
    ordered,
)
from memfit.strategies.base import CANNOT_BE_USED
from memfit.strategies.planning import Half

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


def limits_for(workload: Workload, strategies: Option) -> list[MicroBatching]:
    """The whole effective batch at once, or in ever smaller parts down to the longest row."""
    whole = [MicroBatching()]
    beside = Combination(strategies)
    if any(one.needs_whole_batches(beside) for one in strategies):
        return whole
    batches = batches_of(workload, strategies)
    longest = batches.longest_tokens
    if beside.effects.packs:
        most = batches.worst_tokens
        counts = {batches.usual_most_tokens(), *(-(-most // parts) for parts in _PARTS)}
    else:
        rows = min(workload.rank_rows, len(workload.lengths))
        most = rows * longest
        counts = {-(-rows // parts) * longest for parts in _PARTS}
    smaller = sorted({max(one, longest) for one in counts} - {most}, reverse=True)
    return whole + [MicroBatching(max_tokens=one) for one in smaller if one < most]


Judge = Callable[[Option], str]
"""Why these strategies cannot be used for the task on the card; empty where they can."""


def permissions() -> tuple[str, ...]:
    """Returns every word for --allow: memfit's own, then those of installed strategies."""
    outside = {
        permission_of(kind): None
        for kind in ORDER
        if kind().fidelity > Fidelity.ROUNDING and permission_of(kind) not in ALLOWABLE
    }
    return (*ALLOWABLE, *outside)


def permission_of(kind: type[Strategy]) -> str:
    """Returns the word for --allow that this strategy needs, if its fidelity is low."""
    return kind.permission or kind.name


@dataclass(frozen=True)
class PlanRequest:
    """What is to be trained, where, and what may be done for it."""

    workload: Workload
    card: DeviceProfile | None
    judge: Judge
    exact: bool = False
    allow: frozenset[str] = frozenset()
    left_out: dict[str, str] = field(default_factory=dict)
    """Why each unusable strategy cannot be used here."""

    def __post_init__(self) -> None:
        if unknown := sorted(self.allow.difference(ALLOWABLE)):
            known = permissions()
            for name in unknown:
                if name not in known:
                    raise ConfigError(
                        Message(
                            "cannot allow {name}; {known}.{hint}",
                            name=repr(name),
                            known=", ".join(known),
                            hint=nearest(name, known),
                        )
                    )

    @cached_property
    def depth(self) -> int:
        """Layers a text passes."""
        config: Any = self.workload.config.get_text_config()
        return int(config.num_hidden_layers) * int(getattr(config, "inner_group_num", 1))

    @cached_property
    def kind(self) -> str:
        """The kind of the device, see memory/device.py."""
        return "cuda" if self.card is not None else kind_of(self.workload.args.device)

    @cached_property
    def half(self) -> Half:
        """The half precision this device computes in."""
        return "bfloat16" if self.card is None or self.card.has_bf16 else "float16"

    @cached_property
    def refuses_half(self) -> bool:
        """Whether the user said no to that precision."""
        name = "bf16" if self.half == "bfloat16" else "fp16"
        return self.given(name) and not getattr(self.workload.args, name)

    def allows(self, kind: type[Strategy]) -> bool:
        """Whether the user gave the permission this strategy needs."""
        return permission_of(kind) in self.allow

    def works(self, *strategies: Strategy) -> bool:
        """Whether these can be used; of what cannot, the reason is kept."""
        last = strategies[-1]
        if last.fidelity is not Fidelity.EXACT and self.exact:
            return False
        if last.fidelity > Fidelity.ROUNDING and not self.allows(type(last)):
            return False
        if self._good.issuperset(strategies):
            return True
        reason = self.judge(strategies)
        if reason:
            self.left_out.setdefault(last.name, _without_name(last.name, reason))
        else:
            self._good.update(strategies)
        return not reason

    @cached_property
    def _good(self) -> set[Strategy]:
        """The options known to work; many are judged at once, because judging builds a model."""
        good: set[Strategy] = set()
        triton = self.card is not None and self.card.has_triton
        on_card = self.card is not None
        groups = asked_together(self.half, cuda=on_card, triton=triton, exact=self.exact)
        for asked, alike in groups:
            if not self.judge(asked):
                good.update((*asked, *alike))
        return good

    def usable(self, options: Iterable[Option], beside: Option = ()) -> list[Option]:
        """The options that can be used beside these strategies."""
        return [one for one in options if not one or self.works(*beside, *one)]

    def given(self, name: str) -> bool:
        """Whether the user set this training argument."""
        return name in self.workload.user_set


def candidates(
    asked: PlanRequest, *, having: Sequence[str] = (), also: Option = ()
) -> Iterator[Candidate]:
    """Every way of training, the plainest first.

    Only those with one of the strategies `having` where any are named; each with all of `also`.
    """
    (free,) = _options(asked, [kind for kind in ORDER if kind.axis is Axis.FREE])
    options = [_options(asked, kinds) for kinds in _axes()]
    offered = frozenset(one for axis in options for option in axis for one in option)
    for chosen in itertools.product(*options):
        strategies = (*itertools.chain(*chosen), *also)
        if having and not any(one.name in having for one in strategies):
            continue
        whole = together(strategies, free)
        if whole is None:
            continue
        beside = Combination(whole, offered, asked.workload.ranks)
        if any(one.is_pointless(beside) for one in whole):
            continue
        for limits in limits_for(asked.workload, whole):
            yield Candidate(whole, limits)


def _axes() -> list[list[type[Strategy]]]:
    """Returns the strategies of each axis; those on `OWN` have one each."""
    every = ORDER
    shared = (one for one in Axis if one not in (Axis.OWN, Axis.FREE))
    axes = [[kind for kind in every if kind.axis is axis] for axis in shared]
    return [*axes, *([kind] for kind in every if kind.axis is Axis.OWN)]


def _options(asked: PlanRequest, kinds: Sequence[type[Strategy]]) -> list[Option]:
    """Returns an axis's options: the plain step, and what its strategies offer."""
    options: list[Option] = [()]
    for kind in sorted(kinds, key=lambda kind: not kind.asked_first):
        options = kind.options(asked, options)
    return options


def _without_name(name: str, reason: str) -> str:
    """Returns the strategy's own reason, from the sentence it refuses with."""
    if (
        isinstance(reason, Message)
        and reason.text == CANNOT_BE_USED
        and reason.values["strategy"] == name
    ):
        bare: str = reason.values["reason"]
        return bare
    return reason
