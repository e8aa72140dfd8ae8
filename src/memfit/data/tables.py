"""A table before anything is known of it: column names, and rows that stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Table:
    """One split of one source; `read(columns)` streams these columns from the start."""

    where: str
    columns: tuple[str, ...]
    read: Callable[[Sequence[str]], Iterator[Row]]
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Columns whose label names the source itself declares, in the order of their ids."""
    encoding: str | None = None
