"""What strategies at one limit of the micro-batches cost: bytes by phase, seconds, host bytes.

Every price is a trace. The largest batches the shuffle can draw decide the memory; a micro-batch of
average size decides the time, and is traced as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memfit.engine.micro_batches import MicroBatching
from memfit.memory.components import MemoryPeak
from memfit.memory.tracing.counting import StepCounts
from memfit.planner.memory_price import Priced, phase_peaks
from memfit.planner.rank_cost import RankCost, gathered_bytes, nccl_bytes, rank_cost
from memfit.planner.step_time import step_seconds
from memfit.planner.trace import StepTrace, Tracer
from memfit.planner.traced_setup import TracedRows, cut_lengths, graph_count, rows_at_once
from memfit.strategies import (
    Checkpointing,
    CudaGraphs,
    Fidelity,
    FrozenFeatures,
    FullySharded,
    LowBitAdamW,
    OptimizerOffload,
    Packing,
    SmallWorkspace,
    StateOffload,
    Strategy,
    copies_beside,
    find,
)

if TYPE_CHECKING:
    from memfit.planner.task import Cutting, Task

Strategies = tuple[Strategy, ...]

BY_LAUNCH = (
    "launches", "scripted", "products", "recomputations", "graph_launches", "reached_bytes",
)  # fmt: skip
"""What a micro-batch takes whatever its size."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """What strategies and micro-batches cost on one device."""

    strategies: Strategies
    micro_batching: MicroBatching
    peak: MemoryPeak
    """The highest moment of all phases."""
    phases: Mapping[str, MemoryPeak] = field(default_factory=dict)
    """By name: training, evaluation, saving, resuming."""
    counts: StepCounts
    """What an average step does."""
    step_seconds: float
    """An average step, by the time model."""
    host_bytes: int = 0
    """What the strategies hold in the computer's own memory, above the process itself."""
    trainable_parameters: int = 0

    @property
    def device_bytes(self) -> int:
        """What must fit into the budget."""
        return self.peak.device_bytes

    @property
    def fidelity(self) -> Fidelity:
        """That of the least faithful strategy."""
        return fidelity_of(self.strategies)


def fidelity_of(strategies: Iterable[Strategy]) -> Fidelity:
    """What these strategies together do to the result."""
    return max((one.fidelity for one in strategies), default=Fidelity.EXACT)


@dataclass(frozen=True)
class Memory:
    """The peak of the largest batches, and the trace it comes from."""

    peak: MemoryPeak
    phases: Mapping[str, MemoryPeak]
    trace: StepTrace


