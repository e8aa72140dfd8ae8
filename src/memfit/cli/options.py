"""The options of every command: declared once, parsed, explained and refused.

English help is typer's own. Chinese has no spaces to wrap at and characters two cells wide,
which typer's formatter does not know.

A command made with `cls=FlagCommand` takes every field under its own name, with dashes or
underscores: `--learning-rate 3e-5`, `--bf16`, `--no-bf16`, `--bf16 false`, `--report-to a b`,
`--lr-scheduler-kwargs '{"num_cycles": 2}'`. They are taken out of the arguments before typer
parses the rest, since it would have to import torch to learn their names.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import shutil
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from memfit._compat import OLD_FIELDS, RENAMED
from memfit.config import DataConfig, ModelConfig, RunConfig
from memfit.config.training_fields import (
    MEANT,
    SHORT_NAMES,
    is_switch,
    takes_several,
    training_fields,
)
from memfit.errors import ConfigError, OutputError, nearest
from memfit.i18n import N_, Language, checked, language, t, template_of
from memfit.printing import cells, wrap
from memfit.run.signals import INTERRUPTED, handled, stop_at_once
from memfit.units import parse_bytes

if TYPE_CHECKING:
    from memfit.memory.cards import CardPlace

_WIDEST = 80
_MOST_NAME_CELLS = 30
_DEFAULT = re.compile(r" \(default (?P<value>[^()]*)\)\.$")
_EXTRAS = (("default: ", "默认 "), ("required", "必填"), ("; ", "；"))


class SpokenCommand(TyperCommand):
    """A command whose help is in the language spoken."""

    def get_help(self, ctx: Any) -> str:
        """The page that `--help` prints."""
        return str(super().get_help(ctx)) if language() == "en" else chinese_page(self, ctx)


class SpokenGroup(TyperGroup):
    """A command group whose help is translated."""

    def get_help(self, ctx: Any) -> str:
        """The page that `--help` prints."""
        return str(super().get_help(ctx)) if language() == "en" else chinese_page(self, ctx)


def chinese_page(command: Any, ctx: Any) -> str:
    """Usage, what the command does, its arguments, options and commands, and what else to know."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    usage = " ".join(command.collect_usage_pieces(ctx)).replace("[OPTIONS]", "[选项]")
    usage = usage.replace("COMMAND [ARGS]...", "命令 [参数]...")
    parts = [f"用法：{ctx.command_path} {usage}", _paragraph(command.help, width)]
    listed = {
        kind: [(name, text) for one, name, text in help_rows(command, ctx)
               if one.param_type_name == kind]
        for kind in ("argument", "option")
    }  # fmt: skip
    parts += [
        _section("参数", listed["argument"], width),
        _section("选项", listed["option"], width),
    ]
    if isinstance(command, TyperGroup):
        known = ((name, command.get_command(ctx, name)) for name in command.list_commands(ctx))
        rows = [(name, translated(one.help or "")) for name, one in known if one is not None]
        parts.append(_section("命令", rows, width))
    parts.append(_paragraph(command.epilog, width))
    return "\n\n".join(part for part in parts if part)


def help_rows(command: Any, ctx: Any) -> list[tuple[Any, str, str]]:
    """Each argument and option, how it is written, and what it is in the language spoken."""
    records = ((one, one.get_help_record(ctx)) for one in command.get_params(ctx))
    return [
        (one, said[0], said[1] if language() == "en" else _explained(one.help or "", said[1]))
        for one, said in records
        if said is not None
    ]


def translated(text: str) -> str:
    """A help text in Chinese, its default with it."""
    said = template_of(without_default(text)) if text else ""
    found = _DEFAULT.search(text)
    return f"{said.removesuffix('。')}（默认 {found['value']}）。" if found else said


def without_default(text: str) -> str:
    """A help text as the catalogue has it: without ` (default 0.1)`."""
    return _DEFAULT.sub(".", text)


