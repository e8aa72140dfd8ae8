"""The phases of a training run and the peak of each.

A run that trains may still fail when it evaluates, saves or resumes. As the stock Trainer
does them on one device: evaluation keeps weights and optimizer state and has its own
batch; saving copies to the host piece by piece; resuming loads the checkpoint to the host
first, and has the optimizer's state before the first step instead of after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.memory.allocator import round_request, simulate
from memfit.memory.cards import DeviceProfile
from memfit.memory.components import Component, MemoryPeak
from memfit.memory.events import Event
from memfit.memory.segments import Mark, Segments, play, survivors
from memfit.memory.spec import StepSpec
from memfit.memory.workspace import handle_workspace_bytes, lt_workspace_bytes

TRAINING, EVALUATION, SAVING, RESUMING = "training", "evaluation", "saving", "resuming"


@dataclass(frozen=True)
class Run:
    """The events of a run and where its parts begin."""

    events: list[Event]
    starts: tuple[tuple[int, str], ...]


def training_order(spec: StepSpec, *, steps: int = 2) -> list[str]:
    """The parts of a run; its highest step is the second, when the state exists."""
    micro = ["micro"] + ["micro_more"] * (spec.gradient_accumulation_steps > 1)
    order = ["build"]
    for step in range(steps):
        order += [*micro, "update" if step else "update_first", "clear"]
    return order


def play_run(segments: Segments, order: Sequence[str]) -> Run:
    """The parts one after the other."""
    starts, at = [], 0
    for name in order:
        starts.append((at, name))
        at += len(segments.parts[name])
    return Run(play(segments, order), tuple(starts))


def with_workspaces(
    segments: Segments, capability: tuple[int, int], *, recompute: bool, biases: bool
) -> Segments:
    """What the libraries take at the first product of each thread, forward and backward."""
    product, linear = handle_workspace_bytes(capability), lt_workspace_bytes()
    taken = [product, product]
    taken += [linear] * (biases + (biases and recompute))
    marks = [Mark(True, (size, Component.WORKSPACE, ""), "") for size in taken if size]
    return Segments({**segments.parts, "workspace": marks})


def with_loaded_state(segments: Segments) -> Segments:
    """A part in which the optimizer's state is loaded instead of made."""
    kept = [m for m in survivors(segments, "update_first") if m.kind[1] is Component.OPTIMIZER]
    return Segments({**segments.parts, "load_state": kept})


def phase_orders(spec: StepSpec, *, cuda: bool) -> dict[str, list[str]]:
    """What each phase runs through, from the start of its process."""
    build, *steps = training_order(spec)
    first = steps[: steps.index("clear") + 1]
    later = ["update" if name == "update_first" else name for name in first]
    workspaces = ["workspace"] if cuda else []
    return {
        TRAINING: [build, *workspaces, *steps],
        EVALUATION: [build, *workspaces, *first, "evaluate"],
        SAVING: [build, *workspaces, *first],
        RESUMING: [build, "load_state", *workspaces, *later],
    }


def training_peak(
    run: Run, device: DeviceProfile | None, *, expandable_segments: bool = False
) -> MemoryPeak:
    """The highest moment of a run, as the device's allocator sees it."""
    if device is None:
        return moment_peak(run.events, 0, rounding=False)
    found = simulate(run.events, expandable_segments=expandable_segments)
    live = live_bytes(run.events, found.peak_event)
    # A block may be larger than its tensor, where the rest of it was too small to split off.
    live[Component.ACTIVATIONS] += found.allocated_bytes - sum(live.values())
    return MemoryPeak(
        components={**live, Component.CONTEXT: device.context_bytes},
        allocated_bytes=found.allocated_bytes,
        reserved_bytes=found.reserved_bytes,
        device_bytes=found.reserved_bytes + device.context_bytes,
        module=run.events[found.peak_event].module,
    )


def phase_peak(
    run: Run, start: int, device: DeviceProfile | None, reserved_bytes: int
) -> MemoryPeak:
    """The highest moment from event `start` on, in a process that has `reserved_bytes`."""
    peak = moment_peak(run.events, start, rounding=device is not None)
    if device is None:
        return peak
    reserved = max(reserved_bytes, peak.allocated_bytes)
    return MemoryPeak(
        components={**peak.components, Component.CONTEXT: device.context_bytes},
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=reserved,
        device_bytes=reserved + device.context_bytes,
        module=peak.module,
    )


def moment_peak(events: Sequence[Event], start: int, *, rounding: bool) -> MemoryPeak:
    """The highest sum of live blocks from event `start` on."""
    now = highest = 0
    at = len(events) - 1
    for index, event in enumerate(events):
        size = round_request(event.nbytes) if rounding else event.nbytes
        now += size if event.birth else -size
        if index >= start - 1 and now > highest:
            highest, at = now, index
    live = live_bytes(events, at, rounding=rounding)
    total = sum(live.values())
    module = events[at].module if at >= start else ""
    return MemoryPeak(
        components=live,
        allocated_bytes=total,
        reserved_bytes=total,
        device_bytes=total,
        module=module,
    )


def live_bytes(events: Sequence[Event], at: int, *, rounding: bool = True) -> dict[Component, int]:
    """What is alive right after event `at`, by component."""
    live: dict[Component, int] = dict.fromkeys(
        (c for c in Component if c is not Component.CONTEXT), 0
    )
    for event in events[: at + 1]:
        size = round_request(event.nbytes) if rounding else event.nbytes
        live[event.component] += size if event.birth else -size
    return live
