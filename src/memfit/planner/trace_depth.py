"""A deep model's step from shallow ones, where its layers are of a few kinds in a row.

Frozen layers come first, then those that are recomputed or whose activations leave the device,
then the others. Each such run is traced short, and once more with one layer more; what that
layer adds is put in as often as the run is long. Memory is exact where a run's layers are alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memfit.memory.depth import difference, plan_depths, slope_of
from memfit.memory.segments import Mark, Segments, sorted_deaths
from memfit.planner.values import Candidate, Workload

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
        least = _SHORT_OFFLOADED if _is_away(candidate) else 2 + _is_released(candidate)
        depths = plan_depths(list(layers), least=least)
        if depths is None:
            return None
        period = depths.deeper - depths.shallow
        return Shallow((depths.shallow,), (depths.repeats,), period)
    lengths = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    single = plan_depths(list(layers))
    if single is None or single.deeper - single.shallow != 1 or _weights_away(candidate):
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
    for name in ("checkpointing", "activation_offload"):
        strategy = candidate.get(name)
        if strategy is not None and strategy.layers is not None:
            found.add(frozen + strategy.layers)
    return sorted(end for end in found if 0 < end <= count)


def _frozen(workload: Workload, candidate: Candidate, count: int) -> int:
    freezing = candidate.get("freezing")
    what = str(freezing.what) if freezing else workload.freeze
    return min(int(what), count) if what is not None and what.isdecimal() else 0


def _is_away(candidate: Candidate) -> bool:
    return _weights_away(candidate) or candidate.get("activation_offload") is not None


def _is_released(candidate: Candidate) -> bool:
    """Whether a layer's gradients wait until backward has passed the next one."""
    release = candidate.get("gradient_release")
    return release is not None and release.mode in ("release", "two_pass")


def _weights_away(candidate: Candidate) -> bool:
    offload = candidate.get("optimizer_offload")
    return offload is not None and bool(offload.weights)


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
        changes: dict[str, Any] = {}
        if strategy.name == "freezing" and frozen:
            changes["what"] = new_frozen
        elif strategy.name in ("checkpointing", "activation_offload"):
            layers = getattr(strategy, "layers", None)
            if layers is not None:
                changes["layers"] = shorter.get(frozen + layers, sum(runs)) - new_frozen
        fields: Any = strategy
        strategies.append(dataclasses.replace(fields, **changes) if changes else strategy)
    if workload.freeze is not None and workload.freeze.isdecimal():
        workload = dataclasses.replace(workload, freeze=str(new_frozen))
    return Candidate(tuple(strategies), candidate.micro_batching), workload


def compose(base: Segments, deeper: Sequence[tuple[Segments, int]]) -> Segments | None:
    """The base with what each deeper trace has more, so many times; None if they differ oddly."""
    parts: dict[str, list[Mark]] = {}
    for name, marks in base.parts.items():
        made = list(marks)
        inserts: list[tuple[int, int, list[Mark], int]] = []
        for number, (other, repeats) in enumerate(deeper):
            if name not in other.parts:
                return None
            found = difference(marks, other.parts[name])
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
