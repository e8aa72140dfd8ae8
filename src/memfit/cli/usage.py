"""What typer refuses, in memfit's words and in the language spoken."""

from __future__ import annotations

import re
from typing import Any

from memfit.errors import nearest
from memfit.messages import t

_COMMAND = re.compile(r"No such command (?P<name>'.*?'|\".*?\")\.")
_EXTRA = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((?P<words>.*)\)")


def sentence(error: Any) -> str:
    """One of typer's usage errors; as it is written where there are no words for it here."""
    said: str = error.format_message()
    kinds = {kind.__name__ for kind in type(error).__mro__}
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    command = "" if context is None else context.command_path.partition(" ")[2]
    if "MissingParameter" in kinds and param is not None:
        return t(
            "{name} is missing; see memfit {command} --help", name=_name(param), command=command
        )
    if "BadParameter" in kinds and param is not None:
        return _wrong_value(_name(param), error.message)
    if "NoSuchOption" in kinds:
        return t("there is no option {flag}.{hint}", flag=error.option_name, hint="")
    if "BadOptionUsage" in kinds and "does not take a value" in said:
        return t("{flag} takes no value", flag=error.option_name)
    if found := _EXTRA.fullmatch(said):
        return t(
            "more was given than memfit {command} takes: {words}",
            command=command,
            words=found["words"],
        )
    if (found := _COMMAND.match(said)) and context is not None:
        hint = nearest(found["name"].strip("'\""), context.command.commands)
        return t("there is no command {name}.{hint}", name=found["name"], hint=hint)
    return said


def _wrong_value(flag: str, reason: str) -> str:
    if "valid integer" in reason:
        return t("{flag} takes a whole number", flag=flag)
    if "valid number" in reason or "valid float" in reason:
        return t("{flag} takes a number", flag=flag)
    return t("{flag} has a value it does not take: {reason}", flag=flag, reason=reason)


def _name(param: Any) -> str:
    """As a person writes it: `--seed`, `DIR`."""
    flags = [flag for flag in param.opts if flag.startswith("-")]
    return str(max(flags, key=len) if flags else param.metavar or param.name)
