"""Every error memfit raises on purpose.

    MemfitError              exit code 1: the run failed
    ├── TraceError           the memory trace cannot run this architecture
    ├── RunStoppedError      training ended early, and what was saved of it is good
    │   ├── SaveError        a checkpoint or result could not be written
    │   ├── DeviceLostError  the GPU no longer answers
    │   ├── RankLostError    another process of the training has ended
    │   ├── StepMemoryError  a step of several ranks ran out of memory
    │   └── LossError        the loss or its gradient is not a finite number
    ├── InputError           exit code 2: what was given is wrong
    │   ├── ConfigError      an option, a TOML key or a value
    │   ├── BudgetError      a budget that does not parse
    │   ├── DataError        a file, a table, a column, a label
    │   ├── ModelError       a model folder or id
    │   └── OutputError      the output folder
    └── DoesNotFitError      exit code 3: nothing fits the budget

A message says what is wrong, where, and what to do. The command line prints it
without a traceback; a traceback is a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from memfit.i18n import Message, shown, t


class MemfitError(Exception):
    """Base of all errors raised on purpose: a sentence and the values of its fields.

        raise DataError("{where}: no column {name}", where=path, name=repr(name))

    `str` gives the sentence in the current language. A text without values is shown as it is if the
    catalogue lacks it.
    """

    exit_code = 1

    def __init__(self, sentence: str, /, **values: Any) -> None:
        if values:
            # As text: a value that is an error would keep alive all that its frames hold.
            texts = {
                name: value if isinstance(value, str | int | float) else str(value)
                for name, value in values.items()
            }
            sentence = Message(sentence, **texts)
        super().__init__(sentence)

    @property
    def reason(self) -> str:
        """What is wrong, in English, for a log or a file."""
        said: str = self.args[0]
        return said

    def __str__(self) -> str:
        return shown(self.args[0])


class TraceError(MemfitError):
    """The memory trace cannot run this architecture."""


class RunStoppedError(MemfitError):
    """Training ended early; `last_good` is where it can go on from, `resume_with` how.

    `model_in` is where the model was saved, if all steps had been trained.
    """

    def __init__(
        self, what: str, last_good: Path | None = None, resume_with: str | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.last_good = last_good
        self.resume_with = resume_with
        self.model_in: Path | None = None

    def __str__(self) -> str:
        if self.model_in is None:
            return self._how_to_go_on()
        return t(
            "{what}; the training itself had come to its end, and its model is saved in {folder}",
            what=self._how_to_go_on(),
            folder=self.model_in,
        )

    def _how_to_go_on(self) -> str:
        if self.last_good is None:
            return t("{what}; no checkpoint had been written", what=self.what)
        if not self.resume_with:
            return t(
                "{what}; the last good checkpoint is {checkpoint}",
                what=self.what,
                checkpoint=self.last_good,
            )
        return t(
            "{what}; the last good checkpoint is {checkpoint}; go on with: {command}",
            what=self.what,
            checkpoint=self.last_good,
            command=self.resume_with,
        )


class SaveError(RunStoppedError):
    """A checkpoint or result could not be written."""


class DeviceLostError(RunStoppedError):
    """The GPU no longer answers."""


class RankLostError(RunStoppedError):
    """Another process of the training has ended."""


class StepMemoryError(RunStoppedError):
    """A step ran out of memory on one of several ranks; `smaller_budget` is what to go on with."""

    def __init__(self, what: str, last_good: Path | None = None, smaller_budget: str = "") -> None:
        super().__init__(what, last_good)
        self.smaller_budget = smaller_budget


class LossError(RunStoppedError):
    """The loss or its gradient is not a finite number."""


class InputError(MemfitError):
    """What the user gave is wrong."""

    exit_code = 2


class ConfigError(InputError):
    """An option, a TOML key or a value is wrong."""


class ConflictError(ConfigError, ValueError):
    """Two arguments contradict each other: the Trainer's own kind of error, too."""


class BudgetError(InputError):
    """A budget does not parse."""


class DataError(InputError):
    """A file, a table, a column or a label is wrong."""


class ModelError(InputError):
    """A model folder or id is wrong."""


class OutputError(InputError):
    """The output folder cannot be used."""


class NoCheckpointError(OutputError, ValueError):
    """There is nothing to resume from: the Trainer's own kind of error, too."""


class DoesNotFitError(MemfitError):
    """Nothing fits the budget."""

    exit_code = 3


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for a misspelt name, or nothing when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return t(" Did you mean {name}?", name=repr(close[0])) if close else ""