class Pricer:
    """Prices for one task; None of them depends on the budget."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.tracer = Tracer(task)
        self.guessed: set[str] = set()
        """Operators whose time is a guess, since nobody knows how to count what they do."""
        self._memory: dict[tuple[Strategies, MicroBatching], Memory] = {}
        self._counts: dict[tuple[Strategies, MicroBatching], StepCounts] = {}
        self.layer_counts: dict[Hashable, tuple[StepCounts, StepCounts]] = {}
        """What recomputing or offloading layers takes more, by what layers are made of."""

    @property
    def traced(self) -> int:
        """How many candidates were traced so far."""
        return len(self._memory)

    def price(self, strategies: Strategies, limits: MicroBatching) -> Price:
        """Traces the largest batches and an average one."""
        memory = self.memory(strategies, limits)
        counts = self.counts(strategies, limits)
        return Price(
            strategies=strategies,
            micro_batching=limits,
            peak=memory.peak,
            phases=memory.phases,
            counts=counts,
            step_seconds=self.seconds(strategies, limits, counts),
            host_bytes=memory.trace.host_bytes,
            trainable_parameters=memory.trace.trainable_parameters,
        )

    # ---- memory ----

    def memory(
        self, strategies: Strategies, limits: MicroBatching, budget_bytes: int | None = None
    ) -> Memory:
        """The highest peak of all phases, over the largest batches there can be.

        Of several large batches, none is traced after one that exceeds `budget_bytes`.
        """
        key = (strategies, limits)
        if key not in self._memory:
            found = []
            for tokens, whole in self._largest(strategies, limits):
                trace = self.tracer.step(strategies, limits, tokens=tokens, whole=whole)
                phases = phase_peaks(self.priced(trace, strategies, limits), self.task.card)
                found.append(Memory(_highest(phases.values()), phases, trace))
                if budget_bytes is not None and found[-1].peak.device_bytes > budget_bytes:
                    return found[-1]
            self._memory[key] = max(found, key=lambda one: one.peak.device_bytes)
        return self._memory[key]

    def _largest(
        self, strategies: Strategies, limits: MicroBatching
    ) -> list[tuple[int | None, bool]]:
        """Tokens of the largest batches under a limit: of one that is not cut, and of one that is.

        The gradient of one part is there while the next is computed, but parts are smaller.
        """
        packed = find(strategies, Packing) is not None
        cutting = self.task.batches(strategies).cut(limits, packed=packed)
        if packed and limits.max_tokens is not None and not self.tracer.has_flash(strategies):
            # Attention is padded again: many short rows beside a long one, in a batch that is not
            # cut, may need more than the few long rows of a part, whatever their sums.
            lengths = cut_lengths(self.task, strategies)
            smallest = sum(lengths[-self.task.rank_rows :])
            whole = [(cutting.worst_tokens, True)] if smallest <= limits.max_tokens else []
            return [*whole, (None, False)]
        if cutting.worst_part_tokens == cutting.worst_tokens:
            return [(None, False)]
        return [(cutting.worst_tokens, True), (cutting.worst_part_tokens, False)]

    def priced(self, trace: StepTrace, strategies: Strategies, limits: MicroBatching) -> Priced:
        """What decides the memory of a run of this step."""
        task, graphs = self.task, find(strategies, CudaGraphs)
        captured = graphs is not None and "static" in trace.segments.parts
        recomputes = find(strategies, Checkpointing) is not None
        return Priced(
            segments=trace.segments,
            biases=trace.biases,
            recompute=recomputes or bool(task.args.gradient_checkpointing),
            small_workspace=find(strategies, SmallWorkspace) is not None,
            streams=copies_beside(strategies),
            graphs=graph_count(task, strategies, limits, graphs.bucket_tokens)
            if captured and graphs is not None
            else 0,
            graphed_kernels=trace.counts.replayed / trace.rows.parts,
            nccl_bytes=nccl_bytes(task),
            ranks=task.ranks,
            whole_bytes=gathered_bytes(self.tracer.trainable_sizes, task.depth)
            if find(strategies, FullySharded)
            else 0,
        )

    # ---- time ----

    def seconds(self, strategies: Strategies, limits: MicroBatching, counts: StepCounts) -> float:
        """A step that does this, with what it waits for other ranks."""
        parses = find(strategies, SmallWorkspace) is not None
        alone = step_seconds(counts, self.task.card, parses=parses)
        if self.task.ranks == 1:
            return alone
        return alone + self.exchange(strategies, limits, alone).waited_seconds

    def exchange(self, strategies: Strategies, limits: MicroBatching, alone: float) -> RankCost:
        """What the other ranks take of one rank's memory and time."""
        return rank_cost(
            self.task,
            self.memory(strategies, limits).trace.gradient_bytes,
            alone,
            micro_batches=self.cutting(strategies, limits).micro_batches,
            divided=find(strategies, FullySharded) is not None,
        )

    def cutting(self, strategies: Strategies, limits: MicroBatching) -> Cutting:
        """How effective batches are cut into micro-batches under these limits."""
        packed = find(strategies, Packing) is not None
        return self.task.batches(strategies).cut(limits, packed=packed)

    def counts(self, strategies: Strategies, limits: MicroBatching) -> StepCounts:
        """What an average step does, by a trace of an average micro-batch."""
        key = (strategies, limits)
        if key not in self._counts:
            trace = self.average(strategies, limits)
            cut = self.cutting(strategies, limits)
            self._counts[key] = self._average_step(strategies, cut, trace)
        return self._counts[key]

    def average(
        self, strategies: Strategies, limits: MicroBatching, share: float = 1.0
    ) -> StepTrace:
        """A trace of this share of an average micro-batch.

        Its rows are of one length; their tokens, and the pairs of them that attend to each other,
        are as many as in the batches that are drawn.
        """
        cut = self.cutting(strategies, limits)
        length = max(round(cut.pairs / cut.tokens), 1)
        tokens = share * device_tokens(strategies, cut) / cut.micro_batches
        if (graphs := find(strategies, CudaGraphs)) is not None:
            tokens = max(round(tokens / graphs.bucket_tokens), 1) * graphs.bucket_tokens
        rows = max(round(tokens / length), 1)
        lengths = [length] * rows
        if find(strategies, Packing) is not None:  # in even shares: some kernels pad to the longest
            each, more = divmod(max(round(tokens), rows), rows)
            lengths = [each + 1] * more + [each] * (rows - more)
        rows_traced = TracedRows(tuple(lengths), 1 if cut.micro_batches == 1.0 else 2)
        trace = self.tracer.average(strategies, limits, rows_traced)
        self.guessed |= trace.guessed
        return trace

    def _average_step(self, strategies: Strategies, cut: Cutting, trace: StepTrace) -> StepCounts:
        parts, none = trace.part_counts, StepCounts()
        tokens = device_tokens(strategies, cut) / cut.micro_batches
        share = tokens / trace.rows.tokens
        first = _scaled(parts["micro"], share)
        more = _scaled(parts.get("micro_more", parts["micro"]), share)
        update = parts.get("update", parts.get("update_first", none))
        step = first + more * (cut.micro_batches - 1)
        if "static" in parts:
            step, update = as_replayed(step, update, cut, self.task.ranks)
        return step + update + self._features(strategies, trace)

    def _features(self, strategies: Strategies, trace: StepTrace) -> StepCounts:
        """The share of a step in the one pass of all texts through a frozen encoder."""
        features = find(strategies, FrozenFeatures)
        if features is None:
            return StepCounts()
        longest = max(trace.rows.lengths)
        rows = rows_at_once(features.max_tokens, longest, len(self.task.lengths))
        epochs = max(float(self.task.args.num_train_epochs), 1.0)
        each = trace.part_counts["features"] * (1 / (rows * longest))
        return each * (self.task.mean_tokens / epochs)


