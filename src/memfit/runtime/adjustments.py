"""What was changed while a run trained: one line in the log, and a mark in the report."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from memfit.messages import t

KEY = "adjustment"
"""Under this name an entry of the Trainer's log history is an adjustment; checkpoints keep it."""

_LOGGER = logging.getLogger("memfit")


@dataclass(frozen=True, slots=True)
class Adjustment:
    """One change: when, why, from what to what."""

    step: int
    """The step during or before which it was made, counted from 1."""
    why: str
    before: str
    after: str

    def __str__(self) -> str:
        return t("step {step}: {why}: {before} -> {after}", **asdict(self))


class Adjustments:
    """Writes each change down where it will be found again."""

    def __init__(
        self, history: Callable[[], list[dict[str, Any]]], say: Callable[[str], None] | None = None
    ) -> None:
        self._history = history
        self.say = say

    def note(self, adjustment: Adjustment) -> None:
        """One line, one entry."""
        entry = {"step": adjustment.step, KEY: asdict(adjustment)}
        self._history().append(entry)
        if self.say is not None:
            self.say(str(adjustment))
        else:
            _LOGGER.warning("%s", adjustment)

    @property
    def made(self) -> list[Adjustment]:
        """All of the run, those before it was resumed too."""
        return [Adjustment(**entry[KEY]) for entry in self._history() if KEY in entry]
