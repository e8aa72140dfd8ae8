"""Prices of candidates: composed from shallow traces in microseconds, or traced in full.

Memory is what lies there between two steps, and on top of it the highest moment of a
micro-batch; time is that of the average step. shallow_traces.py has what both are made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from memfit.engine.graph_cache import TokenBuckets
from memfit.engine.micro_batches import MicroBatching
from memfit.memory.cards import DeviceProfile
from memfit.memory.components import Component, MemoryPeak
from memfit.memory.cuda_context import handle_workspace_bytes, lt_workspace_bytes
from memfit.memory.phases import TRAINING
from memfit.memory.tracing.counting import StepCounts
from memfit.memory.tracing.depth import Segments, with_layers
from memfit.planner.candidates import Candidate, Price, Timed
from memfit.planner.pricing.layer_pieces import (
    Counted,
    Counts,
    accumulated,
    counts_of,
    gap_bytes,
    peak_of,
    replayed,
    walk,
    zero,
)
from memfit.planner.pricing.memory_price import Priced, context_bytes
from memfit.planner.pricing.shallow_traces import (
    Known,
    Policy,
    Split,
    Static,
    Strategies,
    TraceFamily,
    Tracing,
    Updating,
    split_up,
)
from memfit.planner.pricing.step_trace import price_memory
from memfit.planner.pricing.traced_setup import graph_count
from memfit.planner.ranks import RankCost, nccl_bytes, rank_cost
from memfit.planner.step_time import least_seconds, step_seconds
from memfit.planner.workload import Cutting, Workload, batches_of
from memfit.strategies import Combination, Tier, usual_update

_TENSORS_A_LAYER = 16

_FP32_BYTES = 4

_LAUNCHED_REST_BYTES = 40_000_000
"""What the launched step before the first graph leaves in segments that are partly in use."""

_GAP_PARTS = (1, 2, 4)
"""Into how many parts the whole batch is cut where the allocator is tried."""


class TracedPricer:
    """Prices for one task on one card; None is the CPU."""

    _tracing: Tracing
    _family: Callable[[Strategies, Strategies], TraceFamily]
    _updating: Callable[[Strategies, Strategies], Updating]

    def __init__(
        self,
        workload: Workload,
        card: DeviceProfile | None,
        *,
        like: TracedPricer | None = None,
        known: Known | None = None,
    ) -> None:
        self.workload, self.card = workload, card
        text: Any = workload.config.get_text_config()
        self._depth = int(text.num_hidden_layers) * int(getattr(text, "inner_group_num", 1))
        self._split = cache(lambda strategies: split_up(strategies, self._depth))
        # Layers are traced a few at a time: a model with more or fewer of the same has the same.
        self._tracing = Tracing(workload, card, known) if like is None else like._tracing
        self._family = cache(self._make_family) if like is None else like._family
        self._updating = cache(self._make_updating) if like is None else like._updating
        self._policy = cache(self._make_policy)
        self._static = cache(self._make_static)
        self._walk = cache(self._make_walk)
        self._peak = cache(self._find_peak)
        self._gap = cache(self._measure_gap)
        self._graphs = cache(self._count_graphs)
        self._outside = cache(self._make_outside)
        self._lines = cache(self._make_lines)
        self._problem = cache(self._find_problem)
        self._reference = cache(self._find_reference)
        self._evaluated = cache(self._count_evaluated)
        self._quick = cache(self._compose)
        self._full = cache(self._trace_whole)

    def of(self, workload: Workload) -> TracedPricer:
        """The same for another task; of one with the same layers nothing is traced again."""
        mine, other = (with_layers(one.config, 1) for one in (self.workload, workload))
        alike = dataclasses.replace(workload, config=self.workload.config) == self.workload
        alike = alike and mine.to_dict() == other.to_dict()
        return TracedPricer(workload, self.card, like=self if alike else None)

    def problem(self, strategies: Strategies) -> str:
        """Why these cannot be used for the task on the card; empty where they can."""
        return self._problem(strategies)

    @property
    def known(self) -> Known:
        """What was traced and judged so far; grows while candidates are priced."""
        return self._tracing.known

    @property
    def guessed(self) -> tuple[str, ...]:
        """Operators whose time is a guess, since nobody knows how to count what they do."""
        return tuple(sorted(self._tracing.guessed))

    def learning_parameters(self, candidate: Candidate) -> int:
        """How many parameters learn."""
        split = self._split(candidate.strategies)
        return round(self._updating(split.family, split.updating).learning(self._depth))

    def least_seconds(self, tier: Tier, prices: Sequence[Price | Timed]) -> float:
        """What a step of a slow tier takes at least, known from the prices of the others."""
        if not prices:
            return 0.0
        learning = self.learning_parameters(prices[0].candidate)
        least = least_seconds(tier, prices, learning, self.card)
        if tier is not Tier.WEIGHTS_DIVIDED:
            return least
        weights = _FP32_BYTES * learning
        cost = rank_cost(self.workload, self.card, weights, least, micro_batches=1.0, divided=True)
        return least + cost.waited_seconds

    def full(self, candidate: Candidate, budget_bytes: int | None = None) -> Price:
        """The whole step traced; its seconds are those of the quick price.

        A price above `budget_bytes` may be that of one large batch, and not of the largest.
        """
        return self._full(candidate, budget_bytes)

    def _trace_whole(self, candidate: Candidate, budget_bytes: int | None) -> Price:
        peak, phases, trace = price_memory(
            self.workload, candidate, self.card, budget_bytes=budget_bytes
        )
        quick = self.quick(candidate)
        return dataclasses.replace(
            quick, peak=peak, phases=phases, host_bytes=trace.host_bytes, traced=True
        )

    def timed(self, candidate: Candidate) -> Timed:
        """The seconds of its quick price alone, which need fewer traces and no allocator."""
        split = self._split(candidate.strategies)
        cut = self._cut(candidate, split)
        return Timed(candidate, self._seconds(split, cut, self._counts(split, cut)))

    def exchange(self, candidate: Candidate) -> RankCost:
        """What the other ranks take of this one's memory and time."""
        split = self._split(candidate.strategies)
        cut = self._cut(candidate, split)
        return self._exchange(split, cut, self._seconds_alone(split, self._counts(split, cut)))

    def quick(self, candidate: Candidate) -> Price:
        """Composed from traced layers."""
        return self._quick(candidate)

    def _compose(self, candidate: Candidate) -> Price:
        split = self._split(candidate.strategies)
        cut = self._cut(candidate, split)
        counts = self._counts(split, cut)
        peak = self._memory(candidate, split, cut, counts)
        return Price(
            candidate=candidate,
            peak=peak,
            phases={TRAINING: peak},
            counts=counts,
            step_seconds=self._seconds(split, cut, counts),
            host_bytes=self._host_bytes(split, cut),
        )

    # ------------------------------------------------------------------------ the parts

    def _make_family(self, family: Strategies, reference: Strategies) -> TraceFamily:
        rest = tuple(one for one in family if not one.effects.chooses_weights)
        if len(rest) == len(family) or Combination(family).effects.feature_tokens:
            return TraceFamily(self._tracing, family, reference)
        pattern = self._family(rest, self._usual_reference(reference))
        return TraceFamily(self._tracing, family, reference, pattern)

    def _family_of(self, split: Split) -> TraceFamily:
        return self._family(split.family, self._reference(split.family, split.updating))

    def _find_reference(self, family: Strategies, updating: Strategies) -> Strategies:
        """The way of updating a family's layers are traced with."""
        effects = Combination(updating).effects
        chooses = Combination(family).effects.chooses_weights
        if effects.weights_on_host or (effects.stores and chooses):
            return updating
        return self._usual_reference(updating)

    def _usual_reference(self, updating: Strategies) -> Strategies:
        """Gradients in eight bits, where weights are of few; what is stored in full as it is."""
        dtype = Combination(updating).effects.stores
        if dtype is None:
            return ()
        low_bit = usual_update(dtype)
        return updating if self.problem(low_bit) else low_bit

    def _make_updating(self, family: Strategies, updating: Strategies) -> Updating:
        traced = self._family(family, self._reference(family, updating))
        return Updating(self._tracing, traced, updating)

    def _make_policy(self, split_family: TraceFamily, policy: Strategies) -> Policy:
        return split_family.policy(policy, self._depth)

    def _make_static(self, split: Split) -> Static:
        used = self._updating(split.family, split.updating)
        static = used.static(self._depth)
        # Without corrections: a byte a parameter less. Their time is the same as measured
        # (benchmarks/results/bert_large_h200.json): what is not read is drawn at random.
        elsewhere = split.hosted_bytes + split.short_masters
        parts = dict(static.parts)
        if elsewhere:
            parts[Component.OPTIMIZER] -= elsewhere * used.learning(self._depth)
        if split.gathers:
            ranks, layer = self.workload.ranks, parts[Component.WEIGHTS] / self._depth
            parts = {name: size / ranks for name, size in parts.items()}
            parts[Component.WEIGHTS] += 4 * layer
        return Static(parts)

    # --------------------------------------------------------------------------- memory

    def _memory(
        self, candidate: Candidate, split: Split, cut: Cutting, counts: StepCounts
    ) -> MemoryPeak:
        static = self._static(split)
        adds_up = split.keeps and cut.worst_micro_batches > 1
        tokens = self._bucket(split, cut.worst_tokens)
        family = self._family_of(split)
        peak = partial(self._peak, family, split.policy, split.count)
        high = peak(tokens, split.keeps, False)
        if adds_up:
            part = self._bucket(split, cut.worst_part_tokens)
            parts_high = peak(part, split.keeps, True)
            adds_up = parts_high >= high  # or a batch that is not cut is the higher one
            high, tokens = (parts_high, part) if adds_up else (high, tokens)
        kernels = counts.replayed / max(cut.micro_batches, 1.0)
        workspace, context = self._outside(split, family, candidate.micro_batching, round(kernels))
        updating = self._updating(split.family, split.updating)
        evaluation = self._evaluation_bytes(updating, split, candidate.micro_batching)
        beside = max(evaluation, updating.features_bytes)
        moment, gradients = max(high, (beside, 0.0))
        exchange = self._exchange(split, cut, 0.0)
        if split.gathers:
            divided = gradients / self.workload.ranks
            moment, gradients = moment - gradients + divided, divided
        elif self.workload.ranks > 1:  # DDP's buckets
            moment, gradients = moment + exchange.sent_bytes, gradients + exchange.sent_bytes
        allocated = round(static.total + workspace + moment)
        gap = 0
        if self.card is not None:
            gap = self._gap_at(family, split, tokens, adds_up)
            # What graphs were captured in is theirs: an evaluation takes memory beside it.
            sums = exchange.sent_bytes if self.workload.ranks > 1 else 0
            beside = max(evaluation, sums) + _LAUNCHED_REST_BYTES
            gap += round(beside if split.bucket_tokens else max(updating.gap_bytes, 0.0))
        held = {name: round(static.parts.get(name, 0.0)) for name in Component}
        held[Component.GRADIENTS] += round(gradients)
        held[Component.WORKSPACE] += workspace
        held[Component.CONTEXT] = context
        known = sum(held.values()) - context
        held[Component.ACTIVATIONS] += allocated - known
        return MemoryPeak(
            components=held,
            allocated_bytes=allocated,
            reserved_bytes=allocated + gap,
            device_bytes=allocated + gap + context,
        )

    def _evaluation_bytes(self, updating: Updating, split: Split, limits: MicroBatching) -> float:
        """An evaluation's highest moment; it was traced with batches that are not cut."""
        traced, cut = (self._evaluated(split.packed, one) for one in (MicroBatching(), limits))
        return updating.evaluation_bytes * cut / traced

    def _count_evaluated(self, packed: bool, limits: MicroBatching) -> int:
        """Tokens of an evaluation's largest part."""
        batches = batches_of(self.workload, ())
        rows = int(self.workload.args.per_device_eval_batch_size)
        return batches.evaluated_tokens(rows, limits, packed=packed)

    def _find_peak(
        self,
        family: TraceFamily,
        policy: Strategies,
        count: int,
        tokens: int,
        keeps: bool,
        adds_up: bool,
    ) -> tuple[float, float]:
        """The highest moment above what lies there between steps, and its gradients."""
        other = self._policy(family, policy).pieces if policy else family.plain
        share = count / self._depth
        if family.plain.whole and 0 < count < self._depth:
            ends = (0, self._depth)
            low, high = (self._peak(family, policy, end, tokens, keeps, adds_up) for end in ends)
            return low[0] + share * (high[0] - low[0]), low[1] + share * (high[1] - low[1])
        steps = walk(family.plain, other, self._depth, count)
        every = sum(times * one.rise(tokens, keeps=True).gradients for one, times in steps)
        if adds_up:  # those of the micro-batches before are there all the time
            top, gradients = peak_of(steps, tokens, keeps=False)
            top, gradients = top + every, gradients + every
        else:
            top, gradients = peak_of(steps, tokens, keeps=keeps)
        left = every if keeps else 0.0
        return max((top, gradients), (left + family.update_bytes, left))

    def _make_walk(self, family: TraceFamily, policy: Strategies, count: int) -> Any:
        other = self._policy(family, policy).pieces if policy else family.plain
        return walk(family.plain, other, self._depth, count)

    def _gap_at(self, family: TraceFamily, split: Split, tokens: int, adds_up: bool) -> int:
        """What the allocator reserves beyond what is allocated, between sizes it was tried at."""
        whole = batches_of(self.workload, ()).cut_whole(split.packed)
        sizes = [max(whole // parts, 1) for parts in _GAP_PARTS]
        larger = [size for size in sizes if size >= tokens] or sizes[:1]
        smaller = [size for size in sizes if size <= tokens] or sizes[-1:]
        high, low = larger[-1], smaller[0]
        keeps = split.keeps and not adds_up
        ends = [
            self._gap_of(family, split, size, keeps)
            for size in ((high, low) if high > low else (high,))
        ]
        if len(ends) == 1:
            return round(ends[0])
        share = (tokens - low) / (high - low)
        return round(ends[1] + min(max(share, 0.0), 1.0) * (ends[0] - ends[1]))

    def _gap_of(self, family: TraceFamily, split: Split, tokens: int, keeps: bool) -> float:
        graphed = bool(split.bucket_tokens)
        plain = self._gap(family, (), 0, tokens, keeps, graphed)
        if not split.policy:
            return plain
        every = self._gap(family, split.policy, self._depth, tokens, keeps, graphed)
        return plain + split.count / self._depth * (every - plain)

    def _measure_gap(
        self,
        family: TraceFamily,
        policy: Strategies,
        count: int,
        tokens: int,
        keeps: bool,
        graphed: bool,
    ) -> float:
        steps = self._walk(family, policy, count)
        # A graph's pool begins empty.
        before = Segments({}) if graphed else family.traced(family.layers).segments
        return gap_bytes(steps, before, tokens, keeps=keeps)

    def _make_outside(
        self, split: Split, family: TraceFamily, limits: MicroBatching, kernels: float
    ) -> tuple[int, int]:
        """Bytes of library workspaces, and of what lies outside the allocator."""
        if self.card is None:
            return 0, 0
        trace = family.traced(family.layers)
        again = bool(split.policy) or bool(self.workload.args.gradient_checkpointing)
        run = Priced(
            segments=trace.segments,
            parts=1,
            biases=trace.biases,
            recompute=again,
            small_workspace=split.small_workspace,
            streams=split.copies,
            graphs=self._graphs(limits, split.bucket_tokens) if split.bucket_tokens else 0,
            graphed_kernels=kernels,
            nccl_bytes=nccl_bytes(self.workload, self.card),
        )
        return _workspace_bytes(run, self.card), context_bytes(run, self.card)

    def _count_graphs(self, limits: MicroBatching, bucket_tokens: int) -> int:
        return graph_count(self.workload, limits, bucket_tokens)

    def _bucket(self, split: Split, tokens: int) -> int:
        """So many tokens, or as many as a graph of them has."""
        return TokenBuckets(split.bucket_tokens).fit(tokens) if split.bucket_tokens else tokens

    def _host_bytes(self, split: Split, cut: Cutting) -> int:
        updating = self._updating(split.family, split.updating)
        family = self._family_of(split)
        kept = split.hosted_bytes * updating.learning(self._depth)
        if split.policy:
            each = self._policy(family, split.policy).host_bytes
            kept += split.count * each * cut.worst_tokens / family.tokens[0]
        return round(updating.host_bytes(self._depth) + kept)

    # ----------------------------------------------------------------------------- time

    def _seconds(self, split: Split, cut: Cutting, counts: StepCounts) -> float:
        alone = self._seconds_alone(split, counts)
        if self.workload.ranks == 1:
            return alone
        return alone + self._exchange(split, cut, alone).waited_seconds

    def _seconds_alone(self, split: Split, counts: StepCounts) -> float:
        return step_seconds(counts, self.card, parses=split.small_workspace)

    def _exchange(self, split: Split, cut: Cutting, alone: float) -> RankCost:
        learning = self._updating(split.family, split.updating).learning(self._depth)
        is_low = Combination(split.updating).effects.stores is not None
        each = 2.0 if is_low else self._family_of(split).gradient_bytes
        return rank_cost(
            self.workload,
            self.card,
            learning * (_FP32_BYTES if split.gathers else each),
            alone,
            micro_batches=cut.micro_batches,
            divided=split.gathers,
        )

    def _cut(self, candidate: Candidate, split: Split) -> Cutting:
        batches = batches_of(self.workload, candidate.strategies)
        return batches.cut(candidate.micro_batching, packed=split.packed)

    def _make_lines(self, split: Split) -> tuple[Counted, Counts, Counts, Counts]:
        """A micro-batch, attention for every pair of tokens, the update, and adding up."""
        family = self._family_of(split)
        updating = self._updating(split.family, split.updating)
        micro = family.micro(self._depth)
        if split.policy:
            layers = family.whole_layers(split.count, self._depth)
            micro += self._policy(family, split.policy).extra * layers
        own = Counted(updating.micro(self._depth, split.passes), zero())
        more = zero()
        if split.keeps:
            tensors = _TENSORS_A_LAYER * self._depth
            more = accumulated(updating.learning(self._depth), family.gradient_bytes, tensors)
        attention = family.attention * (self._depth * split.passes)
        return micro * split.passes + own, attention, updating.update(self._depth), more

    def _counts(self, split: Split, cut: Cutting) -> StepCounts:
        """What an average step does."""
        counts = self._counted(split, cut)
        if not split.hosted_bytes:
            return counts
        # The update reads and writes state, and reads a gradient that every micro-batch was added
        # to.
        gradient_bytes = split.hosted_gradient * (2 * cut.micro_batches + 1)
        learning = self._updating(split.family, split.updating).learning(self._depth)
        reached_bytes = (2 * split.hosted_state + gradient_bytes) * learning
        return dataclasses.replace(counts, reached_bytes=reached_bytes)

    def _counted(self, split: Split, cut: Cutting) -> StepCounts:
        """The same with all state on the card."""
        micro, attention, update, more = self._lines(split.as_counted)
        # Captured batches are filled up to the next bucket, by half of one on average.
        tokens = cut.tokens + cut.micro_batches * split.bucket_tokens / 2
        step = micro.at(cut.micro_batches, tokens) + attention * cut.pairs
        step += more * (cut.micro_batches - 1) + self._features(split)
        if not split.bucket_tokens:
            return counts_of(step + update)
        # A batch that is not cut ends its step in the graph, too; ranks do not meet in one.
        share = min(cut.micro_batches - 1.0, 1.0) if self.workload.ranks == 1 else 1.0
        step = replayed(step) + share * update + (1 - share) * replayed(update)
        return dataclasses.replace(counts_of(step), replays=cut.micro_batches)

    def _features(self, split: Split) -> Counts | float:
        """The share of a step in the one pass of all texts through a frozen encoder."""
        if not Combination(split.family).effects.feature_tokens:
            return 0.0
        each = self._updating(split.family, split.updating).features_each_token(self._depth)
        epochs = max(float(self.workload.args.num_train_epochs), 1.0)
        return each * (self.workload.mean_tokens / epochs)

    def _find_problem(self, strategies: Strategies) -> str:
        return self._tracing.problem(strategies, self.workload)


def _workspace_bytes(run: Priced, card: DeviceProfile) -> int:
    """What cuBLAS and cuBLASLt take, forward and backward, and beside graphs for an evaluation."""
    product = handle_workspace_bytes(card.capability, run.environment)
    linear = lt_workspace_bytes(run.environment) if run.biases else 0
    beside = product + linear if run.graphs else 0
    return 2 * product + linear * (1 + run.recompute) + beside