def device_tokens(strategies: Strategies, cut: Cutting) -> float:
    """Tokens of an average step on the device; graphs fill up to a bucket, by half on average."""
    graphs = find(strategies, CudaGraphs)
    filled = 0.0 if graphs is None else cut.micro_batches * graphs.bucket_tokens / 2
    return cut.tokens + filled


def as_replayed(
    step: StepCounts, update: StepCounts, cut: Cutting, ranks: int
) -> tuple[StepCounts, StepCounts]:
    """Micro-batches and the update as graphs run them.

    A batch that is not cut ends its step in the graph, too; ranks do not meet in one.
    """
    launched = min(cut.micro_batches - 1, 1.0) if ranks == 1 else 1.0
    update = update * launched + update.as_graphs() * (1 - launched)
    return step.as_graphs() + StepCounts(replays=cut.micro_batches), update


def certain_counts(strategies: Strategies, trainable_parameters: int) -> StepCounts:
    """What these strategies add to any step, known without a trace: the least is counted."""
    stored, hosted = find(strategies, LowBitAdamW), find(strategies, StateOffload)
    counts = StepCounts()
    if stored is not None and hosted is not None:
        # The update reads and writes state, and reads a gradient that was added to once.
        state_bytes = 3 if stored.master_bits == 24 else 2
        each_bytes = 2 * state_bytes + (3 if hosted.gradients else 0)
        counts += StepCounts(reached_bytes=each_bytes * trainable_parameters)
    if find(strategies, OptimizerOffload) is not None:
        counts += StepCounts(host_parameters=trainable_parameters)
    return counts


def _scaled(counts: StepCounts, share: float) -> StepCounts:
    """The same micro-batch with other many tokens, of as many kernels."""
    if share == 1.0:
        return counts
    same = {name: getattr(counts, name) for name in BY_LAUNCH}
    return dataclasses.replace(counts * share, **same)


def _highest(phases: Iterable[MemoryPeak]) -> MemoryPeak:
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


HOST_RESERVE_BYTES = 10**9
"""Left for the rest of the process and its neighbours."""


def fits_host(host_bytes: int, free_bytes: int) -> bool:
    """Whether the computer has the memory that a plan puts there."""
    return host_bytes == 0 or host_bytes + HOST_RESERVE_BYTES <= free_bytes


def has_short_masters(strategies: Strategies) -> bool:
    """Whether masters have 16 bits: preferred only where a step is much faster."""
    stored = find(strategies, LowBitAdamW)
    return stored is not None and stored.master_bits == 16
