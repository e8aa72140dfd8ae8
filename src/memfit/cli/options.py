"""Options made from the configuration's fields: one place says their name, type and help."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer

from memfit.cli.flags import training_flags
from memfit.config import DataConfig, ModelConfig, RunConfig
from memfit.errors import ConfigError
from memfit.messages import Language, checked, t

_PANELS = {DataConfig: "Data", ModelConfig: "Model", RunConfig: "Run"}

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout; all else on stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]

NoCache = Annotated[
    bool,
    typer.Option("--no-cache", help="Plan and measure anew, whatever earlier runs have found out."),
]


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
            raise ConfigError(t("--lang needs a value; write --lang en or --lang zh"))
        spoken = checked(value if given else words.pop(0))
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
    """Every option may be left out; a mapping comes as several `key=value`."""
    if typing.get_origin(hint) in (Mapping, dict) or "Mapping" in str(hint):
        return list[str] | None
    return hint | None


def _help(text: str, default: Any) -> str:
    shown = isinstance(default, (str, int, float)) and not isinstance(default, bool)
    shown = shown and default != ""
    return f"{text.rstrip('.')} (default {default})." if shown else text
