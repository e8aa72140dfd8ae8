"""What a candidate needs: memfit's own step traced for a card that need not be here, or a CPU.

Frozen layers come first, then those that are recomputed or whose activations leave the device,
then the others. Each such run is traced short, and once more with one layer more; what that
layer adds is put in as often as the run is long. Memory is exact where a run's layers are alike.

    trace_step(workload, candidate, card)      the step's parts at full depth, and what it does
    price_memory(workload, candidate, card)    the peak of training, evaluation, saving, resuming
    unavailable_reason(candidate, ...)         why a candidate cannot run there, in a sentence

Shallow traces are kept for as long as their task is: candidates that differ only in how many
layers are recomputed, offloaded or frozen share them.
"""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memfit.errors import ConfigError, ModelError
from memfit.memory.cards import DeviceProfile
from memfit.memory.components import MemoryPeak
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
from memfit.planner.candidates import Candidate
from memfit.planner.pricing.memory_price import Priced, price
from memfit.planner.pricing.traced_run import Extent, TracedRun
from memfit.planner.pricing.traced_setup import (
    TracedRows,
    apply_one,
    autocast_dtype,
    build_model,
    cut_lengths,
    device_to_trace,
    full_config,
    graph_count,
    make_setup,
    rows_for,
)
from memfit.planner.ranks import gathered_bytes, nccl_bytes
from memfit.planner.workload import Workload, batches_of
from memfit.strategies import Setup, Strategy, TracePart, ordered

_SHORT_OFFLOADED = 4
"""What lives on the host: the layer at work, its neighbours, and one that is away."""


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


def plan_runs(workload: Workload, candidate: Candidate, layers: Sequence[Any]) -> Shallow | None:
    """Which shallow models to trace; None where the full one costs no more, or layers differ."""
    count = len(layers)
    ends = boundaries(workload, candidate, count)
    if len(ends) == 1:
        least = _SHORT_OFFLOADED if _is_away(candidate) else 2
        depths = plan_depths(list(layers), least=least)
        if depths is None:
            return None
        period = depths.deeper - depths.shallow
        return Shallow((depths.shallow,), (depths.repeats,), period)
    lengths = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    single = plan_depths(list(layers))
    if single is None or single.deeper - single.shallow != 1 or candidate.effects.weights_on_host:
        return None
    # The last layer is unlike those before it where a head reads one token of each text.
    base = (*(1 for _ in lengths[:-1]), min(lengths[-1], 2))
    repeats = tuple(length - short for length, short in zip(lengths, base, strict=True))
    shallow = Shallow(base, repeats)
    traced = sum(map(sum, shallow.runs))
    return shallow if traced < count else None


def boundaries(workload: Workload, candidate: Candidate, count: int) -> list[int]:
    """Where a run of like layers ends, in layers from below; the last is the full depth."""
    frozen = _frozen(workload, candidate, count)
    found = {frozen, count}
    for strategy in candidate.strategies:
        if (layers := strategy.effects.layers) is not None:
            found.add(frozen + layers)
    return sorted(end for end in found if 0 < end <= count)


def _frozen(workload: Workload, candidate: Candidate, count: int) -> int:
    what = workload.freeze or ""
    theirs = int(what) if what.isdecimal() else 0
    return min(candidate.effects.frozen_layers or theirs, count)


def _is_away(candidate: Candidate) -> bool:
    """Whether weights or activations of layers leave the device."""
    if candidate.effects.weights_on_host:
        return True
    kept = (one.effects for one in candidate.strategies if one.traced is TracePart.ACTIVATIONS)
    return any(effects.copies for effects in kept)


