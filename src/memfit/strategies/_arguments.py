"""Training arguments changed for one run, and how to tell what the user chose himself."""

from __future__ import annotations

import dataclasses
from typing import Any

from memfit.strategies.base import Setup


def change_arguments(setup: Setup, **fields: Any) -> None:
    """Set these on the run's own arguments, and note how to put them back."""
    before = {name: getattr(setup.args, name) for name in fields}

    def put_back() -> None:
        for name, value in before.items():
            setattr(setup.args, name, value)

    setup.undo.append(put_back)
    for name, value in fields.items():
        setattr(setup.args, name, value)


def is_users(setup: Setup, name: str) -> bool:
    """Whether the user chose this argument; where that is not known, whether it is not the default.

    A value that happens to be the default cannot be told from one that was never given.
    """
    if setup.user_set is not None:
        return name in setup.user_set
    return bool(plain_value(setup, name) != _default(setup, name))


def plain_value(setup: Setup, name: str) -> Any:
    """The argument as the user writes it: enumerations as their text."""
    value = getattr(setup.args, name)
    return getattr(value, "value", value)


def _default(setup: Setup, name: str) -> Any:
    field = next(field for field in dataclasses.fields(setup.args) if field.name == name)
    return getattr(field.default, "value", field.default)
