"""The few shallow traces that quick prices are composed from, and which strategies need one.

    Family     the layers' own events: precision, packing, fusing, what learns
    Policy     what becomes of a layer's activations: kept, recomputed, its MLP half, offloaded
    Updating   how weights are stored and stepped, and where gradients wait for the update

A family is traced at two depths and two numbers of tokens, one that only learns less than another
grows with the tokens as that one does; each policy is traced once, each way of updating at two
depths. Nothing here depends on the budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from memfit.engine.micro_batches import MicroBatching
from memfit.memory.cards import DeviceProfile
from memfit.memory.components import Component
from memfit.memory.tracing.depth import survivors
from memfit.planner.candidates import Candidate
from memfit.planner.pricing.layer_pieces import (
    FIELDS,
    TRACED_LAYERS,
    Counted,
    Counts,
    Growth,
    Stretch,
    TracedPieces,
    attention_of,
    cut_pieces,
    gap_bytes,
    top_bytes,
    vector,
    without_attention,
)
from memfit.planner.pricing.step_trace import (
    Sizes,
    StepTrace,
    judged_layers,
    trace_step,
    unavailable_reason,
)
from memfit.planner.pricing.traced_run import Extent
from memfit.planner.pricing.traced_setup import rows_at_once
from memfit.planner.workload import Workload
from memfit.strategies import Combination, Strategy, TracePart, ordered

Strategies = tuple[Strategy, ...]

_HOSTED_LAYERS = 5
"""With weights on the host: the layer at work, its neighbours, and some that are away."""

_FEWEST_ROWS = 4

_HOST_ADAMW_BYTES = 16
"""A parameter's fp32 weight, gradient and two moments."""


@dataclass(frozen=True)
class Known:
    """What was found out about a task on a card; another process need not find it out again."""

    traces: dict[tuple[Strategies, int, bool, Extent], StepTrace] = field(default_factory=dict)
    """By strategies, layers, whether the micro-batch is the smaller one, and extent."""
    reasons: dict[tuple[Strategies, int], str] = field(default_factory=dict)
    """Why strategies cannot be used, by the layers of the model that was tried."""

    def copy(self) -> Known:
        """As it is now, whatever is found out meanwhile."""
        return Known(dict(self.traces), dict(self.reasons))


