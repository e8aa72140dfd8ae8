"""A deep model's trace from two shallow ones: the trace as parts that repeat by layer.

A part is a list of marks: the size and owner of a block that is born or dies, without its
number. Playing parts one after the other numbers the blocks again, so the parts of one
traced step make a run of any length, and the marks of one layer a model of any depth.

Transformers repeat a layer. Two traces that differ by one repetition show, at each place of
the step, what a repetition adds; adding it as often as the full depth asks gives the deep
trace itself, birth for birth. It is exact where layers repeat; where they do not, or the two
traces do not differ by insertions alone, the full trace is run instead.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from memfit.errors import TraceError
from memfit.memory.components import Component, Event

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
        for event in _brief_scalars(events):
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


_SCALAR_BYTES = 4


def _brief_scalars(events: list[Event]) -> list[Event]:
    """The same with single numbers of a layer dying as soon as they are born.

    When they die is a matter of chance where a compiled function makes them (DeBERTa's scale), and
    two traces with another order of such deaths do not differ by whole layers. The seeds of a fused
    attention's dropout are longer numbers, and live until backward.
    """
    born = {
        event.block
        for event in events
        if event.birth and event.nbytes <= _SCALAR_BYTES and layer_of(event.module)
    }
    deaths = {event.block: event for event in events if not event.birth and event.block in born}
    out: list[Event] = []
    for event in events:
        if event.block not in deaths:
            out.append(event)
        elif event.birth:
            out += [event, deaths[event.block]]
    return out


def sorted_deaths(marks: list[Mark]) -> list[Mark]:
    """Deaths at one moment in a fixed order: autocast empties its cache in that of a hash.

    Those inside layers come first. A block of the stack itself that dies after the last of several
    layers would otherwise come in the middle of its deaths, and no repetition would be found.
    """
    out: list[Mark] = []
    for birth, group in itertools.groupby(marks, key=lambda mark: mark.birth):
        together = list(group)
        if not birth:
            together.sort(key=lambda mark: (layer_of(mark.module) is None, mark.kind))
        out += together
    return out


def survivors(segments: Segments, part: str) -> list[Mark]:
    """The births of a part that outlive it."""
    marks = segments.parts[part]
    return [marks[place] for place in surviving(marks)]


def surviving(marks: list[Mark]) -> list[int]:
    """The places of the births that these marks outlive."""
    living: dict[Kind, list[int]] = {}
    for place, mark in enumerate(marks):
        places = living.setdefault(mark.kind, [])
        if mark.birth:
            places.append(place)
        elif places:
            places.pop()
    return [place for places in living.values() for place in places]


def sized(mark: Mark, share: float) -> Mark:
    """The same of a block that is this share of it."""
    nbytes, component, module = mark.kind
    return mark._replace(kind=(round(share * nbytes), component, module))


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
                    "a block of {count} bytes of {module} dies unborn in {name}",
                    count=kind[0],
                    module=module,
                    name=name,
                )
            events.append(Event(block, kind[0], birth, kind[1], module))
    return events


_ATTRIBUTES = (bool, float, str, type(None))


@dataclass(frozen=True)
class Depths:
    """Two shallow depths from which the full depth is reached by repetition."""

    shallow: int
    deeper: int
    repeats: int
    """How often what the deeper one has more is inserted into the shallow one."""


def plan_depths(layers: list[Any], *, least: int = 2) -> Depths | None:
    """The cheapest pair of depths for these layers; None where the full trace costs no more."""
    prints = [fingerprint(layer) for layer in layers]
    count = len(prints)
    for period in range(1, count // 2):
        for shallow in range(max(least, period + 1), count - 2 * period):
            if (count - shallow) % period:
                continue
            if shallow + shallow + period >= count:
                break
            if all(prints[i] == prints[i - period] for i in range(shallow, count)):
                return Depths(shallow, shallow + period, (count - shallow) // period)
    return None


def fingerprint(layer: Any) -> tuple[Any, ...]:
    """All that makes a layer differ from its neighbours, but for its number."""
    parts: list[Any] = []
    for name, module in layer.named_modules():
        shapes = tuple(
            (key, tuple(p.shape), p.dtype, p.requires_grad)
            for key, p in module._parameters.items()
            if p is not None
        )
        plain = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, _ATTRIBUTES) or (isinstance(value, int) and "layer" not in key)
        )
        parts.append((name, type(module).__name__, shapes, plain))
    return tuple(parts)


def with_layers(config: Any, count: int) -> Any:
    """The configuration of the same model with its first `count` layers.

    A model of two layers is traced with three as well: lists of a value a layer (`layer_types`)
    go on with the last one.
    """
    shallow = copy.deepcopy(config)
    cut_layers(shallow, count)
    return shallow


def cut_layers(config: Any, count: int) -> None:
    """Leave only the first `count` layers in this configuration."""
    text = config.get_text_config()
    full = text.num_hidden_layers
    for key, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == full:
            setattr(text, key, value[:count] + value[-1:] * max(count - full, 0))
    text.num_hidden_layers = count


def deepen(shallow: Segments, deeper: Segments, repeats: int) -> Segments | None:
    """The trace with `repeats` insertions; None when the two do not differ by insertions."""
    if shallow.parts.keys() != deeper.parts.keys():
        return None
    parts: dict[str, list[Mark]] = {}
    grown: set[tuple[Kind, Kind]] = set()
    for name, marks in shallow.parts.items():
        found = difference(marks, deeper.parts[name], grown)
        if found is None:
            return None
        parts[name] = sorted_deaths(_grow(deeper.parts[name], found, repeats))
    return Segments(parts)


@dataclass
class Difference:
    """What the deeper of two traces has more."""

    inserts: list[tuple[int, int]]
    """Stretches of the deeper trace: start and length."""
    grown: dict[int, int]
    """Marks whose block is larger by so many bytes: a list of all parameters' norms."""


def _grow(marks: list[Mark], found: Difference, repeats: int) -> list[Mark]:
    """Each inserted stretch `repeats` times, with the layers numbered on."""
    marks = list(marks)
    for place, more in found.grown.items():
        nbytes, component, module = marks[place].kind
        kind = (nbytes + (repeats - 1) * more, component, module)
        marks[place] = marks[place]._replace(kind=kind)
    out: list[Mark] = []
    at = above = 0
    stack = ""
    rises = False  # the last insertion went up through the layers: what follows lies above
    for start, length in found.inserts:
        slope, stack = slope_of(marks, start, length)
        above = (repeats - 1) * abs(slope)
        out += _move(marks[at:start], stack, above if rises or slope < 0 else 0)
        for number in range(repeats):
            layers = number * slope if slope >= 0 else (number - repeats + 1) * slope
            out += _move(marks[start : start + length], stack, layers)
        at, rises = start + length, slope > 0
    return out + _move(marks[at:], stack, above if rises else 0)


def slope_of(marks: list[Mark], start: int, length: int) -> tuple[int, str]:
    """How many layers up an inserted stretch leads, negative in the backward pass; and where."""
    inside = (layer_of(mark.module) for mark in reversed(marks[start : start + length]))
    last = next((layer for layer in inside if layer is not None), None)
    if last is None:
        return 0, ""
    before = (layer_of(mark.module) for mark in reversed(marks[:start]))
    first = next(
        (index for layer in before if layer and layer[0] == last[0] for index in layer[1:]), None
    )
    return (0 if first is None else last[1] - first), last[0]


def _move(marks: list[Mark], stack: str, by: int) -> list[Mark]:
    """The same marks in layers further up the stack."""
    if not by:
        return marks
    return [mark._replace(module=moved(mark.module, stack, by)) for mark in marks]


def difference(
    shallow: list[Mark], deeper: list[Mark], grown: set[tuple[Kind, Kind]]
) -> Difference | None:
    """What the deeper trace has more; None if the two differ otherwise.

    `grown` has the blocks that were born larger, of this part and of those before: only those can
    die larger.

    After the longest common beginning, that insertion is taken after which the two go on
    alike for longest. A repetition that begins elsewhere in the unit is as good: inserting
    any rotation of it again gives the same sequence.
    """
    a = [(mark.birth, mark.kind) for mark in shallow]
    b = [(mark.birth, mark.kind) for mark in deeper]
    found = Difference([], {})
    i = j = 0
    while True:
        alike = _alike(a, b, i, j)
        i, j = i + alike, j + alike
        if i == len(a):
            if j < len(b):
                found.inserts.append((j, len(b) - j))
            return found
        extra = len(b) - j - (len(a) - i)
        lengths = [n for n in range(extra + 1) if b[j + n] == a[i] or _grew(a[i], b[j + n], grown)]
        if not lengths:
            return None
        best = max(lengths, key=lambda n: (_alike(a, b, i + 1, j + n + 1), -n))
        if best:
            found.inserts.append((j, best))
        j += best
        if a[i] != b[j]:
            grown.add((a[i][1], b[j][1]))
            found.grown[j] = b[j][1][0] - a[i][1][0]
            i, j = i + 1, j + 1


def _grew(a: tuple[bool, Kind], b: tuple[bool, Kind], grown: set[tuple[Kind, Kind]]) -> bool:
    """The same block, larger: lists the clipping makes, and what small parameters share."""
    if a[0] != b[0] or a[1][1:] != b[1][1:] or a[1][1] is not Component.OPTIMIZER:
        return False
    return a[1][0] < b[1][0] and (a[0] or (a[1], b[1]) in grown)


def _alike(a: list[Any], b: list[Any], i: int, j: int) -> int:
    count = 0
    for x, y in zip(itertools.islice(a, i, None), itertools.islice(b, j, None), strict=False):
        if x != y:
            break
        count += 1
    return count
