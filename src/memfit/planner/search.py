"""The fastest recipe that fits, at the settings where it fits best.

A recipe is traced with nothing recomputed in one micro-batch: that is its fastest. If that does not
fit, a line through a few traces says which settings would; the fastest of those is traced, the line
corrected, until a trace confirms it. A recipe whose fastest is slower than what was found already
is not searched. Of plans that take about as long the most faithful is chosen, then the simplest.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import psutil

from memfit.engine.micro_batches import MicroBatching
from memfit.errors import ConfigError, ModelError
from memfit.memory.memory_line import MemoryLine, MemoryPoint
from memfit.memory.stock_estimate import no_collection
from memfit.memory.tracing.counting import StepCounts
from memfit.planner import cache
from memfit.planner.explain import disk_note, explain, guess_note, host_note, margin_note
from memfit.planner.memory_price import phase_peaks
from memfit.planner.plan import Decision, Plan, plan_of
from memfit.planner.price import (
    BY_LAUNCH,
    Memory,
    Price,
    Pricer,
    Strategies,
    as_replayed,
    certain_counts,
    device_tokens,
    fits_host,
    has_short_masters,
)
from memfit.planner.recipes import Recipe, RecipeTable, fixed_recipe, recipes_for
from memfit.planner.task import Cutting, Task
from memfit.planner.trace import StepTrace
from memfit.strategies import (
    CudaGraphs,
    Freezing,
    FusedLayers,
    HalfPrecision,
    Lora,
    LowBitAdamW,
    Packing,
    Strategy,
    find,
)

_TIE = 0.03
"""Steps that differ by less take the same time: calibration measures no better than that."""

_WORTH_ROUNDING = 0.9
"""Masters of 16 bits cost up to half a point of F1 (ALBERT-tiny), 24 bits nothing measurable: they
must make a step faster by a tenth."""

_PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Into how many micro-batches the largest batch may be cut."""

_CONFIRMING_TRACES = 8
"""How often the line is corrected by a trace before the best setting traced so far is taken."""

_CLOSE = 0.02
"""How far a guess may exceed the budget and still be traced."""

_LISTED = 6


@dataclass(frozen=True, kw_only=True)
class Planning:
    """The plan that was chosen, and what it was chosen from."""

    task: Task
    chosen: Plan
    candidates: tuple[Plan, ...] = ()
    """The best plan of each other recipe that fits, fastest first."""
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    """Strategies that cannot be used here, each with its reason."""
    notes: tuple[Decision, ...] = ()
    """What else to know: host memory or disk that is missing."""
    considered: int = 0
    """Settings of recipes that were weighed."""
    traced: int = 0
    seconds: float = 0.0
    """What planning took."""
    cached: bool = False
    """Whether an earlier run made the plan for the same task."""
    search: Search | None = None
    """What was traced on the way; None of a cached plan."""

    def __repr__(self) -> str:
        return f"<Planning: {self.chosen!r} of {self.considered} settings>"