def _explained(text: str, shown: str) -> str:
    """The help text with what typer adds to it: `[default: 32]`, `[required]`."""
    extra = shown.removeprefix(text).strip()
    for english, chinese in _EXTRAS:
        extra = extra.replace(english, chinese)
    return f"{translated(text)} {extra}".strip()


def _paragraph(text: str | None, width: int) -> str:
    lines = wrap(translated(text or ""), width - 4)
    return "\n".join(f"  {line}" for line in lines)


def _section(title: str, rows: Iterable[tuple[str, str]], width: int) -> str:
    """Names in one column and what they are in the next; a long name has a line of its own."""
    rows = list(rows)
    if not rows:
        return ""
    column = min(max(cells(name) for name, _ in rows), _MOST_NAME_CELLS) + 2
    lines = [f"{title}："]
    for name, text in rows:
        first, *rest = wrap(text, width - column - 4) or [""]
        if cells(name) > column - 2:
            lines.append(f"  {name}")
            name = ""
        lines.append(f"  {name}{' ' * (column - cells(name))}{first}")
        lines += [" " * (column + 2) + line for line in rest]
    return "\n".join(lines)


_COMMAND = re.compile(r"No such command (?P<name>'.*?'|\".*?\")\.")
_EXTRA = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((?P<words>.*)\)")


def refusal_sentence(error: Any) -> str:
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


_SWITCH_WORDS = {"include_num_input_tokens_seen": ("all", "non_padding")}
"""What a switch takes beside a truth value; any other word after it is the next argument."""


@dataclass(frozen=True, slots=True)
class OwnOption:
    """An option the command declares, and what may follow it.

    `alone` takes nothing, `switch` a truth value or nothing, `value` one, `several` many.
    """

    flag: str
    takes: str = "value"


def split_flags(
    arguments: Sequence[str], own: Mapping[str, OwnOption], *, training: bool = True
) -> tuple[list[str], dict[str, Any]]:
    """What typer shall parse, and the training fields with their values."""
    words, rest, fields_given = list(arguments), list[str](), dict[str, Any]()
    while words:
        word = words.pop(0)
        if word == "--":
            rest += [word, *words]
            break
        if not word.startswith("--"):
            rest.append(word)
            continue
        name, has_value, value = word[2:].partition("=")
        key = name.replace("-", "_")
        given = [value] if has_value else None
        if key in own:
            rest += _own_words(own[key], given, words)
        elif training and key.startswith("no_") and _is_switch(key[3:]):
            fields_given[_full(key[3:])] = False
        elif training and (_full(key) in training_fields() or key in OLD_FIELDS):
            fields_given[_full(key)] = _read_field(key, given, words)
        else:
            known = [*own, *((*SHORT_NAMES, *training_fields()) if training else ())]
            flags = ["--" + item.replace("_", "-") for item in known]
            meant = MEANT.get(key, key)
            hint = nearest("--" + meant.replace("_", "-"), flags).replace("'", "")
            raise ConfigError("there is no option {flag}.{hint}", flag=f"--{name}", hint=hint)
    return rest, fields_given


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
        raise ConfigError("{flag} needs a value", flag=flag)
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
            "{flag} is {value}; write true or false", flag=f"--{name}", value=repr(given[0])
        )
    return given[0].lower() in TRUE_WORDS


def _read_field(key: str, given: list[str] | None, words: list[str]) -> Any:
    name = _full(RENAMED.get(key, key))
    flag = "--" + key.replace("_", "-")
    if _is_switch(key):
        if given is None and words and words[0] in _SWITCH_WORDS.get(name, ()):
            given = [words.pop(0)]
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
            raise ConfigError("{flag} is not JSON: {reason}", flag=flag, reason=error) from None
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
                    raise ConfigError(refusal, flag=flag, value=repr(text)) from None
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
        """Runs the command; each signal ends it with its own exit code."""
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