def shortened(
    workload: Workload, candidate: Candidate, count: int, runs: Sequence[int]
) -> tuple[Candidate, Workload]:
    """The same way of training a model whose runs of layers are this long."""
    ends = boundaries(workload, candidate, count)
    shorter = {end: sum(runs[: at + 1]) for at, end in enumerate(ends)}
    frozen = _frozen(workload, candidate, count)
    new_frozen = shorter.get(frozen, 0)
    strategies = []
    for strategy in candidate.strategies:
        effects = strategy.effects
        if effects.frozen_layers:
            strategies.append(strategy.for_layers(new_frozen))
        elif effects.layers is not None:
            layers = shorter.get(frozen + effects.layers, sum(runs)) - new_frozen
            strategies.append(strategy.for_layers(layers))
        else:
            strategies.append(strategy)
    if workload.freeze is not None and workload.freeze.isdecimal():
        workload = dataclasses.replace(workload, freeze=str(new_frozen))
    return Candidate(tuple(strategies), candidate.micro_batching), workload


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


def first_objection(
    workload: Workload, card: DeviceProfile | None, config: Any, strategies: Sequence[Strategy]
) -> str:
    """The first sentence against one of them, each asked after those before it were applied."""
    setup = make_setup(workload, build_model(workload, config), card)
    early = [one for one in strategies if one.effects.chooses_weights]
    if reason := _objection(early, setup):
        return reason
    with fake_trace(), traced.tracing(_Unwatched(device_to_trace(card))):
        materialize(setup.model, empty_like)
        return _objection([one for one in strategies if one not in early], setup)


def _objection(strategies: Sequence[Strategy], setup: Setup) -> str:
    for strategy in strategies:
        try:
            apply_one(strategy, setup)
        except (ConfigError, ModelError) as error:
            return error.reason
    return ""


_ENOUGH_LAYERS = 4
"""More than one period of the models whose layers alternate."""

_KEPT_TASKS = 4

_KEPT_TRACES = 512

_OLDEST_FIRST = ("update_first", "clear", "update")


@dataclass(frozen=True)
class Sizes:
    """How many parameters of each size there are."""

    counts: Mapping[int, int]

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return sum(size * count for size, count in self.counts.items())

    def each(self) -> Iterator[int]:
        """Every parameter's size, the largest first."""
        for size in sorted(self.counts, reverse=True):
            yield from (size,) * self.counts[size]

    def __add__(self, other: Sizes) -> Sizes:
        names = {**self.counts, **other.counts}
        return Sizes({n: self.counts.get(n, 0) + other.counts.get(n, 0) for n in names})

    def __sub__(self, other: Sizes) -> Sizes:
        return self + other * -1

    def __mul__(self, times: int) -> Sizes:
        return Sizes({size: times * count for size, count in self.counts.items()})


@dataclass(frozen=True)
class StepTrace:
    """A traced step at the depth asked for."""

    segments: Segments
    """Births and deaths, by part of the run."""
    counts: StepCounts
    """What one optimizer step does: all its micro-batches and the update."""
    part_counts: dict[str, StepCounts]
    """What each part does once, as it is launched."""
    parameters: int
    learning: Sizes
    """The parameters that learn."""
    host_bytes: int
    """What strategies keep in the computer's own memory."""
    rows: TracedRows
    """The micro-batch that was traced."""
    biases: bool
    """Whether a linear layer has one: such layers run through another library."""
    traced_layers: tuple[int, ...]
    guessed: frozenset[str] = frozenset()
    """Operators whose arithmetic could not be counted."""

    @property
    def trainable_parameters(self) -> int:
        """Elements of the parameters that learn."""
        return self.learning.numel


def trace_step(
    workload: Workload,
    candidate: Candidate,
    card: DeviceProfile | None,
    *,
    tokens: int | None = None,
    layers: int | None = None,
    whole: bool = False,
    extent: Extent = Extent.EVALUATION,
) -> StepTrace:
    """The candidate's step on a CUDA card, or on a CPU (None).

    `tokens` are those of one micro-batch on the device; by default the most the candidate's
    micro-batching and the data allow. `layers` traces a model of only so many, as it is. `whole`
    is a batch of so many tokens that is not cut, whatever becomes of larger ones. `extent` is the
    last part that will be asked for.
    """
    return _tracer(workload, card).step(
        candidate, tokens=tokens, layers=layers, whole=whole, extent=extent
    )


