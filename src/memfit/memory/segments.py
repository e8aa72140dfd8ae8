"""A step's trace as parts that can be repeated: by step, and by layer.

A part is a list of marks: the size and owner of a block that is born or dies, without its
number. Playing parts one after the other numbers the blocks again, so the parts of one
traced step make a run of any length, and the marks of one layer a model of any depth.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from memfit.errors import TraceError
from memfit.memory.components import Component
from memfit.memory.events import Event
from memfit.messages import t

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")

Kind = tuple[int, Component, str]
"""Size, component and module but for the layer's number: such blocks are interchangeable."""


class Mark(NamedTuple):
    """A birth or a death of some block of a kind."""

    birth: bool
    kind: Kind
    module: str
    rank: int = 0
    """Which of the living blocks of the kind dies: 0 the newest, 1 the one before it ...;
    -1 the oldest."""


@dataclass(frozen=True)
class Segments:
    """The parts of a traced run, by name, in the order they were traced."""

    parts: dict[str, list[Mark]]

    def born_bytes(self, part: str, component: Component) -> int:
        """All bytes born for `component` in a part."""
        marks = self.parts[part]
        return sum(m.kind[0] for m in marks if m.birth and m.kind[1] is component)


@lru_cache(maxsize=4096)
def without_index(module: str) -> str:
    """A module's name with its layer's number left open."""
    return _INDEX.sub("*", module)


@lru_cache(maxsize=4096)
def layer_of(module: str) -> tuple[str, int] | None:
    """The stack of layers a module is in, and the layer's number."""
    found = _INDEX.search(module)
    return (module[: found.start()], int(found[0])) if found else None


@lru_cache(maxsize=4096)
def moved(module: str, stack: str, by: int) -> str:
    """The same module of a layer `by` further up, if it is in that stack."""
    layer = layer_of(module)
    if layer is None or layer[0] != stack:
        return module
    return f"{stack}{layer[1] + by}{_INDEX.sub('', module, count=1)[len(stack) :]}"


def cut(parts: dict[str, list[Event]], *, oldest_first: Container[str] = ()) -> Segments:
    """Events in order, part by part, as marks.

    A layer's blocks die newest layer first. In the parts `oldest_first`, those of lists of
    all parameters, the oldest goes first.
    """
    living: dict[Kind, list[int]] = {}
    done: dict[str, list[Mark]] = {}
    for name, events in parts.items():
        marks: list[Mark] = []
        for event in events:
            kind = (event.nbytes, event.component, without_index(event.module))
            blocks = living.setdefault(kind, [])
            rank = 0
            if event.birth:
                blocks.append(event.block)
            elif event.block not in blocks:
                continue  # born in a repetition that is not kept, held on to by another thread
            else:
                rank = len(blocks) - 1 - blocks.index(event.block)
                if rank and rank == len(blocks) - 1 and name in oldest_first:
                    rank = -1
                blocks.remove(event.block)
            marks.append(Mark(event.birth, kind, event.module, rank))
        done[name] = sorted_deaths(marks)
    return Segments(done)


def sorted_deaths(marks: list[Mark]) -> list[Mark]:
    """Deaths at one moment in a fixed order: autocast empties its cache in that of a hash."""
    out: list[Mark] = []
    for birth, group in itertools.groupby(marks, key=lambda mark: mark.birth):
        together = list(group)
        out += together if birth else sorted(together, key=lambda mark: mark.kind)
    return out


def survivors(segments: Segments, part: str) -> list[Mark]:
    """The births of a part that outlive it."""
    living: dict[Kind, list[Mark]] = {}
    for mark in segments.parts[part]:
        marks = living.setdefault(mark.kind, [])
        if mark.birth:
            marks.append(mark)
        elif marks:
            marks.pop()
    return [mark for marks in living.values() for mark in marks]


def play(segments: Segments, order: Iterable[str]) -> list[Event]:
    """The parts in `order`, as events with numbered blocks."""
    living: dict[Kind, list[tuple[int, str]]] = {}
    events: list[Event] = []
    count = 0
    for name in order:
        for birth, kind, module, rank in segments.parts[name]:
            blocks = living.setdefault(kind, [])
            if birth:
                block = count
                count += 1
                blocks.append((block, module))
            elif blocks:
                block, module = blocks.pop(0 if rank < 0 else max(len(blocks) - 1 - rank, 0))
            else:
                raise TraceError(
                    t(
                        "a block of {count} bytes of {module} dies unborn in {name}",
                        count=kind[0],
                        module=module,
                        name=name,
                    )
                )
            events.append(Event(block, kind[0], birth, kind[1], module))
    return events
