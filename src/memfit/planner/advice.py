"""What else a plan needs, what else could be done, and what is missing where nothing fits.

All of it from quick prices: it is what to try next, not a promise.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from memfit.config.schema import FIDELITY_NAMES
from memfit.errors import DoesNotFitError
from memfit.i18n import N_, Language, Message, speaking, t
from memfit.memory.components import COMPONENT_NAMES
from memfit.memory.stock_estimate import no_collection
from memfit.memory.tracing.depth import with_layers
from memfit.planner.candidates import Candidate, PlanTask, Price, Pricer
from memfit.planner.explain import explain
from memfit.planner.plans import Decision, Plan, digest_of
from memfit.planner.space import PlanRequest, candidates, permission_of, permissions
from memfit.planner.workload import Workload
from memfit.strategies import ORDER, Fidelity, Tier, Truncation
from memfit.units import gb, step_time

if TYPE_CHECKING:
    from memfit.memory.cards import DeviceProfile
    from memfit.planner.pricing.shallow_traces import Known
    from memfit.planner.search import Planning

HOST_RESERVE_BYTES = 10**9
"""Left for the rest of the process and its neighbours."""


def fits_host(price: Price, free_bytes: int) -> bool:
    """Whether the computer has the memory that the plan puts there."""
    return price.host_bytes == 0 or price.host_bytes + HOST_RESERVE_BYTES <= free_bytes


def host_note(passed_over: Sequence[Price], chosen: Price, free_bytes: int) -> list[Decision]:
    """That a faster plan wants more host memory than there is."""
    faster = [one for one in passed_over if one.step_seconds < chosen.step_seconds]
    if not faster:
        return []
    least = min(one.host_bytes for one in faster)
    return [
        Decision(
            "note.host",
            Message(
                "a faster plan was passed over: it needs {needs} of the computer's "
                "memory, of which {free} are free",
                needs=gb(least),
                free=gb(free_bytes),
            ),
        )
    ]


def saved_bytes(price: Price, ranks: int) -> tuple[int, int]:
    """Of a checkpoint, and of the model in it: what ranks divide among them is saved as one."""
    from memfit.memory.components import Component

    parts, effects = price.peak.components, price.candidate.effects
    weights, state = parts.get(Component.WEIGHTS, 0), parts.get(Component.OPTIMIZER, 0)
    weights *= ranks if effects.divides_weights else 1
    state *= ranks if effects.divides_weights else 1
    return weights + state + price.host_bytes, weights


def disk_note(workload: Workload, price: Price, free_bytes: int | None) -> list[Decision]:
    """That the checkpoints of a run do not go onto the disk."""
    if free_bytes is None:
        return []
    count, (each, model) = kept_checkpoints(workload), saved_bytes(price, workload.ranks)
    needs = count * each + model
    if needs <= free_bytes:
        return []
    said = Message(
        "checkpoints will take {needs} on the disk ({count} of {each} and the "
        "final model), of which {free} are free; lower --save-total-limit or "
        "choose another folder",
        needs=gb(needs),
        count=str(count),
        each=gb(each),
        free=gb(free_bytes),
    )
    return [Decision("note.disk", said)]


def guess_note(operators: Sequence[str]) -> list[Decision]:
    """That the time of some operators is a guess."""
    if not operators:
        return []
    return [
        Decision(
            "note.guess",
            Message(
                "what {operators} compute could not be counted, so their time is a guess "
                "from the sizes of what goes in and comes out",
                operators=", ".join(operators),
            ),
        )
    ]


def margin_note(card: DeviceProfile | None) -> list[Decision]:
    """What is kept of a card that is not here, for what is not known of it and for its system."""
    if card is None or card.here:
        return []
    notes = []
    if card.margin_bytes:
        said = Message(
            "the {card} is not here: {margin} are kept for what is not known of it (a context of "
            "{low} to {high}, totals that differ by driver); memfit doctor --measure there finds "
            "out",
            card=card.name,
            margin=gb(card.margin_bytes),
            low=gb(card.context_low_bytes),
            high=gb(card.context_bytes),
        )
        notes.append(Decision("note.margin", said))
    if card.reserved_bytes:
        kind = N_("{held} of the card are left to others, such as a display")
        if card.windows:
            kind = N_(
                "{held} of the card are left to Windows and its desktop; past the rest its driver "
                "pages to host memory, slowly and without an error"
            )
        notes.append(Decision("note.system", Message(kind, held=gb(card.reserved_bytes))))
    return notes


def kept_checkpoints(workload: Workload) -> int:
    """How many checkpoints are on the disk at once; a new one is written before an old one goes."""
    args = workload.args
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy == "no":
        return 0
    epochs = max(1, round(args.num_train_epochs))
    steps = args.max_steps if args.max_steps > 0 else epochs * workload.steps_per_epoch
    every = args.save_steps if strategy == "steps" else workload.steps_per_epoch
    every = round(every * steps) if every < 1 else round(every)
    written = max(1, -(-steps // max(every, 1)))
    limit = args.save_total_limit
    return written if not limit else min(written, limit + 1)


_FASTER = 0.9
"""A plan is worth more memory when its step takes at most this much of the time."""

_NOTICED = 1.05
"""What is not faster by this is not faster."""

_FAMILY = ((12, 768, 12), (6, 768, 12), (3, 768, 12))
"""Layers, width and heads of the smaller models people have: base, and what is cut from it."""


@dataclass(frozen=True)
class WithinReach:
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
            "fidelity": Message(FIDELITY_NAMES[str(best.candidate.fidelity)]),
            "bytes": gb(best.device_bytes),
            "step": step_time(best.step_seconds),
            "times": f"{times:.2g}",
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
                "--allow {permission} ({fidelity}): {bytes}, a step in {step}, {times}x as fast",
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
            "times": f"{times:.2g}",
            "step": step_time(self.price.step_seconds),
        }
        return Decision(
            "more", Message("{budget} would make a step {times}x as fast: {step}", **fields)
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
class OtherWays:
    """What could be done instead of any plan for the task as it was asked for."""

    allow: tuple[WithinReach, ...]
    smaller: tuple[Smaller, ...]


_SMALLER = "smaller"
"""What is found beside what each permission reaches."""


class OtherWaysFinder:
    """Finds other ways in this process, when it is asked for them."""

    def begin(self, known: Known) -> None:
        """Called once the usual candidates are priced, with what was traced for them."""

    def __call__(self, asked: PlanRequest, pricer: Pricer, budget_bytes: int) -> OtherWays:
        """What each permission would reach, and smaller models."""
        return _together(lambda name: _found(asked, pricer, budget_bytes, name))


other_ways = OtherWaysFinder()


def _together(find: Callable[[str], tuple[Any, ...]]) -> OtherWays:
    smaller = find(_SMALLER)
    return OtherWays(tuple(one for name in permissions() for one in find(name)), smaller)


@no_collection()
def _found(asked: PlanRequest, pricer: Pricer, budget_bytes: int, name: str) -> tuple[Any, ...]:
    if name == _SMALLER:
        return tuple(smaller_models(asked, pricer, budget_bytes))
    return tuple(reaches(asked, pricer, budget_bytes, (name,)))


class FoundBeside(OtherWaysFinder):
    """Other ways, found by another process while this one plans, and by both at the end.

    The other process begins when the usual candidates are priced: until then both would make the
    same traces, which also run through most other ways. It is sent one task at a time: a pool
    queues more than it runs, and what it has queued this process cannot take back.
    """

    def __init__(self, process: Executor, task: PlanTask) -> None:
        # Of a workload only its fields travel, without what was computed of them here.
        self._task = dataclasses.replace(task, workload=dataclasses.replace(task.workload))
        self._process, self._number = process, next(_NUMBERS)
        self._left = deque((_SMALLER, *permissions()))
        self._sent: dict[str, Future[tuple[Any, ...]]] = {}
        self._sending = Lock()

    def begin(self, known: Known) -> None:
        """Sends the first task with what this process has traced; each sends the next one."""
        self._send(self._task, known.copy())

    def _send(self, *what: Any) -> None:
        with self._sending:
            if not self._left:
                return
            name = self._left[0]
            try:
                sent = self._process.submit(_found_there, self._number, name, *what)
            except (RuntimeError, OSError):  # no process, or none any more: the rest is done here
                return
            self._sent[self._left.popleft()] = sent
        sent.add_done_callback(self._send_next)

    def _send_next(self, done: Future[tuple[Any, ...]]) -> None:
        """Sends the next task, unless the process died: then its pool is locked here."""
        if not done.cancelled() and done.exception() is None:
            self._send()

    def _take_back(self) -> str | None:
        with self._sending:
            return self._left.pop() if self._left else None

    def __call__(self, asked: PlanRequest, pricer: Pricer, budget_bytes: int) -> OtherWays:
        """What `OtherWaysFinder` returns."""
        found: dict[str, tuple[Any, ...]] = {}
        while (left := self._take_back()) is not None:
            found[left] = _found(asked, pricer, budget_bytes, left)
        for name, one in self._sent.items():
            try:
                if not one.cancel():
                    found[name] = one.result()
            except BrokenExecutor:  # what a dead process began is done here
                pass
            if name not in found:
                found[name] = _found(asked, pricer, budget_bytes, name)
        return _together(found.__getitem__)


_NUMBERS = itertools.count()
_BEGUN: dict[int, tuple[PlanRequest, Pricer, int]] = {}
"""In the other process: the newest task it was sent, by its number, and its traces."""


def _found_there(
    number: int, name: str, task: PlanTask | None = None, known: Known | None = None
) -> tuple[Any, ...]:
    if task is not None:
        _BEGUN.clear()
        _BEGUN[number] = _begun(task, known)
    return _found(*_BEGUN[number], name)


def _begun(task: PlanTask, known: Known | None) -> tuple[PlanRequest, Pricer, int]:
    from memfit.planner.pricing.pricer import TracedPricer
    from memfit.planner.search import ask

    pricer = TracedPricer(task.workload, task.card, known=known)
    asked, _ = ask(task.workload, task.card, pricer, exact=task.exact, allow=task.allow)
    return asked, pricer, task.budget_bytes


@dataclass(frozen=True)
class Alternatives:
    """All of it."""

    allow: tuple[WithinReach, ...]
    more: More | None
    smaller: tuple[Smaller, ...]


@no_collection()
def alternatives(planning: Planning, find: OtherWaysFinder = other_ways) -> Alternatives:
    """What else could be done than what is planned."""
    chosen = planning.chosen.price
    assert chosen is not None
    found = find(planning.asked, planning.pricer, planning.chosen.digest.budget_bytes)
    return Alternatives(found.allow, more_budget(planning.prices, chosen), found.smaller)


def reaches(
    asked: PlanRequest, pricer: Pricer, budget_bytes: int, names: Iterable[str]
) -> Iterator[WithinReach]:
    """What each of these permissions that is not given would reach.

    Recomputing and the bus are priced only where nothing fits without them: each costs traces.
    """
    if asked.exact:
        return
    for name in names:
        if name in asked.allow:
            continue
        wider = dataclasses.replace(asked, allow=asked.allow | {name}, left_out={})
        ways = _ways(wider, [kind.name for kind in ORDER if permission_of(kind) == name])
        prices = [pricer.quick(one) for one in ways if one.tier is Tier.USUAL]
        if _fastest(prices, budget_bytes) is None:
            prices = [pricer.quick(one) for one in ways]
        if prices:
            yield WithinReach(name, _smallest(prices), _fastest(prices, budget_bytes))


def _ways(asked: PlanRequest, strategies: Sequence[str]) -> list[Candidate]:
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


def smaller_models(asked: PlanRequest, pricer: Pricer, budget_bytes: int) -> Iterator[Smaller]:
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
    """To two digits, or to a tenth of a gigabyte, as a budget is written."""
    step = min(10**8, int("1" + "0" * max(len(str(count)) - 2, 0)))
    return -(-count // step) * step


_SHORTER = (64, 32)

_HELPS = {
    "budget": N_("--budget {bytes} or more"),
    "allow": N_("--allow {permission} reaches {bytes}"),
    "inexact": N_("without --exact it takes {bytes}"),
    "length": N_("--max-length {tokens} takes {bytes}"),
    "model": N_("a model of {layers} layers, {width} wide, takes {bytes}"),
}


@dataclass(frozen=True)
class Help:
    """One thing that would help, and what it would come down to."""

    kind: str
    """budget, allow, inexact, length or model."""
    value: str
    device_bytes: int
    decision: Decision


class NothingFitsError(DoesNotFitError):
    """No plan stays inside the budget."""

    def __init__(
        self,
        smallest: Plan,
        missing_bytes: int,
        helps: Sequence[Help],
        notes: Sequence[Decision] = (),
    ) -> None:
        self.smallest = smallest
        self.budget_bytes = smallest.digest.budget_bytes
        self.missing_bytes = missing_bytes
        self.helps = tuple(helps)
        self.notes = tuple(notes)
        super().__init__(self.text())

    def text(self, language: Language | None = None) -> str:
        """What is missing and what would help."""
        with speaking(language):
            helps = [one.decision.sentence() for one in self.helps]
            return t("; ").join([self._missing(), *helps])

    def _missing(self) -> str:
        price = self.smallest.price
        assert price is not None
        parts = sorted(price.peak.components.items(), key=lambda item: -item[1])[:3]
        return t(
            "nothing fits {budget}: the smallest plan found needs {needs} ({parts}), "
            "so {missing} are missing",
            budget=gb(self.budget_bytes),
            needs=gb(price.device_bytes),
            parts=t(", ").join(
                f"{t(COMPONENT_NAMES[name])} {gb(size)}" for name, size in parts if size
            ),
            missing=gb(self.missing_bytes),
        )


def does_not_fit(
    asked: PlanRequest,
    pricer: Pricer,
    prices: Sequence[Price],
    budget_bytes: int,
    host_free: int,
    find: OtherWaysFinder = other_ways,
) -> NothingFitsError:
    """The error for a budget nothing fits."""
    possible = [one for one in prices if fits_host(one, host_free)]
    least = min(possible, key=lambda one: (one.device_bytes, one.step_seconds))
    price = pricer.full(least.candidate)
    missing_bytes = max(price.device_bytes - budget_bytes, 1)
    smallest = Plan(
        candidate=price.candidate,
        price=price,
        digest=digest_of(asked.workload, budget_bytes, asked.card),
        decisions=explain(price, asked, pricer, budget_bytes),
        args=asked.workload.args,
    )
    helps = list(_helps(asked, pricer, price, budget_bytes, find))
    return NothingFitsError(smallest, missing_bytes, helps, margin_note(asked.card))


def _helps(
    asked: PlanRequest, pricer: Pricer, price: Price, budget_bytes: int, find: OtherWaysFinder
) -> Iterator[Help]:
    """What would make it fit, each by itself."""
    needs = -(-price.device_bytes // 10**8) * 10**8
    pasted = gb(needs).replace(" ", "")  # as the command line takes it
    yield _help("budget", pasted, needs, bytes=pasted)
    if asked.exact:
        wider = dataclasses.replace(asked, exact=False, left_out={})
        least = min(pricer.quick(one).device_bytes for one in candidates(wider))
        if least <= budget_bytes:
            yield _help("inexact", "", least, bytes=gb(least))
    found = find(asked, pricer, budget_bytes)
    for reach in found.allow:
        size = reach.smallest.device_bytes
        if size <= budget_bytes:
            yield _help("allow", reach.name, size, permission=reach.name, bytes=gb(size))
    yield from _shorter(asked, pricer, budget_bytes)
    for model in found.smaller:
        size = model.price.device_bytes
        if size <= budget_bytes:
            shape = {"layers": str(model.layers), "width": str(model.width)}
            yield _help("model", f"{model.layers}x{model.width}", size, bytes=gb(size), **shape)


def _shorter(asked: PlanRequest, pricer: Pricer, budget_bytes: int) -> Iterator[Help]:
    for tokens in _SHORTER:
        if tokens >= asked.workload.longest_tokens:
            continue
        cut = dataclasses.replace(asked, left_out={})
        sizes = [
            pricer.quick(one).device_bytes for one in candidates(cut, also=(Truncation(tokens),))
        ]
        if sizes and min(sizes) <= budget_bytes:
            size = min(sizes)
            yield _help("length", str(tokens), size, tokens=str(tokens), bytes=gb(size))
            return


def _help(kind: str, value: str, device_bytes: int, **fields: str) -> Help:
    said = Message(_HELPS[kind], **fields)
    return Help(kind, value, device_bytes, Decision(f"helps.{kind}", said))