def price_memory(
    workload: Workload,
    candidate: Candidate,
    card: DeviceProfile | None,
    *,
    tokens: int | None = None,
    budget_bytes: int | None = None,
) -> tuple[MemoryPeak, dict[str, MemoryPeak], StepTrace]:
    """The highest peak of all phases, each phase's own, and the trace they come from.

    Of several large batches, none is traced after one that exceeds `budget_bytes`.
    """
    sized = _largest(workload, candidate, card) if tokens is None else [(tokens, False)]
    found = []
    for size, whole in sized:
        trace = trace_step(workload, candidate, card, tokens=size, whole=whole)
        phases = price(priced(trace, candidate, workload, card), card)
        found.append((highest(phases.values()), phases, trace))
        if budget_bytes is not None and found[-1][0].device_bytes > budget_bytes:
            break
    return max(found, key=lambda one: one[0].device_bytes)


def _largest(
    workload: Workload, candidate: Candidate, card: DeviceProfile | None
) -> list[tuple[int | None, bool]]:
    """Tokens of the largest batches under a limit: of one that is not cut, and of one that is.

    The gradient of one part is there while the next is computed, but parts are smaller.
    """
    packed = candidate.effects.packs
    limits = candidate.micro_batching
    cutting = batches_of(workload, candidate.strategies).cut(limits, packed=packed)
    if packed and limits.max_tokens is not None and not _has_flash(candidate, workload, card):
        # Attention is padded again: many short rows beside a long one, in a batch that is not cut,
        # may need more than the few long rows of a part, whatever their sums.
        lengths = cut_lengths(workload, candidate)
        smallest = sum(lengths[-workload.rank_rows :])
        whole = [(cutting.worst_tokens, True)] if smallest <= limits.max_tokens else []
        return [*whole, (None, False)]
    if cutting.worst_part_tokens == cutting.worst_tokens:
        return [(None, False)]
    return [(cutting.worst_tokens, True), (cutting.worst_part_tokens, False)]


def highest(phases: Iterable[MemoryPeak]) -> MemoryPeak:
    """The moment of the highest allocation, with what all phases together make the card hold.

    An evaluation beside captured graphs allocates less than a step, and yet reserves more.
    """
    peaks = list(phases)
    moment = max(peaks, key=lambda peak: peak.allocated_bytes)
    return dataclasses.replace(
        moment,
        reserved_bytes=max(peak.reserved_bytes for peak in peaks),
        device_bytes=max(peak.device_bytes for peak in peaks),
    )


def unavailable_reason(
    strategies: Strategy | Iterable[Strategy], workload: Workload, card: DeviceProfile | None
) -> str:
    """Why these cannot be used together for this task on this card; empty where they can.

    Each is asked after those that come before it were applied, to a model of a few layers.
    """
    chosen = [strategies] if isinstance(strategies, Strategy) else list(strategies)
    return _tracer(workload, card).reason(chosen)


def judged_layers(
    strategies: Sequence[Strategy], workload: Workload, card: DeviceProfile | None
) -> int:
    """Layers of the model that `unavailable_reason` applies these to."""
    return _tracer(workload, card).judged_layers(strategies)


def priced(
    trace: StepTrace, candidate: Candidate, workload: Workload, card: DeviceProfile | None
) -> Priced:
    """What decides the memory of a run of this step."""
    graphs = 0
    if "static" in trace.segments.parts:
        bucket_tokens, cuts_at = candidate.effects.graph_bucket_tokens, candidate.effects.cuts_at
        graphs = graph_count(workload, candidate.micro_batching, bucket_tokens, cuts_at)
    effects, depth = candidate.effects, workload.config.get_text_config().num_hidden_layers
    whole_bytes = gathered_bytes(trace.learning.each(), depth) if effects.divides_weights else 0
    return Priced(
        segments=trace.segments,
        parts=trace.rows.parts,
        biases=trace.biases,
        recompute=effects.recomputes or bool(workload.args.gradient_checkpointing),
        small_workspace=effects.small_workspaces,
        streams=effects.copies,
        graphs=graphs,
        graphed_kernels=trace.counts.replayed / trace.rows.parts,
        nccl_bytes=nccl_bytes(workload, card),
        ranks=workload.ranks,
        whole_bytes=whole_bytes,
    )


