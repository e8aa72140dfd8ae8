"""Which trainer has changed a model, so that the next trainer finds it as it was.

A trainer's strategies stay in its model after training: predictions are packed, too, and a second
`train()` goes on. They are undone when another trainer is made for the same model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from memfit.runtime.model_changes import ModelChanges

_ATTRIBUTE = "_memfit_held"


class Held:
    """What a model remembers: how to undo the changes, and who made them, if it still lives.

    A copy of the model remembers nothing: its changes are not the trainer's.
    """

    def __init__(
        self, undo: list[Callable[[], None]] | None = None, trainer: ModelChanges | None = None
    ) -> None:
        self.undo = [] if undo is None else undo
        self.trainer = None if trainer is None else weakref.ref(trainer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        return Held()

    def __reduce__(self) -> Any:
        return Held, ()


def hold(model: nn.Module, undo: list[Callable[[], None]], trainer: ModelChanges) -> None:
    """Note that this trainer changed the model."""
    vars(model)[_ATTRIBUTE] = Held(undo, trainer)


def let_go(model: nn.Module) -> None:
    """Forget who changed the model: it is as it was."""
    vars(model).pop(_ATTRIBUTE, None)


def give_back(model: nn.Module) -> None:
    """Have the trainer that changed this model undo that; nothing where there is none."""
    held: Held | None = vars(model).get(_ATTRIBUTE)
    if held is None:
        return
    trainer = None if held.trainer is None else held.trainer()
    if trainer is not None:
        trainer.give_back()
    while held.undo:
        held.undo.pop()()
    let_go(model)
