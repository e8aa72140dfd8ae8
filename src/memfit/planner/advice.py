"""What else could be done than what is planned, and what would help where nothing fits.

It is the same search, asked again with more allowed, a smaller model or shorter texts, and ended at
the first recipe that fits: what to try next, not a promise.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.config.schema import ALLOWABLE, FIDELITY_NAMES
from memfit.errors import DoesNotFitError
from memfit.i18n import N_, Language, Message, speaking, t
from memfit.memory.components import COMPONENT_NAMES
from memfit.memory.stock_estimate import no_collection
from memfit.memory.tracing.depth import with_layers
from memfit.planner.explain import explain, margin_note
from memfit.planner.plan import Decision, Plan, plan_of
from memfit.planner.price import Price, Pricer, fits_host
from memfit.planner.recipes import Recipe, RecipeTable, permission_of
from memfit.planner.search import Search
from memfit.strategies import Truncation, ordered
from memfit.units import gb, step_time

if TYPE_CHECKING:
    from memfit.planner.search import Planning

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
            "fidelity": Message(FIDELITY_NAMES[str(best.fidelity)]),
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
class Alternatives:
    """What else could be done."""

    allow: tuple[WithinReach, ...]
    more: More | None
    smaller: tuple[Smaller, ...]


@no_collection()
def alternatives(planning: Planning) -> Alternatives:
    """What else could be done than what is planned."""
    chosen, search = planning.chosen.price, planning.search
    assert chosen is not None
    assert search is not None
    return Alternatives(
        allow=tuple(reaches(search)),
        more=more_budget(search, chosen),
        smaller=tuple(smaller_models(search)),
    )


def reaches(search: Search) -> Iterator[WithinReach]:
    """What each permission that is not given would reach."""
    task = search.task
    if task.exact:
        return
    for name in ALLOWABLE:
        if name in task.allow:
            continue
        wider = dataclasses.replace(task, allow=task.allow | {name})
        other = Search(wider, search.pricer, host_bytes_free=sys.maxsize, thorough=False)
        recipes = [one for one in other.table.recipes if _needs(one, name)]
        other.table = RecipeTable(tuple(recipes), {})
        if not recipes:
            continue
        found = other.run()
        yield WithinReach(name, found or _smallest(other), found)


def _needs(recipe: Recipe, permission: str) -> bool:
    return any(permission_of(one) == permission for one in recipe.strategies)


def more_budget(search: Search, chosen: Price) -> More | None:
    """The least memory at which a plan is a tenth faster than the chosen one."""
    asked = _FASTER * chosen.step_seconds
    timed = (one for one in search.rows.values() if one.is_timed)
    rows = [one for one in timed if one.fastest_seconds <= asked]
    faster = [one for row in rows if (one := row.faster_than(asked)) is not None]
    faster = [
        one
        for one in faster
        if one.device_bytes > chosen.device_bytes and one.step_seconds <= asked
    ]
    if not faster:
        return None
    best = min(faster, key=lambda one: (one.device_bytes, one.step_seconds))
    return More(_rounded_up(best.device_bytes), best)


def smaller_models(search: Search) -> Iterator[Smaller]:
    """Models of the same family with fewer or narrower layers, each at its best."""
    task = search.task
    if task.given is not None:
        return  # its configuration alone does not say what a smaller one would be
    text: Any = task.config.get_text_config()
    own = text.num_hidden_layers * text.hidden_size**2
    for layers, width, heads in _FAMILY:
        if layers > text.num_hidden_layers or layers * width**2 >= own:
            continue
        other = dataclasses.replace(task, config=_shaped(task.config, layers, width, heads))
        found = Search(other, Pricer(other), host_bytes_free=sys.maxsize, thorough=False)
        yield Smaller(layers, width, found.run() or _smallest(found))


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


def _smallest(search: Search) -> Price:
    """The least any recipe needs, by its smallest setting."""
    sizes = [row.smallest() for row in search.rows.values()]
    possible = [one for one in sizes if fits_host(one.host_bytes, search.host_free)]
    return min(possible or sizes, key=lambda one: (one.device_bytes, one.step_seconds))


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


def does_not_fit(search: Search) -> NothingFitsError:
    """The error for a budget nothing fits."""
    task, price = search.task, _smallest(search)
    missing_bytes = max(price.device_bytes - task.budget_bytes, 1)
    decisions = explain(price, task, search.pricer, search.table.left_out)
    smallest = plan_of(price, task, decisions)
    helps = list(_helps(search, price))
    return NothingFitsError(smallest, missing_bytes, helps, margin_note(task.card))


def _helps(search: Search, price: Price) -> Iterator[Help]:
    """What would make it fit, each by itself."""
    task = search.task
    needs = _rounded_up(price.device_bytes)
    pasted = gb(needs).replace(" ", "")  # as the command line takes it
    yield _help("budget", pasted, needs, bytes=pasted)
    if task.exact:
        wider = Search(dataclasses.replace(task, exact=False), search.pricer, thorough=False)
        if (found := wider.run()) is not None:
            size = found.device_bytes
            yield _help("inexact", "", size, bytes=gb(size))
    for reach in reaches(search):
        if (found := reach.fastest) is not None:
            size = found.device_bytes
            yield _help("allow", reach.name, size, permission=reach.name, bytes=gb(size))
    yield from _shorter(search)
    for model in smaller_models(search):
        size = model.price.device_bytes
        if size <= task.budget_bytes:
            shape = {"layers": str(model.layers), "width": str(model.width)}
            yield _help("model", f"{model.layers}x{model.width}", size, bytes=gb(size), **shape)


def _shorter(search: Search) -> Iterator[Help]:
    """The longest of a few lengths at which the smallest setting of some recipe fits."""
    for tokens in _SHORTER:
        if tokens >= search.task.longest_tokens:
            continue
        other = Search(search.task, search.pricer, thorough=False)
        other.table = RecipeTable(
            tuple(
                dataclasses.replace(
                    one, strategies=tuple(ordered([Truncation(tokens), *one.strategies]))
                )
                for one in search.table.recipes
            ),
            {},
        )
        if (found := other.run()) is not None:
            size = found.device_bytes
            yield _help("length", str(tokens), size, tokens=str(tokens), bytes=gb(size))
            return


def _help(kind: str, value: str, device_bytes: int, **fields: str) -> Help:
    said = Message(_HELPS[kind], **fields)
    return Help(kind, value, device_bytes, Decision(f"helps.{kind}", said))
