"""TrainingArguments' fields as flags, beside the options a command declares itself.

A command made with `cls=FlagCommand` takes every field under its own name, with dashes or
underscores: `--learning-rate 3e-5`, `--bf16`, `--no-bf16`, `--bf16 false`, `--report-to a b`,
`--lr-scheduler-kwargs '{"num_cycles": 2}'`. They are taken out of the arguments before typer
parses the rest, since it would have to import torch to learn their names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer

from memfit._compat import OLD_FIELDS, RENAMED
from memfit.cli.help import SpokenCommand
from memfit.errors import ConfigError, nearest
from memfit.messages import N_, t
from memfit.signals import INTERRUPTED, handled, stop_at_once
from memfit.training_fields import SHORT_NAMES, is_switch, takes_several, training_fields

TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})

# Switches that transformers 5 no longer has; every other old field took a value.
OLD_SWITCHES = frozenset(
    {
        "adafactor", "evaluate_during_training", "group_by_length", "include_inputs_for_metrics",
        "include_tokens_per_second", "jit_mode_eval", "overwrite_output_dir", "save_safetensors",
        "tpu_metrics_debug", "use_ipex", "use_legacy_prediction_loop", "use_mps_device",
        "dispatch_batches", "split_batches",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OwnOption:
    """An option the command declares, and what may follow it.

    `alone` takes nothing, `switch` a truth value or nothing, `value` one, `several` many.
    """

    flag: str
    takes: str = "value"


@dataclass(slots=True)
class _Split:
    rest: list[str] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)


def split_flags(
    arguments: Sequence[str], own: Mapping[str, OwnOption], *, training: bool = True
) -> tuple[list[str], dict[str, Any]]:
    """What typer shall parse, and the training fields with their values."""
    words, split = list(arguments), _Split()
    while words:
        word = words.pop(0)
        if word == "--":
            split.rest += [word, *words]
            break
        if not word.startswith("--"):
            split.rest.append(word)
            continue
        name, has_value, value = word[2:].partition("=")
        key = name.replace("-", "_")
        given = [value] if has_value else None
        if key in own:
            split.rest += _own_words(own[key], given, words)
        elif training and key.startswith("no_") and _is_switch(key[3:]):
            split.training[_full(key[3:])] = False
        elif training and (_full(key) in training_fields() or key in OLD_FIELDS):
            split.training[_full(key)] = _read_field(key, given, words)
        else:
            known = [*own, *((*SHORT_NAMES, *training_fields()) if training else ())]
            flags = ["--" + item.replace("_", "-") for item in known]
            hint = nearest("--" + key.replace("_", "-"), flags).replace("'", "")
            raise ConfigError(t("there is no option {flag}.{hint}", flag=f"--{name}", hint=hint))
    return split.rest, split.training


def _full(key: str) -> str:
    return SHORT_NAMES.get(key, key)


def _is_switch(key: str) -> bool:
    return is_switch(RENAMED.get(key, key)) or key in OLD_SWITCHES


def _own_words(option: OwnOption, given: list[str] | None, words: list[str]) -> list[str]:
    """The option as typer reads it: one flag a value, `--no-x` for `--x false`."""
    if option.takes == "alone":
        return [option.flag if given is None else f"{option.flag}={given[0]}"]
    if option.takes == "switch":
        on = _read_switch(given, words, option.flag[2:])
        return [option.flag if on else option.flag.replace("--", "--no-", 1)]
    several = option.takes == "several"
    values = given if given is not None else _take_values(option.flag, words, several)
    return [f"{option.flag}={value}" for value in values]


def _take_values(flag: str, words: list[str], several: bool) -> list[str]:
    if not words or words[0].startswith("--"):
        raise ConfigError(t("{flag} needs a value", flag=flag))
    values = [words.pop(0)]
    # `0=negative 1=positive data.csv`: what looks like the first value belongs to it.
    while several and words and not words[0].startswith("-"):
        if ("=" in values[0]) != ("=" in words[0]):
            break
        values.append(words.pop(0))
    return values


def _read_switch(given: list[str] | None, words: list[str], name: str) -> bool:
    """A switch stands for true; a word after it counts only when it is a truth value."""
    if given is None:
        if not words or words[0].lower() not in TRUE_WORDS | FALSE_WORDS:
            return True
        given = [words.pop(0)]
    if given[0].lower() not in TRUE_WORDS | FALSE_WORDS:
        raise ConfigError(
            t("{flag} is {value}; write true or false", flag=f"--{name}", value=repr(given[0]))
        )
    return given[0].lower() in TRUE_WORDS


def _read_field(key: str, given: list[str] | None, words: list[str]) -> Any:
    name = _full(RENAMED.get(key, key))
    flag = "--" + key.replace("_", "-")
    if _is_switch(key):
        free_text = "str" in training_fields().get(name, "")
        if free_text and given is not None and given[0].lower() not in TRUE_WORDS | FALSE_WORDS:
            return given[0]
        return _read_switch(given, words, flag[2:])
    several = takes_several(name)
    values = given if given is not None else _take_values(flag, words, several)
    if several and (len(values) > 1 or "str" not in training_fields()[name].split("list[")[0]):
        return values
    return _read_value(flag, values[0], training_fields().get(name, "float | str"))


def _read_value(flag: str, text: str, annotation: str) -> Any:
    if "dict" in annotation and text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(t("{flag} is not JSON: {reason}", flag=flag, reason=error)) from None
    kinds = {kind.strip() for kind in annotation.split("|")}
    for kind, read, refusal in (
        ("int", int, N_("{flag} is {value}; it takes a whole number")),
        ("float", float, N_("{flag} is {value}; it takes a number")),
    ):
        if kind in kinds:
            try:
                return read(text)
            except ValueError:
                if "str" not in kinds:
                    said = {"flag": flag, "value": repr(text)}
                    raise ConfigError(t(refusal, **said)) from None
    return text


class CommandStopped(Exception):  # noqa: N818 - it is no error to stop when asked to
    """A signal ended the command; typer would forget which."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


class PlainCommand(SpokenCommand):
    """A command whose options may be written with dashes or underscores."""

    takes_training = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes the training flags out, where there are any, and lets typer parse the rest."""
        own = {
            flag[2:].replace("-", "_"): OwnOption(flag, _takes(param, flag))
            for param in self.get_params(ctx)
            for flag in (*param.opts, *param.secondary_opts)
            if flag.startswith("--")
        }
        rest, ctx.obj = split_flags(args, own, training=self.takes_training)
        parsed: list[str] = super().parse_args(ctx, rest)
        return parsed

    def invoke(self, ctx: Any) -> Any:
        """Runs it; signals that end it are told apart."""
        try:
            with handled(stop_at_once):
                return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise CommandStopped(getattr(error, "exit_code", INTERRUPTED)) from error


def _takes(param: Any, flag: str) -> str:
    if getattr(param, "is_flag", False):
        return "switch" if param.secondary_opts and flag in param.opts else "alone"
    return "several" if getattr(param, "multiple", False) else "value"


class FlagCommand(PlainCommand):
    """A command that also takes TrainingArguments' fields; they arrive in `ctx.obj`."""

    takes_training = True


def training_flags(ctx: typer.Context) -> dict[str, Any]:
    """The training fields a FlagCommand was given."""
    return dict(ctx.obj or {})
