"""The phases of a training run and the peak of each.

A run that trains may still fail when it evaluates, saves or resumes. As the stock Trainer
does them on one device: evaluation keeps weights and optimizer state and has its own
batch; saving copies to the host piece by piece; resuming loads the checkpoint to the host
first, and has the optimizer's state before the first step instead of after it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memfit.memory.allocator import Allocator, Block
from memfit.memory.cards import DeviceProfile
from memfit.memory.components import Component, Event, MemoryPeak
from memfit.memory.cuda_context import handle_workspace_bytes, lt_workspace_bytes
from memfit.memory.stock_step import StepSpec
from memfit.memory.tracing.depth import Mark, Segments, play, survivors

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
    segments: Segments,
    capability: tuple[int, int],
    *,
    recompute: bool,
    biases: bool,
    environment: Mapping[str, str] = os.environ,
) -> Segments:
    """What the libraries take at the first product of each thread, forward and backward."""
    product = handle_workspace_bytes(capability, environment)
    linear = lt_workspace_bytes(environment)
    taken = [product, product]
    taken += [linear] * (biases + (biases and recompute))
    marks = [Mark(True, (size, Component.WORKSPACE, ""), "") for size in taken if size]
    return Segments({**segments.parts, "workspace": marks})


def with_loaded_state(segments: Segments) -> Segments:
    """A part in which the optimizer's state is loaded instead of made."""
    kept = [m for m in survivors(segments, "update_first") if m.kind[1] is Component.OPTIMIZER]
    return Segments({**segments.parts, "load_state": kept})


def run_orders(spec: StepSpec, *, cuda: bool) -> tuple[list[str], list[str]]:
    """A run from its start, with an evaluation at its end, and one that resumes."""
    build, *steps = training_order(spec)
    workspaces = ["workspace"] if cuda else []
    resumed = ["update" if name == "update_first" else name for name in steps]
    return [build, *workspaces, *steps, "evaluate"], [build, "load_state", *workspaces, *resumed]


def peaks(
    run: Run,
    stretches: Sequence[tuple[int, int]],
    device: DeviceProfile | None,
    *,
    expandable_segments: bool = False,
    books: Books | None = None,
) -> list[MemoryPeak]:
    """The highest moment of each stretch of events, as the device's allocator sees them.

    A stretch begins with what is alive before its first event. Reserved bytes are those of
    the process up to then: the allocator gives nothing back by itself.
    """
    books = books or Books(device, expandable_segments=expandable_segments)
    highest = [(-1, -1, 0, 0)] * len(stretches)

    def look(index: int) -> None:
        for number, (start, stop) in enumerate(stretches):
            if start <= index <= stop:
                allocated, at, reserved, asked = highest[number]
                if books.allocated > allocated:
                    allocated, at = books.allocated, index
                reserved, asked = max(reserved, books.reserved), max(asked, books.asked)
                highest[number] = (allocated, at, reserved, asked)

    starts = {start for start, _ in stretches}
    look(0)
    for index, event in enumerate(run.events, 1):
        before = books.allocated
        books.enter(event)
        books.sizes.append(abs(books.allocated - before))
        if event.birth or index in starts:  # inside a stretch a death is no peak
            look(index)
    return [_peak(run.events, books.sizes, *found, device) for found in highest]


def served(events: Sequence[Event], books: Books) -> list[Event]:
    """The same events, each of the size that the allocator gave: whole blocks on a card."""
    return [event._replace(nbytes=size) for event, size in zip(events, books.sizes, strict=False)]


class Books:
    """What is allocated and reserved while events happen; `asked` is what must be allowed."""

    def __init__(self, device: DeviceProfile | None, *, expandable_segments: bool) -> None:
        self.allocated = self.reserved = self.asked = 0
        self._allocator: Allocator | None = None
        if device is not None:
            self._allocator = Allocator(expandable_segments=expandable_segments)
        self._blocks: dict[int, Block] = {}
        self.sizes: list[int] = []
        """What each event so far took or gave back."""

    def enter(self, event: Event) -> None:
        """Allocates or frees the storage of one event."""
        allocator = self._allocator
        if allocator is None:  # a CPU: tensors' own bytes
            self.allocated += event.nbytes if event.birth else -event.nbytes
            self.reserved = self.asked = self.allocated
            return
        self.asked = 0
        if event.birth:
            self._blocks[event.block] = allocator.allocate(event.nbytes)
            self.asked = allocator.asked_bytes
        else:
            allocator.free(self._blocks.pop(event.block))
        self.allocated, self.reserved = allocator.allocated_bytes, allocator.reserved_bytes
        self.asked = max(self.asked, self.reserved)


def _peak(
    events: Sequence[Event],
    sizes: Sequence[int],
    allocated: int,
    count: int,
    reserved: int,
    asked: int,
    device: DeviceProfile | None,
) -> MemoryPeak:
    live: dict[Component, int] = {
        component: 0 for component in Component if component is not Component.CONTEXT
    }
    for event, size in zip(events[:count], sizes, strict=False):
        live[event.component] += size if event.birth else -size
    context = 0 if device is None else device.context_bytes
    return MemoryPeak(
        components={**live, Component.CONTEXT: context},
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=asked + context,
        module=events[count - 1].module if count else "",
    )