class _Tracer:
    """One task on one card, and the shallow traces made for it."""

    def __init__(self, workload: Workload, card: DeviceProfile | None) -> None:
        self.workload, self.card = workload, card
        self._config = full_config(workload)
        self._kept: OrderedDict[Any, _Traced] = OrderedDict()
        model = build_model(workload, self._config)
        inner = model.get_base_model() if workload.lora is not None else model
        self._layers = layers_of(inner)
        text = self._config.get_text_config()
        self._is_cut = getattr(text, "num_hidden_layers", None) == len(self._layers)

    def step(
        self,
        candidate: Candidate,
        *,
        tokens: int | None,
        layers: int | None = None,
        whole: bool = False,
        extent: Extent = Extent.EVALUATION,
    ) -> StepTrace:
        """At full depth, from shallow traces where they suffice."""
        count = len(self._layers)
        packed = candidate.effects.packs
        repads = packed and not _has_flash(candidate, self.workload, self.card)
        rows = rows_for(
            self.workload, candidate, packed=packed, repads=repads, tokens=tokens, whole=whole
        )
        if layers is not None and self._is_cut:
            found = self._trace(candidate, self.workload, layers, rows, extent=extent)
            return found.step(rows, (layers,))
        if self._is_cut:
            composed = self._from_shallow(candidate, count, rows)
            if composed is not None:
                return composed
        return self._trace(candidate, self.workload, None, rows).step(rows, (count,))

    def _from_shallow(self, candidate: Candidate, count: int, rows: TracedRows) -> StepTrace | None:
        shallow = plan_runs(self.workload, candidate, self._layers)
        if shallow is None:
            return None
        traces = []
        for runs in shallow.runs:
            short, workload = shortened(self.workload, candidate, count, runs)
            traces.append(self._trace(short, workload, sum(runs), rows))
        base, deeper = traces[0], traces[1:]
        repeats = [number for number in shallow.repeats if number]
        if len(deeper) == 1:
            segments = deepen(base.segments, deeper[0].segments, repeats[0])
        else:
            pairs = [(one.segments, times) for one, times in zip(deeper, repeats, strict=True)]
            segments = compose(base.segments, pairs)
        if segments is None:
            return None
        whole = base.with_more(deeper, repeats, segments)
        return whole.step(rows, tuple(sum(runs) for runs in shallow.runs))

    def _trace(
        self,
        candidate: Candidate,
        workload: Workload,
        layers: int | None,
        rows: TracedRows,
        *,
        extent: Extent = Extent.EVALUATION,
    ) -> _Traced:
        asked = (candidate.strategies, candidate.micro_batching, workload.freeze)
        key = (*asked, layers, rows, extent)
        if key not in self._kept:
            model = build_model(workload, self._config_of(layers), layers)
            half = autocast_dtype(workload, candidate, cuda=self.card is not None)
            run = TracedRun(
                workload,
                candidate,
                self.card,
                model,
                rows,
                half,
                extent=extent,
            )
            self._kept[key] = _trace(run, self.card, half, tf32=bool(workload.args.tf32))
            if len(self._kept) > _KEPT_TRACES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _config_of(self, layers: int | None) -> Any:
        return self._config if layers is None else with_layers(self._config, layers)

    def reason(self, strategies: Sequence[Strategy]) -> str:
        """The first objection of a strategy, or of the registry."""

        try:
            chosen = ordered(strategies)
        except ConfigError as error:
            return error.reason
        layers = self._enough_layers(chosen)
        return first_objection(self.workload, self.card, self._config_of(layers), chosen)

    def judged_layers(self, strategies: Sequence[Strategy]) -> int:
        """How many layers the model has that objections are raised to."""
        return self._enough_layers(strategies) or len(self._layers)

    def _enough_layers(self, strategies: Sequence[Strategy]) -> int | None:
        """How many have one of each kind; None is all, where somebody counts them."""
        counts = any(one.effects.layers or one.effects.frozen_layers for one in strategies)
        counts = counts or str(self.workload.freeze).isdecimal()
        if counts or not self._is_cut:
            return None
        return min(_ENOUGH_LAYERS, len(self._layers))