@no_collection()
def plan_for(
    task: Task,
    *,
    strategies: Sequence[Strategy] | None = None,
    folder: Path | None = None,
    fresh: bool = False,
    pricer: Pricer | None = None,
    host_bytes_free: int | None = None,
) -> Planning:
    """Returns the fastest plan inside the budget, or raises NothingFitsError with the smallest one.

    With `strategies` only the micro-batches are chosen. A plan that an earlier run made for the
    same task is taken from the cache, unless `fresh`. `folder` is where checkpoints will go.
    `pricer` has the traces of an earlier plan for the same rows, model and device.
    """
    began = time.perf_counter()
    disk_bytes_free = None if folder is None else free_disk_bytes(folder)
    if strategies is None and not fresh and (plan := cache.cached_plan(task)) is not None:
        assert plan.price is not None
        notes = tuple(disk_note(task, plan.price, disk_bytes_free))
        return Planning(task=task, chosen=plan, notes=notes, cached=True)
    search = Search(task, pricer or Pricer(task), host_bytes_free=host_bytes_free)
    if strategies is not None:
        search.table = RecipeTable((fixed_recipe(strategies),), {})
    found = search.run()
    if found is None:
        from memfit.planner.advice import does_not_fit

        raise does_not_fit(search)
    notes = (
        *host_note(search.without_host_memory, found, search.host_free),
        *disk_note(task, found, disk_bytes_free),
        *guess_note(sorted(search.pricer.guessed)),
        *margin_note(task.card),
    )
    decisions = explain(found, task, search.pricer, search.table.left_out)
    chosen = dataclasses.replace(plan_of(found, task, decisions), line=search.line_of(found))
    if strategies is None and not notes:  # what is scarce now may not be next time
        cache.write_plan(task, chosen)
    return Planning(
        task=task,
        chosen=chosen,
        candidates=tuple(plan_of(one, task) for one in search.others(found)),
        left_out=dict(search.table.left_out),
        notes=notes,
        considered=search.considered,
        traced=search.pricer.traced,
        seconds=time.perf_counter() - began,
        search=search,
    )


