"""A candidate's step at full depth: memfit's own step traced for a card that need not be here.

Frozen layers come first, then those that are recomputed or whose activations leave the device,
then the others. Each such run is traced short, and once more with one layer more; what that
layer adds is put in as often as the run is long. Memory is exact where a run's layers are alike.

    Tracer(task).step(strategies, limits)      the step's parts at full depth, and what it does
    Tracer(task).objections(strategies)        why each that cannot be used cannot, in a sentence

Shallow traces are cached: candidates that differ only in how many layers are recomputed, offloaded
or frozen share them.
"""

from __future__ import annotations

import dataclasses
import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memfit.engine.micro_batches import MicroBatching
from memfit.errors import ConfigError, ModelError
from memfit.memory.stock_estimate import failing_as_a_trace, no_collection
from memfit.memory.tracing import traced_device as traced
from memfit.memory.tracing.counting import Counting, StepCounts
from memfit.memory.tracing.depth import (
    Kind,
    Mark,
    Segments,
    cut,
    deepen,
    difference,
    plan_depths,
    slope_of,
    sorted_deaths,
    with_layers,
)
from memfit.memory.tracing.fake_tensors import fake_trace
from memfit.memory.tracing.meta_models import empty_like, has_bias, materialize
from memfit.memory.tracing.operators import CudaKernels
from memfit.memory.tracing.traced_device import TracedDevice
from memfit.models.layers import layers_of
from memfit.planner.task import Task
from memfit.planner.traced_run import TracedRun
from memfit.planner.traced_setup import (
    TracedRows,
    apply_one,
    autocast_dtype,
    build_model,
    device_to_trace,
    full_config,
    make_setup,
    rows_for,
)
from memfit.strategies import (
    ActivationOffload,
    Checkpointing,
    Freezing,
    Lora,
    LowBitAdamW,
    OptimizerOffload,
    Packing,
    Strategy,
    find,
)

_SHORT_OFFLOADED = 4
"""What lives on the host: the layer at work, its neighbours, and one that is away."""

_ENOUGH_LAYERS = 4
"""More than one period of the models whose layers alternate."""

_MOST_TRACES = 512

_OLDEST_FIRST = ("update_first", "clear", "update")


@dataclass(frozen=True)
class Shallow:
    """Short stand-ins for a deep model: one to begin with, and one more for each run of layers."""

    base: tuple[int, ...]
    repeats: tuple[int, ...]
    """How often what one more layer of each run adds is put in."""
    period: int = 1
    """Layers that repeat together."""

    @property
    def runs(self) -> list[tuple[int, ...]]:
        """The run lengths to trace: the base, then each run that repeats with one more."""
        deeper = [
            tuple(length + self.period * (place == at) for place, length in enumerate(self.base))
            for at, count in enumerate(self.repeats)
            if count
        ]
        return [self.base, *deeper]


def plan_runs(task: Task, strategies: Sequence[Strategy], layers: Sequence[Any]) -> Shallow | None:
    """Which shallow models to trace; None where the full one costs no more, or layers differ."""
    count = len(layers)
    ends = boundaries(task, strategies, count)
    updates = find(strategies, OptimizerOffload)
    hosts_weights = updates is not None and updates.weights
    if len(ends) == 1:
        is_away = hosts_weights or find(strategies, ActivationOffload) is not None
        depths = plan_depths(list(layers), least=_SHORT_OFFLOADED if is_away else 2)
        if depths is None:
            return None
        period = depths.deeper - depths.shallow
        return Shallow((depths.shallow,), (depths.repeats,), period)
    lengths = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    single = plan_depths(list(layers))
    if single is None or single.deeper - single.shallow != 1 or hosts_weights:
        return None
    # The last layer is unlike those before it where a head reads one token of each text.
    base = (*(1 for _ in lengths[:-1]), min(lengths[-1], 2))
    repeats = tuple(length - short for length, short in zip(lengths, base, strict=True))
    shallow = Shallow(base, repeats)
    return shallow if sum(map(sum, shallow.runs)) < count else None