def _has_flash(candidate: Candidate, workload: Workload, card: DeviceProfile | None) -> bool:
    """Whether packed texts go through a kernel that needs no padding."""
    if card is None or card.capability < (8, 0):
        return False
    return (
        candidate.effects.stores is not None
        or autocast_dtype(workload, candidate, cuda=True) is not None
    )


@dataclass(frozen=True)
class _Traced:
    segments: Segments
    counts: StepCounts
    part_counts: dict[str, StepCounts]
    parameters: int
    learning: Sizes
    host_bytes: int
    biases: bool
    guessed: frozenset[str]

    def with_more(
        self, deeper: Sequence[_Traced], repeats: Sequence[int], segments: Segments
    ) -> _Traced:
        """What is added up grows by what each deeper one has more, so many times."""

        def grown(name: str) -> Any:
            mine = getattr(self, name)
            total = mine
            for one, times in zip(deeper, repeats, strict=True):
                total = total + (getattr(one, name) - mine) * times
            return total

        parts = {
            name: sum(
                ((one.part_counts[name] - own) * n for one, n in zip(deeper, repeats, strict=True)),
                own,
            )
            for name, own in self.part_counts.items()
        }
        return _Traced(
            segments,
            grown("counts"),
            parts,
            grown("parameters"),
            grown("learning"),
            grown("host_bytes"),
            self.biases,
            self.guessed.union(*(one.guessed for one in deeper)),
        )

    def step(self, rows: TracedRows, layers: tuple[int, ...]) -> StepTrace:
        """As others see it."""
        return StepTrace(
            segments=self.segments,
            counts=self.counts,
            part_counts=self.part_counts,
            parameters=self.parameters,
            learning=self.learning,
            host_bytes=self.host_bytes,
            rows=rows,
            biases=self.biases,
            traced_layers=layers,
            guessed=self.guessed,
        )


def _trace(
    run: TracedRun, card: DeviceProfile | None, half: torch.dtype | None, *, tf32: bool
) -> _Traced:
    kernels = None
    if card is not None:
        kernels = CudaKernels(card.capability, card.multiprocessors, autocast=half is not None)
    with no_collection():
        with (
            fake_trace(kernels) as tracker,
            Counting(tf32=tf32) as counter,
            failing_as_a_trace(tracker, run.setup.model),
        ):
            events = run.run(tracker, counter)
        gc.collect(0)
    trained = run.setup.model
    sizes = [(p.numel(), p.requires_grad) for p in trained.parameters()]
    return _Traced(
        segments=cut(events, oldest_first=_OLDEST_FIRST),
        counts=run.step_counts(),
        part_counts=run.counts,
        parameters=sum(size for size, _ in sizes),
        learning=Sizes(Counter(size for size, learns in sizes if learns)),
        host_bytes=tracker.host_peak_bytes,
        biases=any(map(has_bias, trained.modules())),
        guessed=frozenset(counter.guessed),
    )


_tracers: OrderedDict[tuple[int, DeviceProfile | None], _Tracer] = OrderedDict()


def _tracer(workload: Workload, card: DeviceProfile | None) -> _Tracer:
    """The one for this task; it holds the task, so its id is not another's meanwhile."""
    key = (id(workload), card)
    if key not in _tracers:
        _tracers[key] = _Tracer(workload, card)
        if len(_tracers) > _KEPT_TASKS:
            _tracers.popitem(last=False)
    _tracers.move_to_end(key)
    return _tracers[key]