def free_disk_bytes(folder: Path) -> int:
    """What may still be written where a folder is, or will be made."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    return shutil.disk_usage(there).free


def limits_for(task: Task, recipe: Recipe) -> list[MicroBatching]:
    """The whole effective batch at once, or in ever smaller parts down to the longest row."""
    whole = [MicroBatching()]
    if not recipe.cuts_batches:
        return whole
    batches = task.batches(recipe.strategies)
    longest = batches.longest_tokens
    if find(recipe.strategies, Packing) is not None:
        most = batches.worst_tokens
        counts = {batches.usual_most_tokens(), *(-(-most // parts) for parts in _PARTS)}
    else:
        rows = min(task.rank_rows, len(task.lengths))
        most = rows * longest
        counts = {-(-rows // parts) * longest for parts in _PARTS}
    smaller = sorted({max(one, longest) for one in counts} - {most}, reverse=True)
    return whole + [MicroBatching(max_tokens=one) for one in smaller if one < most]


class Search:
    """Goes through the recipes of a task; remembers what each comes to."""

    def __init__(
        self,
        task: Task,
        pricer: Pricer,
        *,
        host_bytes_free: int | None = None,
        thorough: bool = True,
    ) -> None:
        self.task, self.pricer = task, pricer
        self.table = recipes_for(task, pricer.tracer)
        free = psutil.virtual_memory().available if host_bytes_free is None else host_bytes_free
        self.host_free = free // task.ranks  # each rank keeps its own there
        self._thorough = thorough
        self.found: dict[str, Price] = {}
        """The best of each recipe that fits, by its name."""
        self.rows: dict[str, RecipeSearch] = {}
        self.without_host_memory: list[Price] = []
        """The fastest of recipes that need more host memory than there is."""

    @property
    def considered(self) -> int:
        """How many settings there were."""
        return sum(row.settings for row in self.rows.values())

    def run(self) -> Price | None:
        """The fastest that fits, by the rules of the module's docstring; None if none does.

        The recipe that could be fastest comes first. One that is never faster than another waits
        until that is known to be too slow or too large.
        """
        short = [one for one in self.table.recipes if has_short_masters(one.strategies)]
        whole = [one for one in self.table.recipes if one not in short]
        for waiting in (whole, short):
            while waiting:
                recipe = min(waiting, key=self._turn)
                waiting.remove(recipe)
                limit = self._limit(recipe)
                if self._least_seconds(recipe) >= limit:
                    continue
                if recipe.name not in self.rows:  # its own time is no less than that of the other
                    if self._may_fit(recipe):
                        waiting.append(recipe)
                    continue
                row = self.rows[recipe.name]
                if (best := row.best(limit)) is not None:
                    self.found[recipe.name] = best
                    if not self._thorough:
                        return best
                elif row.lacks_host_memory:
                    self.without_host_memory.append(row.smallest())
        return chosen_of(list(self.found.values()))

    def _may_fit(self, recipe: Recipe) -> bool:
        """Begins a recipe; False where it cannot be used, or is too large at its smallest.

        The smallest setting is traced only where another recipe's was too large.
        """
        row = RecipeSearch(self.task, self.pricer, recipe, self.host_free)
        is_tight = not self.found and any(one.is_too_large for one in self.rows.values())
        try:
            if is_tight and not row.fits_at_its_smallest:
                self.rows[recipe.name] = row
                return False
            row.fastest_seconds  # noqa: B018
        except (ConfigError, ModelError):  # weights that cannot lie on the host
            return False
        self.rows[recipe.name] = row
        return True

    def _turn(self, recipe: Recipe) -> tuple[float, bool]:
        """The recipe that could be fastest comes first; of equals, one that was begun."""
        return self._least_seconds(recipe), recipe.name not in self.rows

    def _least_seconds(self, recipe: Recipe) -> float:
        """What a recipe takes at least, as far as that is known."""
        row, before = self.rows.get(recipe.name), self.rows.get(recipe.after)
        if row is not None:
            return row.fastest_seconds
        if before is not None:
            return before.seconds_with(recipe.strategies) if before.is_timed else 0.0
        is_listed = any(one.name == recipe.after for one in self.table.recipes)
        return math.inf if is_listed else 0.0

    def _limit(self, recipe: Recipe) -> float:
        """The seconds that a recipe must stay below to matter."""
        if not self.found:
            return math.inf
        best = min(self.found.values(), key=lambda one: one.step_seconds)
        if has_short_masters(recipe.strategies) and not has_short_masters(best.strategies):
            return _WORTH_ROUNDING * best.step_seconds
        simpler = len(recipe.strategies) < len(best.strategies)
        return (1 + _TIE if simpler else 1.0) * best.step_seconds

    def others(self, chosen: Price) -> list[Price]:
        """The best of each other recipe that fits, fastest first."""
        fitting = list(self.found.values())
        for row in self.rows.values():
            if row.recipe.name not in self.found and row.is_timed and row.fits_at_its_fastest:
                fitting.append(row.fastest())
        seen = {_kind(chosen)}
        different = []
        for one in sorted(fitting, key=_rank):
            if _kind(one) not in seen:
                seen.add(_kind(one))
                different.append(one)
        return different[:_LISTED]

    def line_of(self, price: Price) -> MemoryLine | None:
        """The memory of one recipe by tokens and layers, through traces of it."""
        row = next((one for one in self.rows.values() if one.has(price)), None)
        return None if row is None else row.line_through(price)


def chosen_of(prices: Sequence[Price]) -> Price | None:
    """The fastest; of those that are about as fast the most faithful, then the simplest."""
    short = [one for one in prices if has_short_masters(one.strategies)]
    whole = [one for one in prices if one not in short]
    fastest, shorter = min(whole, key=_rank, default=None), min(short, key=_rank, default=None)
    if fastest is None:
        return shorter
    if shorter is not None and shorter.step_seconds < _WORTH_ROUNDING * fastest.step_seconds:
        return shorter
    tied = [
        one
        for one in whole
        if one.step_seconds <= (1 + _TIE) * fastest.step_seconds and _is_better(one, fastest)
    ]
    return min(
        tied, key=lambda one: (one.fidelity, len(one.strategies), _rank(one)), default=fastest
    )


def _rank(price: Price) -> tuple[float, int, int, int]:
    """Faster first; then better fidelity, less memory, fewer strategies."""
    seconds = float(f"{price.step_seconds:.6g}")  # what differs by less is the same
    return seconds, price.fidelity, price.device_bytes, len(price.strategies)


def _is_better(one: Price, other: Price) -> bool:
    """Whether this price wins where both are equally fast.

    A strategy is not left out where smaller micro-batches would have to take its place.
    """
    fewer = len(one.strategies) < len(other.strategies)
    same = one.micro_batching == other.micro_batching
    return one.fidelity < other.fidelity or (one.fidelity == other.fidelity and fewer and same)


def _kind(price: Price) -> tuple[object, ...]:
    """What makes two plans differ by more than how many layers and tokens."""
    return tuple(type(one) if hasattr(one, "layers") else one for one in price.strategies)


@dataclass(frozen=True, order=True)
class _Setting:
    """Where a recipe is tried: one of its limits, and the layers its dial is for."""

    place: int
    """Of the limit in the list, the largest micro-batch first."""
    layers: int


class RecipeSearch:
    """One recipe at its settings."""

    def __init__(self, task: Task, pricer: Pricer, recipe: Recipe, host_free: int) -> None:
        self.recipe = recipe
        self._task, self._pricer, self._host_free = task, pricer, host_free
        self._limits = limits_for(task, recipe)
        self._counts = recipe.counts(task.depth)
        self._points: dict[_Setting, Memory] = {}
        self.lacks_host_memory = False
        self.is_too_large = False
        """Whether not even the smallest setting fits."""

    @property
    def settings(self) -> int:
        """How many there are."""
        return len(self._limits) * len(self._counts)

    @cached_property
    def fastest_seconds(self) -> float:
        """What no setting is faster than: nothing is recomputed.

        In one micro-batch, where batches are packed; smaller ones of padded rows have less padding.
        """
        places = range(1 if self._is_packed else len(self._limits))
        return min(self._seconds(_Setting(place, self._counts[0])) for place in places)

    @property
    def is_timed(self) -> bool:
        """Whether its fastest setting was traced."""
        return "fastest_seconds" in vars(self)

    def seconds_with(self, strategies: Strategies) -> float:
        """The fastest step with what these strategies send across the bus or update on the host."""
        learning = self._memory(self._first).trace.trainable_parameters
        more = certain_counts(strategies, learning)
        return self._seconds(self._first, more) if more != StepCounts() else self.fastest_seconds

    def fastest(self) -> Price:
        """The setting with the largest micro-batches and nothing recomputed."""
        return self._price(self._first)

    @property
    def fits_at_its_fastest(self) -> bool:
        """Whether the fastest setting is within the budget and the computer's memory."""
        return self._fits(self._first)

    @property
    def fits_at_its_smallest(self) -> bool:
        """Whether the smallest setting is within the budget and the computer's memory."""
        fits = self._fits(self._least)
        self.is_too_large = not fits
        return fits

    def smallest(self) -> Price:
        """The setting with the smallest micro-batches and every layer recomputed."""
        return self._price(self._least)

    def has(self, price: Price) -> bool:
        """Whether this is one of the recipe's settings."""
        layers = (self.recipe.with_layers(count, self._task.depth) for count in self._counts)
        return price.strategies in layers

    def best(self, limit_seconds: float) -> Price | None:
        """The fastest setting that fits, if it takes less than this."""
        fits = self.fits_at_its_fastest
        if fits and self._is_packed:
            return self.fastest()
        if not fits and not self.fits_at_its_smallest:
            return None
        for _ in range(_CONFIRMING_TRACES):
            setting, seconds = self._most_promising()
            if setting is None or seconds >= limit_seconds or setting in self._points:
                break
            self._memory(setting)
        traced = [one for one in self._points if self._fits(one)]
        chosen = min(traced, key=lambda one: (self._seconds(one), one))
        return self._price(chosen) if self._seconds(chosen) < limit_seconds else None

    def faster_than(self, seconds: float) -> Price | None:
        """The smallest setting that takes at most so long; None where there is none."""
        settings = [one for one in self._every() if self._seconds(one) <= seconds]
        return self._price(min(settings, key=self._guess, default=self._first))

    def line_through(self, price: Price) -> MemoryLine | None:
        """The recipe's memory by tokens and layers, exact at this price."""
        count = next(
            one
            for one in self._counts
            if self.recipe.with_layers(one, self._task.depth) == price.strategies
        )
        place = self._limits.index(price.micro_batching)
        own = _Setting(place, count)
        self._memory(_Setting(place, self._counts[-1] if count == self._counts[0] else count))
        points = [self._point_of(one) for one in self._points]
        if len(self._limits) == 1:
            points.append(self._middle_point)
        if len(self._counts) == 1:
            points = [dataclasses.replace(one, kept_layers=0) for one in points]
        return MemoryLine.through(points).corrected(self._point_of(own))

    # ---- settings ----

    @property
    def _first(self) -> _Setting:
        return _Setting(0, self._counts[0])

    @property
    def _least(self) -> _Setting:
        return _Setting(len(self._limits) - 1, self._counts[-1])

    def _every(self) -> Iterator[_Setting]:
        for place in range(len(self._limits)):
            for count in self._counts:
                yield _Setting(place, count)

    def _strategies(self, setting: _Setting) -> Strategies:
        return self.recipe.with_layers(setting.layers, self._task.depth)

    def _cut(self, setting: _Setting) -> Cutting:
        return self._pricer.cutting(self.recipe.strategies, self._limits[setting.place])

    def _price(self, setting: _Setting) -> Price:
        self._memory(setting)
        return self._pricer.price(self._strategies(setting), self._limits[setting.place])

    def _memory(self, setting: _Setting) -> Memory:
        if setting not in self._points:
            limits = self._limits[setting.place]
            strategies, budget_bytes = self._strategies(setting), self._task.budget_bytes
            self._points[setting] = self._pricer.memory(strategies, limits, budget_bytes)
        return self._points[setting]

    def _fits(self, setting: _Setting) -> bool:
        memory = self._memory(setting)
        if not fits_host(memory.trace.host_bytes, self._host_free):
            self.lacks_host_memory = True
            return False
        return memory.peak.device_bytes <= self._task.budget_bytes

    # ---- where to look next ----

    @property
    def _middle(self) -> _Setting:
        """Nothing recomputed, in about a third of the largest batch."""
        most = self._cut(self._first).worst_tokens
        places = range(len(self._limits))
        near = min(places, key=lambda one: abs(3 * self._cut(_Setting(one, 0)).worst_tokens - most))
        return _Setting(near, self._counts[0])

    @cached_property
    def _middle_trace(self) -> StepTrace:
        """A step of about a third of the tokens, for its time."""
        if len(self._limits) > 1:
            return self._timed(self._middle)
        strategies, limits = self._strategies(self._first), self._limits[0]
        if not self._is_linear:
            return self._pricer.average(strategies, limits, 1 / 3)
        tokens = max(self._cut(self._first).worst_tokens // 3, 1)
        return self._pricer.tracer.step(strategies, limits, tokens=tokens, whole=True)

    @cached_property
    def _is_linear(self) -> bool:
        """Whether the time of the largest batches tells that of average ones.

        Attention that pads, or pads packed texts again, takes the square of the longest text.
        """
        return self._is_packed and self._pricer.tracer.has_flash(self.recipe.strategies)

    @cached_property
    def _is_packed(self) -> bool:
        return find(self.recipe.strategies, Packing) is not None

    def _timed(self, setting: _Setting) -> StepTrace:
        """The trace that a setting's time is taken from."""
        if self._is_linear:
            return self._memory(setting).trace
        return self._pricer.average(self._strategies(setting), self._limits[setting.place])

    @property
    def _middle_point(self) -> MemoryPoint:
        """The memory of a third of the tokens, where batches are not cut."""
        strategies, limits = self._strategies(self._first), self._limits[0]
        tokens = max(self._cut(self._first).worst_tokens // 3, 1)
        trace = self._pricer.tracer.step(strategies, limits, tokens=tokens, whole=True)
        run = self._pricer.priced(trace, strategies, limits)
        peaks = phase_peaks(run, self._task.card).values()
        kept = self._task.depth - self._counts[0]
        return MemoryPoint(tokens, kept, max(one.device_bytes for one in peaks))

    def _most_promising(self) -> tuple[_Setting | None, float]:
        """The fastest setting that should fit, and its seconds."""
        fitting = []
        for place in range(len(self._limits)):
            settings = (_Setting(place, count) for count in self._counts)
            kept = next((one for one in settings if self._should_fit(one)), None)
            if kept is not None:
                fitting.append(kept)
        best = min(fitting, key=lambda one: (self._seconds(one), one), default=None)
        return best, math.inf if best is None else self._seconds(best)

    def _should_fit(self, setting: _Setting) -> bool:
        if setting in self._points:
            return self._fits(setting)
        for other in self._points:  # larger micro-batches, or fewer layers, need no less
            smaller = other.place >= setting.place and other.layers >= setting.layers
            if smaller and not self._fits(other):
                return False
            larger = other.place <= setting.place and other.layers <= setting.layers
            if larger and self._fits(other):
                return True
        return self._guess(setting) <= (1 + _CLOSE) * self._task.budget_bytes

    def _guess(self, setting: _Setting) -> float:
        """Between traces of fewer and more tokens and layers, moved to the nearest trace."""
        if setting in self._points:
            return self._points[setting].peak.device_bytes
        self._memory(self._middle)
        self._memory(self._least)
        self._memory(_Setting(0, self._counts[-1]))
        if not self._is_linear:
            self._memory(replace(self._middle, layers=self._counts[-1]))
        if find(self.recipe.strategies, CudaGraphs) and len(self._limits) > 1:
            # The graph of a batch that is not cut has its update, and so is another one.
            self._memory(_Setting(1, self._counts[-1]))
        most, depth = self._cut(self._first).worst_tokens, self._task.depth
        tokens, layers = self._line_place(setting)

        def distance(one: _Setting) -> float:
            others = self._line_place(one)
            return abs(tokens - others[0]) / most + abs(layers - others[1]) / depth

        nearest = min(self._points, key=distance)
        error = self._points[nearest].peak.device_bytes - self._between(nearest)
        floor = self._points[self._least].peak.device_bytes
        return max(self._between(setting) + error, floor)

    def _between(self, setting: _Setting) -> float:
        """Interpolated between the ends of the dial, and there between sizes that were traced."""
        low, high = self._counts[0], self._counts[-1]
        ends = [self._across(count, self._cut(setting).worst_tokens) for count in (low, high)]
        share = (setting.layers - low) / max(high - low, 1)
        return ends[0] + share * (ends[1] - ends[0])

    def _across(self, layers: int, tokens: int) -> float:
        """The memory of so many tokens at one end of the dial, on a line through two traces."""
        sizes = {
            self._cut(one).worst_tokens: memory.peak.device_bytes
            for one, memory in self._points.items()
            if one.layers == layers
        }
        near = sorted(sizes, key=lambda size: (abs(size - tokens), size))[:2]
        above = [size for size in sizes if size >= tokens]
        below = [size for size in sizes if size <= tokens]
        if above and below:
            near = [max(below), min(above)]
        start, end = min(near), max(near)
        if start == end:
            return sizes[start]
        slope = (sizes[end] - sizes[start]) / (end - start)
        return sizes[start] + slope * (tokens - start)

    def _line_place(self, setting: _Setting) -> tuple[int, int]:
        return self._cut(setting).worst_tokens, self._task.depth - setting.layers

    def _point_of(self, setting: _Setting) -> MemoryPoint:
        return MemoryPoint(*self._line_place(setting), self._points[setting].peak.device_bytes)

    # ---- time, by what traces of the largest batches do ----

    def _seconds(self, setting: _Setting, more_counts: StepCounts | None = None) -> float:
        """A step by its micro-batches, tokens and layers: linear in each."""
        cut = self._cut(setting)
        tokens = device_tokens(self.recipe.strategies, cut)
        micro, more, token, update = self._by_size
        step = micro * cut.micro_batches + more * (cut.micro_batches - 1)
        step += self._attending(token, cut) * tokens
        if setting.layers > self._counts[0]:
            share = (setting.layers - self._counts[0]) / (self._counts[-1] - self._counts[0])
            micro, token = self._by_layer
            step += (micro * cut.micro_batches + self._attending(token, cut) * tokens) * share
        if "static" in self._timed(self._first).part_counts:
            step, update = as_replayed(step, update, cut, self._task.ranks)
        limits = self._limits[setting.place]
        step += update if more_counts is None else update + more_counts
        return self._pricer.seconds(self._strategies(setting), limits, step)

    @cached_property
    def _by_size(self) -> tuple[StepCounts, StepCounts, StepCounts, StepCounts]:
        """What each micro-batch takes, each after the first, each token, and the update."""
        whole, middle = self._timed(self._first), self._middle_trace
        none, parts = StepCounts(), middle.part_counts
        large, small = whole.part_counts["micro"], parts["micro"]
        update = parts.get("update", parts.get("update_first", none))
        if "static" in parts and whole.rows.parts == 1 < middle.rows.parts:
            large -= update  # the graph of a batch that is not cut has its update
        more = parts.get("micro_more", small) - small
        tokens = self._traced_tokens(whole), self._traced_tokens(middle)
        if tokens[0] == tokens[1]:
            return _launched(large), more, _moved(large) * (1 / tokens[0]), update
        token = _moved(large - small) * (1 / (tokens[0] - tokens[1]))
        return small - token * tokens[1], more, token, update

    @property
    def _by_layer(self) -> tuple[StepCounts, StepCounts]:
        """What the dial at its end takes more: of each micro-batch, and of each token.

        It does not depend on how gradients and state are kept.
        """
        layers = (LowBitAdamW, HalfPrecision, Packing, FusedLayers, CudaGraphs, Lora, Freezing)
        made_of = [one for one in self.recipe.strategies if isinstance(one, layers)]
        stored = {getattr(one, "dtype", None) for one in self.recipe.strategies}
        key = (self.recipe.dial, frozenset(map(type, made_of)), frozenset(stored))
        known = self._pricer.layer_counts
        if key not in known:
            whole, every = self._timed(self._first), self._timed(_Setting(0, self._counts[-1]))
            extra = every.part_counts["micro"] - whole.part_counts["micro"]
            known[key] = _launched(extra), _moved(extra) * (1 / self._traced_tokens(whole))
        return known[key]

    def _traced_tokens(self, trace: StepTrace) -> int:
        """Tokens on the device in a traced micro-batch."""
        lengths, tokens = trace.rows.lengths, trace.rows.tokens
        if not self._is_packed:
            return len(lengths) * max(lengths)
        graphs = find(self.recipe.strategies, CudaGraphs)
        bucket = 1 if graphs is None else graphs.bucket_tokens
        return -(-tokens // bucket) * bucket

    def _attending(self, token: StepCounts, cut: Cutting) -> StepCounts:
        """A token's share of attention where texts are of average length, not the longest."""
        if not self._is_linear:
            return token  # average rows were traced
        rows = self._memory(self._first).trace.rows
        share = cut.pairs / cut.tokens * rows.tokens / sum(length**2 for length in rows.lengths)
        return dataclasses.replace(
            token,
            half_attention_flops=share * token.half_attention_flops,
            full_attention_flops=share * token.full_attention_flops,
        )


def _launched(counts: StepCounts) -> StepCounts:
    """What a micro-batch takes whatever its size."""
    return StepCounts(**{name: getattr(counts, name) for name in BY_LAUNCH})


def _moved(counts: StepCounts) -> StepCounts:
    """The rest, which grows with its tokens."""
    return dataclasses.replace(counts, **dict.fromkeys(BY_LAUNCH, 0.0))