def boundaries(task: Task, strategies: Sequence[Strategy], count: int) -> list[int]:
    """Where a run of like layers ends, in layers from below; the last is the full depth."""
    frozen = _frozen(task, strategies, count)
    found = {frozen, count}
    for strategy in strategies:
        if isinstance(strategy, Checkpointing | ActivationOffload) and strategy.layers is not None:
            found.add(frozen + strategy.layers)
    return sorted(end for end in found if 0 < end <= count)


def _frozen(task: Task, strategies: Sequence[Strategy], count: int) -> int:
    """Layers that do not learn, by a strategy or by the user."""
    by_plan = find(strategies, Freezing)
    what = task.freeze if by_plan is None else str(by_plan.what)
    return min(int(what), count) if what is not None and what.isdecimal() else 0


def shortened(
    task: Task, strategies: Sequence[Strategy], count: int, runs: Sequence[int]
) -> tuple[tuple[Strategy, ...], Task]:
    """The same strategies and task for a model whose runs of layers are this long."""
    ends = boundaries(task, strategies, count)
    shorter = {end: sum(runs[: at + 1]) for at, end in enumerate(ends)}
    frozen = _frozen(task, strategies, count)
    new_frozen = shorter.get(frozen, 0)
    made: list[Strategy] = []
    for strategy in strategies:
        if isinstance(strategy, Freezing) and isinstance(strategy.what, int):
            made.append(dataclasses.replace(strategy, what=new_frozen))
        elif isinstance(strategy, Checkpointing | ActivationOffload) and strategy.layers:
            layers = shorter.get(frozen + strategy.layers, sum(runs)) - new_frozen
            made.append(dataclasses.replace(strategy, layers=layers))
        else:
            made.append(strategy)
    if task.freeze is not None and task.freeze.isdecimal():
        task = dataclasses.replace(task, freeze=str(new_frozen))
    return tuple(made), task


def compose(base: Segments, deeper: Sequence[tuple[Segments, int]]) -> Segments | None:
    """The base with what each deeper trace has more, so many times; None if they differ oddly."""
    parts: dict[str, list[Mark]] = {}
    grown: list[set[tuple[Kind, Kind]]] = [set() for _ in deeper]
    for name, marks in base.parts.items():
        made = list(marks)
        inserts: list[tuple[int, int, list[Mark], int]] = []
        for number, (other, repeats) in enumerate(deeper):
            if name not in other.parts:
                return None
            found = difference(marks, other.parts[name], grown[number])
            if found is None:
                return None
            for place, more in found.grown.items():
                at = place - sum(size for start, size in found.inserts if start < place)
                made[at] = _larger(made[at], repeats * more)
            shift = 0
            for start, size in found.inserts:
                stretch = other.parts[name][start : start + size]
                # Backward comes to the upper runs first.
                order = -number if slope_of(other.parts[name], start, size)[0] < 0 else number
                inserts.append((start - shift, order, stretch, repeats))
                shift += size
        parts[name] = sorted_deaths(_inserted(made, inserts))
    return Segments(parts)


def _larger(mark: Mark, more: int) -> Mark:
    nbytes, component, module = mark.kind
    return mark._replace(kind=(nbytes + more, component, module))


def _inserted(marks: list[Mark], inserts: list[tuple[int, int, list[Mark], int]]) -> list[Mark]:
    out: list[Mark] = []
    at = 0
    for place, _, stretch, repeats in sorted(inserts, key=lambda one: one[:2]):
        out += marks[at:place]
        out += stretch * repeats
        at = place
    return out + marks[at:]