class Tracing:
    """Shallow traces of one task on one card."""

    def __init__(
        self, workload: Workload, card: DeviceProfile | None, known: Known | None = None
    ) -> None:
        self.workload, self.card = workload, card
        self.known = Known() if known is None else known
        self._alike = cache(self._with_rows)

    @property
    def guessed(self) -> frozenset[str]:
        """Operators of all traces so far whose arithmetic could not be counted."""
        return frozenset().union(*(one.guessed for one in self.known.traces.values()))

    def trace(
        self,
        strategies: Strategies,
        layers: int,
        *,
        fewer: bool = False,
        extent: Extent = Extent.UPDATE,
    ) -> StepTrace:
        """A step of so many layers, on the larger or the smaller of two micro-batches."""
        key, traces = (strategies, layers, fewer, extent), self.known.traces
        if key not in traces:
            traces[key] = self._trace(*key)
        return traces[key]

    def problem(self, strategies: Strategies, workload: Workload) -> str:
        """Why these cannot be used for a task with these layers; empty where they can."""
        key = (strategies, judged_layers(strategies, workload, self.card))
        reasons = self.known.reasons
        if key not in reasons:
            reasons[key] = unavailable_reason(strategies, workload, self.card)
        return reasons[key]

    def _trace(self, strategies: Strategies, layers: int, fewer: bool, extent: Extent) -> StepTrace:
        rows, tokens = self._size(fewer)
        candidate = Candidate(tuple(ordered(strategies)), MicroBatching())
        # What divides weights refuses to work for a process by itself.
        ranks = self.workload.ranks if candidate.effects.divides_weights else 1
        return trace_step(
            self._alike(rows, ranks),
            candidate,
            self.card,
            tokens=tokens,
            layers=layers,
            extent=extent,
        )

    @property
    def rows(self) -> int:
        """How many rows the larger micro-batch has."""
        return self._size(False)[0]

    @property
    def tokens(self) -> tuple[int, int]:
        """How many tokens the two micro-batches have."""
        return self._size(False)[1], self._size(True)[1]

    def _with_rows(self, rows: int, ranks: int) -> Workload:
        """So many of the longest rows, all of them in one micro-batch.

        Everything is then in proportion to the tokens, as it is among the largest batches: also
        attention that keeps the square of a length, or pads texts again. What ranks hold to
        reach each other is added to the price.
        """
        lengths = (self.workload.longest_tokens,) * rows
        return replace(self.workload, lengths=lengths, ranks=ranks)

    def _size(self, fewer: bool) -> tuple[int, int]:
        """Rows and tokens of a micro-batch."""
        longest = self.workload.longest_tokens
        rows = min(self.workload.rank_rows, len(self.workload.lengths))
        if rows < _FEWEST_ROWS:
            return rows, rows * max(longest // 2 if fewer else longest, 1)
        # A prime, so that what grows with the rows is not taken for what happens to be a
        # multiple of them.
        count = _prime_below(max(rows // 3 if fewer else 2 * rows // 3, 2))
        return count, count * longest


def _prime_below(number: int) -> int:
    """The largest prime up to a number; 1 where there is none."""
    for one in range(number, 1, -1):
        if all(one % divisor for divisor in range(2, int(one**0.5) + 1)):
            return one
    return 1


@dataclass(frozen=True)
class Static:
    """What lies on the device between two steps, by component."""

    parts: Mapping[Component, float]

    @classmethod
    def of(cls, trace: StepTrace) -> Static:
        """What the parts of a run before its second step leave behind."""
        sums: dict[Component, float] = {}
        for name in ("build", "start", "update_first"):
            if name not in trace.segments.parts:
                continue
            for mark in survivors(trace.segments, name):
                if name == "update_first" and mark.kind[1] is not Component.OPTIMIZER:
                    continue
                sums[mark.kind[1]] = sums.get(mark.kind[1], 0.0) + mark.kind[0]
        return cls(sums)

    def grown(self, deeper: Static, times: float) -> Static:
        """With what a deeper one has more, so many times."""
        names = {*self.parts, *deeper.parts}
        return Static(
            {
                name: self.parts.get(name, 0.0)
                + times * (deeper.parts.get(name, 0.0) - self.parts.get(name, 0.0))
                for name in names
            }
        )

    def grown_like(self, shallow: Static, deeper: Static, times: float) -> Static:
        """As another one grows from one depth to the next, in proportion, so many times."""
        whole = deeper.total / max(shallow.total, 1.0) - 1
        parts = {}
        for name, size in self.parts.items():
            before = shallow.parts.get(name, 0.0)
            share = deeper.parts.get(name, 0.0) / before - 1 if before else whole
            parts[name] = size * (1 + times * share)
        return Static(parts)

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Policy:
    """Layers whose activations are treated in one way."""

    pieces: TracedPieces
    extra: Counted
    """What a layer does more than a plain one."""
    host_bytes: float
    """What a layer keeps in host memory, at the traced number of tokens."""


class Updating:
    """One way of storing and stepping weights, beside a family's layers."""

    def __init__(self, tracing: Tracing, family: TraceFamily, strategies: Strategies) -> None:
        self._tracing, self._family, self._layers = tracing, family, family.layers - 1
        used = (*family.strategies, *strategies)
        self._shallow = tracing.trace(used, self._layers, extent=Extent.EVALUATION)
        # What crosses the bus is in proportion to the parameters: one depth is enough.
        simple = strategies != family.reference and Combination(strategies).effects.copies
        self._deeper = None if simple else tracing.trace(used, family.layers)
        offloads = Combination(strategies).effects.updates_on_host
        self._host_bytes_each = _HOST_ADAMW_BYTES if offloads else family.gradient_bytes
        self.static = cache(self._find_static)
        """What lies on the device between two steps, by the model's depth."""

    def _find_static(self, depth: int) -> Static:
        mine = Static.of(self._shallow)
        if self._deeper is not None:
            return mine.grown(Static.of(self._deeper), depth - self._layers)
        shallow, deeper = (Static.of(self._family.traced(count)) for count in self._depths)
        return mine.grown_like(shallow, deeper, depth - self._layers)

    def learning(self, depth: int) -> float:
        """Elements of the parameters that learn."""
        return self.learning_sizes(depth).numel

    def learning_sizes(self, depth: int) -> Sizes:
        """The parameters that learn."""
        shallow, deeper = (self._family.traced(n).learning for n in self._depths)
        return shallow + (deeper - shallow) * (depth - self._layers)

    def host_bytes(self, depth: int) -> float:
        """What lies in host memory."""
        shallow, more_layers = float(self._shallow.host_bytes), depth - self._layers
        if self._deeper is not None:
            return shallow + more_layers * (self._deeper.host_bytes - shallow)
        return shallow + self._host_bytes_each * (
            self.learning(depth) - self.learning(self._layers)
        )

    def update(self, depth: int) -> Counts:
        """What the end of a step does."""
        part = "update" if "update" in self._shallow.part_counts else "update_first"
        return self._along(lambda trace: vector(trace.part_counts[part]), depth)

    def micro(self, depth: int, passes: int) -> Counts:
        """What a micro-batch does besides the family's own, which comes `passes` times."""

        def beside(trace: StepTrace) -> Counts:
            layers = self._depths[trace is not self._shallow]
            own = vector(self._family.traced(layers).part_counts["micro"])
            return vector(trace.part_counts["micro"]) - passes * own

        return self._along(beside, depth)

    @property
    def _depths(self) -> tuple[int, int]:
        return self._layers, self._layers + 1

    def _along(self, value: Callable[[StepTrace], Counts], depth: int) -> Counts:
        """A value at another depth: by two traces, or by the parameters that learn."""
        shallow = value(self._shallow)
        if self._deeper is None:
            share = self.learning(depth) / max(self.learning(self._layers), 1.0)
            scaled: Counts = shallow * share
            return scaled
        along: Counts = shallow + (value(self._deeper) - shallow) * (depth - self._layers)
        return along

    @cached_property
    def gap_bytes(self) -> float:
        """What the allocator reserves more than beside the family's own way of updating."""
        own = self._gap(self._family.traced(self._layers))
        return self._gap(self._shallow) - own

    def _gap(self, trace: StepTrace) -> float:
        whole = [(Stretch(trace.segments.parts["micro"], self._family.growth), 1)]
        tokens = self._family.tokens[0]
        return gap_bytes(whole, trace.segments, tokens, keeps=False)

    @cached_property
    def evaluation_bytes(self) -> float:
        """The highest moment of an evaluation above what lies there between steps."""
        return self._top("evaluate")

    @cached_property
    def features_bytes(self) -> float:
        """The same while texts go through a frozen encoder."""
        traced, all_rows = self._feature_rows
        return self._top("features") * all_rows / traced

    def features_each_token(self, depth: int) -> Counts:
        """What a frozen encoder does for each token, once."""
        counts = self._along(lambda trace: vector(trace.part_counts["features"]), depth)
        each: Counts = counts / (self._feature_rows[0] * self._tracing.workload.longest_tokens)
        return each

    @property
    def _feature_rows(self) -> tuple[int, int]:
        """Texts that go through a frozen encoder at once: in the trace, and in the run."""
        most = Combination(self._family.strategies).effects.feature_tokens
        counts = (self._tracing.rows, len(self._tracing.workload.lengths))
        longest = self._tracing.workload.longest_tokens
        traced, all_rows = (rows_at_once(most, longest, count) for count in counts)
        return traced, all_rows

    def _top(self, part: str) -> float:
        return top_bytes(self._shallow.segments.parts.get(part, []))


class TraceFamily:
    """The layers' own events and counts, with plain activations."""

    def __init__(
        self,
        tracing: Tracing,
        strategies: Strategies,
        reference: Strategies,
        pattern: TraceFamily | None = None,
    ) -> None:
        self._tracing, self.strategies = tracing, strategies
        self.reference, self._pattern = reference, pattern
        hosted = Combination(reference).effects.weights_on_host
        self.layers = _HOSTED_LAYERS if hosted else TRACED_LAYERS
        self.packed = Combination(strategies).effects.packs
        self.tokens = tracing.tokens

    @cached_property
    def growth(self) -> Growth:
        """How the sizes of its blocks depend on the tokens."""
        if self._pattern is not None:
            return self._pattern.growth
        shallow = self.traced(self.layers - 1).segments
        return Growth.between(shallow, self._fewer.segments, self.tokens)

    def traced(self, layers: int) -> StepTrace:
        """The plain step of so many layers, with the reference's way of updating."""
        used = (*self.strategies, *self.reference)
        extent = Extent.EVALUATION if layers < self.layers else Extent.UPDATE
        return self._tracing.trace(used, layers, extent=extent)

    @cached_property
    def _fewer(self) -> StepTrace:
        return self._trace_fewer(self.layers - 1)

    @cached_property
    def _fewer_deeper(self) -> StepTrace:
        return self._trace_fewer(self.layers)

    def _trace_fewer(self, layers: int) -> StepTrace:
        used = (*self.strategies, *self.reference)
        return self._tracing.trace(used, layers, fewer=True, extent=Extent.MICRO_BATCH)

    @cached_property
    def plain(self) -> TracedPieces:
        """The stretches of a plain micro-batch."""
        marks = self.traced(self.layers).segments.parts["micro"]
        return cut_pieces(marks, self.growth, self.layers)

    def policy(self, strategies: Strategies, depth: int) -> Policy:
        """The same with the activations of all layers treated in one way."""
        away = Combination(strategies).effects.copies
        layers = max(self.layers, _HOSTED_LAYERS) if away else self.layers
        used = (*self.strategies, *self.reference, *strategies)
        # An update by the host has its own share of the host's memory.
        hosted = Combination(self.reference).effects.weights_on_host
        extent = Extent.UPDATE if hosted else Extent.MICRO_BATCH
        trace = self._tracing.trace(used, layers, extent=extent)
        count = layers if trace.traced_layers == (layers,) else depth
        # Plain layers at this depth are known without a trace of their own.
        first, second = self.traced(self.layers - 1), self.traced(self.layers)
        more_layers = layers - self.layers
        own, next_own = (vector(one.part_counts["micro"]) for one in (first, second))
        more = vector(trace.part_counts["micro"]) - next_own - more_layers * (next_own - own)
        plain_host = second.host_bytes + more_layers * (second.host_bytes - first.host_bytes)
        return Policy(
            pieces=cut_pieces(trace.segments.parts["micro"], self.growth, layers),
            # A layer that is computed again grows with the tokens as a layer does.
            extra=self.layer.like(more / self.whole_layers(count, count), self.tokens[0]),
            # The last layer's activations are wanted at once and stay.
            host_bytes=(trace.host_bytes - plain_host) / max(count - away, 1),
        )

    @cached_property
    def update_bytes(self) -> float:
        """The highest moment of the update above what lies there before it."""
        parts = self.traced(self.layers).segments.parts
        return top_bytes(parts.get("update", parts["update_first"]))

    @cached_property
    def gradient_bytes(self) -> float:
        """Bytes a parameter's gradient has."""
        trace = self.traced(self.layers)
        born = sum(
            mark.kind[0]
            for mark in trace.segments.parts["micro"]
            if mark.birth and mark.kind[1] is Component.GRADIENTS
        )
        return born / max(trace.trainable_parameters, 1)

    @cached_property
    def layer(self) -> Counted:
        """What one more layer does in a micro-batch, but for attention's arithmetic."""
        first = self._micro(self.traced(self.layers)) - self._micro(self.traced(self.layers - 1))
        if self._pattern is not None:
            return self._pattern.layer.like(first, self.tokens[0])
        second = self._micro(self._fewer_deeper) - self._micro(self._fewer)
        return Counted.through(first, second, self.tokens)

    def whole_layers(self, count: int, depth: int) -> float:
        """So many of the first layers, in layers that run for every token.

        The last one may run for the tokens only that the head reads.
        """
        flops = FIELDS.index("half_flops"), FIELDS.index("full_flops")
        each = sum(self.layer.slope[at] for at in flops)
        last = 1 + sum(self.outside.slope[at] for at in flops) / each if each else 1.0
        return count if count < depth else depth - 1 + min(max(last, 0.0), 1.0)

    @cached_property
    def outside(self) -> Counted:
        """The same of what is not in a layer."""
        shallow = self._micro(self.traced(self.layers - 1))
        if self._pattern is not None:
            rest = shallow - self.layer.at(1, self.tokens[0]) * (self.layers - 1)
            return self._pattern.outside.like(rest, self.tokens[0])
        line = Counted.through(shallow, self._micro(self._fewer), self.tokens)
        return line + self.layer * (1 - self.layers)

    @cached_property
    def attention(self) -> Counts:
        """Attention's arithmetic in one layer for every pair of tokens."""
        shallow, deeper = self.traced(self.layers - 1), self.traced(self.layers)
        more = vector(deeper.part_counts["micro"]) - vector(shallow.part_counts["micro"])
        lengths = shallow.rows.lengths
        if not self.packed:
            lengths = (max(lengths),) * len(lengths)
        return attention_of(more, float(sum(length**2 for length in lengths)))

    def micro(self, depth: int) -> Counted:
        """A whole micro-batch, but for attention's arithmetic."""
        return self.outside + self.layer * depth

    @staticmethod
    def _micro(trace: StepTrace) -> Counts:
        return without_attention(vector(trace.part_counts["micro"]))


@dataclass(frozen=True)
class Split:
    """A candidate's strategies by what they decide."""

    family: Strategies
    updating: Strategies
    policy: Strategies
    count: int
    """Layers the policy is for."""
    bucket_tokens: int
    """Tokens that captured micro-batches are filled up to; 0: none is captured."""
    keeps: bool
    """Whether gradients stay in `.grad` until the update."""
    passes: int
    """How often a micro-batch runs in one step."""
    short_masters: bool
    small_workspace: bool
    packed: bool
    """Whether micro-batches have no padding."""
    copies: bool
    """Whether something travels to the host beside the computation."""
    hosted_state: int = 0
    """Bytes of each parameter's low-bit state that lie in host memory."""
    hosted_gradient: int = 0
    """The same of its gradient."""
    gathers: bool = False
    """Whether every weight is divided, and gathered when it is needed."""

    @property
    def hosted_bytes(self) -> int:
        """Of each parameter, what lies in host memory instead of on the card."""
        return self.hosted_state + self.hosted_gradient

    @cached_property
    def as_counted(self) -> Split:
        """The same without what counts do not depend on."""
        return dataclasses.replace(
            self,
            short_masters=False,
            small_workspace=False,
            bucket_tokens=0,
            hosted_state=0,
            hosted_gradient=0,
        )


def split_up(strategies: Strategies, depth: int) -> Split:
    """A candidate's strategies, for a model of so many layers."""
    effects = Combination(strategies).effects
    parts = {part: [one for one in strategies if one.traced is part] for part in TracePart}
    policy = parts[TracePart.ACTIVATIONS]
    return Split(
        family=tuple(parts[TracePart.LAYERS]),
        updating=tuple(one.as_traced() for one in parts[TracePart.UPDATE]),
        policy=tuple(one.for_layers(None) for one in policy),
        count=(effects.layers or depth) if policy else 0,
        bucket_tokens=effects.graph_bucket_tokens,
        keeps=not effects.takes_gradients,
        passes=effects.passes,
        short_masters=effects.short_masters,
        small_workspace=effects.small_workspaces,
        packed=effects.packs,
        copies=effects.copies,
        hosted_state=effects.state_bytes if effects.state_on_host else 0,
        hosted_gradient=int(effects.gradients_on_host),
        gathers=effects.divides_weights,
    )
