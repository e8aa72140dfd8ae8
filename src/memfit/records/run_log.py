"""What a run writes down as it goes: one JSON object a line, in progress.jsonl.

    {"begun": {...summary so far}, "step": 0, "max_steps": 438, "seconds": 0.0, "at": "..."}
    {"step": 12, "seconds": 3.1, "now_bytes": 1.2e9, "peak_bytes": 1.4e9}
    {"logged": {"step": 12, "loss": 0.61, ...}}
    {"ended": "failed", "why": "...", "at": "..."}

The page that is open while a run trains is drawn from it, and the report of a run that never
finished. A resumed run goes on in the same file: what it does again replaces what it did before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memfit.config.files import open_to_append, plain
from memfit.printing import without_tokens

FILE = "progress.jsonl"


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory in use at a step: now, and at most until then."""

    step: int
    seconds: float
    now_bytes: int
    peak_bytes: int


@dataclass(slots=True)
class Recorded:
    """All that a file says."""

    begun: Mapping[str, Any] | None = None
    max_steps: int | None = None
    samples: list[Sample] = field(default_factory=list)
    logged: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""
    """How it ended in its own words: stopped or failed; empty where nothing says so."""
    why: str = ""
    ended_at: str = ""

    @property
    def step(self) -> int:
        """The last step known of."""
        return self.samples[-1].step if self.samples else 0

    @property
    def seconds(self) -> float:
        """Trained for so long, earlier sessions included."""
        return self.samples[-1].seconds if self.samples else 0.0


class RunLog:
    """Appends to the file; a disk that takes no more ends the log, never the run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._works = True

    def write(self, **values: Any) -> None:
        """One line, at once: a reader may be waiting for it."""
        if not self._works:
            return
        line = json.dumps(plain(values), ensure_ascii=False, allow_nan=False)
        try:
            options = {"encoding": "utf-8", "errors": "replace", "newline": ""}
            with open_to_append(self.path, "a", **options) as file:
                file.write(without_tokens(line) + "\n")
        except OSError:
            self._works = False

    def ended(self, how: str, why: str) -> None:
        """The last line."""
        self.write(ended=how, why=why, at=now())


def now() -> str:
    """The moment, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_log(folder: Path) -> Recorded:
    """What the file holds; lines that are not whole, or not ours, are passed over."""
    found = Recorded()
    try:
        text = (folder / FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        with suppress(ValueError, TypeError, AttributeError, KeyError):
            _take(found, json.loads(line))
    return found


def _take(found: Recorded, values: dict[str, Any]) -> None:
    if "begun" in values:
        # The run begins, or goes on from a checkpoint: what came after that is done again.
        step = int(values.get("step") or 0)
        found.begun = dict(values["begun"])
        found.max_steps = values.get("max_steps")
        found.ended = found.why = found.ended_at = ""
        found.samples = [sample for sample in found.samples if sample.step <= step]
        found.logged = [entry for entry in found.logged if entry.get("step", 0) <= step]
    elif "logged" in values:
        if isinstance(values["logged"], dict):
            found.logged.append(values["logged"])
    elif "ended" in values:
        found.ended, found.why = str(values["ended"]), str(values.get("why") or "")
        found.ended_at = str(values.get("at") or "")
    else:
        step, seconds = int(values["step"]), float(values["seconds"])
        sizes = int(values["now_bytes"]), int(values["peak_bytes"])
        found.samples.append(Sample(step, seconds, *sizes))