@dataclass(frozen=True)
class _Unwatched:
    """A trace that follows nothing."""

    device: TracedDevice

    def hosted(self, tensor: Tensor) -> None:
        """Nobody counts."""

    def on_host(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def resized(self, tensor: Tensor) -> None:
        """Nobody counts."""

    def alike(self, key: Hashable, run: Callable[[], None], times: int) -> None:
        """No step is run."""


@dataclass(frozen=True)
class StepTrace:
    """A traced step: of a model as deep as it was built, or of one composed of those."""

    segments: Segments
    """Births and deaths, by part of the run."""
    part_counts: dict[str, StepCounts]
    """What each part does once, as it is launched."""
    parameters: int
    trainable_parameters: int
    gradient_bytes: int
    """Of gradients in the types of their weights."""
    host_bytes: int
    """What strategies hold in the computer's own memory."""
    rows: TracedRows
    """The micro-batch that was traced."""
    biases: bool
    """Whether a linear layer has one: such layers run through another library."""
    guessed: frozenset[str] = frozenset()
    """Operators whose arithmetic could not be counted."""
    traced_layers: tuple[int, ...] = ()

    @property
    def counts(self) -> StepCounts:
        """What one optimizer step of this micro-batch does: all its parts and the update."""
        parts, none = self.part_counts, StepCounts()
        first = parts["micro"]
        more = parts.get("micro_more", first)
        if "static" in parts:
            first, more = first.as_graphs(), more.as_graphs()
        update = parts.get("update", parts.get("update_first", none))
        return first + more * (self.rows.parts - 1) + update + parts.get("static", none)

    def with_more(
        self, deeper: Sequence[StepTrace], repeats: Sequence[int], segments: Segments
    ) -> StepTrace:
        """What is added up grows by what each deeper one has more, so many times."""

        def grown(of: Callable[[StepTrace], Any]) -> Any:
            pairs = zip(deeper, repeats, strict=True)
            return sum(((of(one) - of(self)) * times for one, times in pairs), of(self))

        return dataclasses.replace(
            self,
            segments=segments,
            part_counts={
                name: grown(lambda one, part=name: one.part_counts[part])  # type: ignore[misc]
                for name in self.part_counts
            },
            parameters=grown(lambda one: one.parameters),
            trainable_parameters=grown(lambda one: one.trainable_parameters),
            gradient_bytes=grown(lambda one: one.gradient_bytes),
            host_bytes=grown(lambda one: one.host_bytes),
            guessed=self.guessed.union(*(one.guessed for one in deeper)),
            traced_layers=(*self.traced_layers, *(one.traced_layers[0] for one in deeper)),
        )


class Tracer:
    """Traces steps of one task, and caches the shallow traces they are composed of."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._config = full_config(task)
        self._known: OrderedDict[Any, StepTrace] = OrderedDict()
        model = build_model(task, self._config)
        inner = model.get_base_model() if task.lora is not None else model
        self._layers = layers_of(inner)
        text = self._config.get_text_config()
        self.trainable_sizes = [p.numel() for p in model.parameters() if p.requires_grad]
        self._is_cut = getattr(text, "num_hidden_layers", None) == len(self._layers)

    def step(
        self,
        strategies: tuple[Strategy, ...],
        limits: MicroBatching,
        *,
        tokens: int | None = None,
        whole: bool = False,
        layers: int | None = None,
    ) -> StepTrace:
        """At full depth, from shallow traces where they suffice.

        `tokens` are those of one micro-batch on the device; by default the most that the limits and
        the data allow. `whole` is a batch of so many tokens that is not cut, whatever becomes of
        larger ones. `layers` traces a model of only so many, as it is.
        """
        repads = find(strategies, Packing) is not None and not self.has_flash(strategies)
        rows = rows_for(self.task, strategies, limits, repads=repads, tokens=tokens, whole=whole)
        if layers is not None:
            return self._trace(self.task, strategies, limits, layers, rows)
        found = self._from_shallow(strategies, limits, rows) if self._is_cut else None
        return found or self._trace(self.task, strategies, limits, None, rows)

    def average(
        self, strategies: tuple[Strategy, ...], limits: MicroBatching, rows: TracedRows
    ) -> StepTrace:
        """A step of these rows at full depth: what it does, not what it holds."""
        found = self._from_shallow(strategies, limits, rows) if self._is_cut else None
        return found or self._trace(self.task, strategies, limits, None, rows)

    def has_flash(self, strategies: Sequence[Strategy]) -> bool:
        """Whether packed texts go through a kernel that needs no padding."""
        card = self.task.card
        if card is None or card.capability < (8, 0):
            return False
        updates = find(strategies, OptimizerOffload)
        stored = find(strategies, LowBitAdamW) or (updates is not None and updates.dtype)
        return bool(stored) or autocast_dtype(self.task, strategies, cuda=True) is not None

    def _from_shallow(
        self, strategies: tuple[Strategy, ...], limits: MicroBatching, rows: TracedRows
    ) -> StepTrace | None:
        shallow = plan_runs(self.task, strategies, self._layers)
        if shallow is None:
            return None
        traces = []
        for runs in shallow.runs:
            short, task = shortened(self.task, strategies, len(self._layers), runs)
            traces.append(self._trace(task, short, limits, sum(runs), rows))
        base, deeper = traces[0], traces[1:]
        repeats = [number for number in shallow.repeats if number]
        if len(deeper) == 1:
            segments = deepen(base.segments, deeper[0].segments, repeats[0])
        else:
            pairs = [(one.segments, times) for one, times in zip(deeper, repeats, strict=True)]
            segments = compose(base.segments, pairs)
        return None if segments is None else base.with_more(deeper, repeats, segments)

    def _trace(
        self,
        task: Task,
        strategies: tuple[Strategy, ...],
        limits: MicroBatching,
        layers: int | None,
        rows: TracedRows,
    ) -> StepTrace:
        key = (strategies, limits, task.freeze, layers, rows)
        if key not in self._known:
            config = self._config if layers is None else with_layers(self._config, layers)
            model = build_model(task, config, layers)
            half = autocast_dtype(task, strategies, cuda=task.card is not None)
            run = TracedRun(task, strategies, limits, model, rows, half)
            depth = len(self._layers) if layers is None else layers
            self._known[key] = _traced(run, task, half, rows, depth)
            if len(self._known) > _MOST_TRACES:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def objections(self, strategies: Sequence[Strategy]) -> dict[str, str]:
        """Why each of these cannot be used here; empty where all can.

        They are applied in turn to one model of a few layers, without those that cannot be.
        """
        counted = any(getattr(one, "layers", None) for one in strategies)
        counted = counted or str(self.task.freeze).isdecimal() or not self._is_cut
        layers = None if counted else min(_ENOUGH_LAYERS, len(self._layers))
        config = self._config if layers is None else with_layers(self._config, layers)
        setup = make_setup(self.task, build_model(self.task, config, layers))
        found: dict[str, str] = {}

        def apply(one: Strategy) -> None:
            try:
                apply_one(one, setup)
            except (ConfigError, ModelError) as error:
                found[one.name] = error.reason

        early: list[Strategy] = [one for one in strategies if isinstance(one, Freezing | Lora)]
        for one in early:
            apply(one)
        with fake_trace(), traced.tracing(_Unwatched(device_to_trace(self.task.card))):
            materialize(setup.model, empty_like)
            for one in strategies:
                if one not in early:
                    apply(one)
        return found


def _traced(
    run: TracedRun, task: Task, half: torch.dtype | None, rows: TracedRows, depth: int
) -> StepTrace:
    card = task.card
    kernels = None
    if card is not None:
        kernels = CudaKernels(card.capability, card.multiprocessors, autocast=half is not None)
    attended = sum(length**2 for length in rows.lengths) / rows.tokens
    with no_collection():
        with (
            fake_trace(kernels) as tracker,
            Counting(attended_tokens=attended, tf32=bool(task.args.tf32)) as counter,
            failing_as_a_trace(tracker, run.setup.model),
        ):
            events = run.run(tracker, counter)
        gc.collect(0)
    model = run.setup.model
    learning = [p for p in model.parameters() if p.requires_grad]
    return StepTrace(
        segments=cut(events, oldest_first=_OLDEST_FIRST),
        part_counts=run.counts,
        parameters=sum(p.numel() for p in model.parameters()),
        trainable_parameters=sum(p.numel() for p in learning),
        gradient_bytes=sum(p.nbytes for p in learning),
        host_bytes=tracker.host_peak_bytes,
        rows=rows,
        biases=any(map(has_bias, model.modules())),
        guessed=frozenset(counter.guessed),
        traced_layers=(depth,),
    )