_PANELS = {DataConfig: "Data", ModelConfig: "Model", RunConfig: "Run"}
Backend = Annotated[
    str, typer.Option(help="torch, or a file that memfit export wrote: onnx, onnx-int8.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout; all else on stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]

NoCache = Annotated[
    bool,
    typer.Option("--no-cache", help="Plan and measure anew, whatever earlier runs have found out."),
]


Windows = Annotated[
    bool | None,
    typer.Option(
        help="Whether Windows drives the card of --gpu; as here if not said.", show_default=False
    ),
]

Display = Annotated[
    bool, typer.Option("--display", help="The card of --gpu shows a desktop as well.")
]

Reserved = Annotated[
    str | None, typer.Option(help="What others hold of the card of --gpu, such as 600MB.")
]


def check_target(path: str, sentence: str) -> Path:
    """Refuses a file that cannot be written, by this sentence, before anything is computed."""
    target = Path(path).expanduser()
    if not target.parent.is_dir() or target.is_dir():
        raise OutputError(sentence, path=path)
    return target


def check_card(
    gpu: str | None, windows: bool | None = None, display: bool = False, reserved: str | None = None
) -> CardPlace | None:
    """Refuses a card that is not known before seconds are spent on imports.

    Returns the machine it is in, where anything was said of it.
    """
    from memfit.memory.cards import CardPlace, find_card

    place = CardPlace(windows, display, None if reserved is None else parse_bytes(reserved))
    elsewhere = gpu is not None and gpu.strip().lower() != "cpu"
    if not elsewhere and place != CardPlace():
        raise ConfigError(
            "--windows, --display and --reserved describe the machine of a card that is not "
            "here; name the card with --gpu (of this machine's card all is measured)"
        )
    if gpu is not None and elsewhere:
        find_card(gpu)
    return None if place == CardPlace() else place


def take_language(arguments: Sequence[str]) -> tuple[list[str], Language | None]:
    """The arguments without `--lang X`, wherever it stands, and X.

    Taken before anything is parsed, so that what is wrong with the rest is said in it.
    """
    words, rest = list(arguments), list[str]()
    spoken: Language | None = None
    while words:
        word = words.pop(0)
        if word == "--":
            return [*rest, word, *words], spoken
        name, given, value = word.partition("=")
        if name != "--lang":
            rest.append(word)
            continue
        if not given and not words:
            raise ConfigError("--lang needs a value; write --lang en or --lang zh")
        try:
            spoken = checked(value if given else words.pop(0))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return rest, spoken


def config_options(
    *kinds: type, leave_out: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds an option for each field; the command gets all that were given as `options`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        made = [item for kind in kinds for item in _parameters(kind, leave_out)]
        declared = [item for item in signature.parameters.values() if item.name != "options"]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            ctx: typer.Context = values["ctx"]
            options = {item.name: values.pop(item.name) for item in made}
            given = {key: value for key, value in options.items() if value not in (None, [])}
            command(**values, options={**given, **training_flags(ctx)})

        run.__signature__ = signature.replace(parameters=[*declared, *made])  # type: ignore[attr-defined]
        return run

    return decorate


def _parameters(kind: type, leave_out: tuple[str, ...]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(kind)
    return [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                _cli_type(hints[item.name]),
                typer.Option(
                    help=_help(item.metadata["help"], item.default),
                    rich_help_panel=_PANELS[kind],
                    show_default=False,
                ),
            ],
        )
        for item in fields(kind)
        if "help" in item.metadata and item.name not in leave_out
    ]


def _cli_type(hint: Any) -> Any:
    """Every option may be left out; a mapping comes as several `key=value`, or as one word."""
    if typing.get_origin(hint) is Mapping:
        return list[str] | None
    return str | None if str in typing.get_args(hint) else hint | None


def _help(text: str, default: Any) -> str:
    shown = isinstance(default, (str, int, float)) and not isinstance(default, bool)
    shown = shown and default != ""
    return f"{text.rstrip('.')} (default {default})." if shown else text
