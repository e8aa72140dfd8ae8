"""`--help` in Chinese: the same page as typer's, its texts translated and wrapped by cells.

English help is typer's own. Chinese has no spaces to wrap at and characters two cells wide,
which typer's formatter does not know.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from memfit.messages import language, template_of
from memfit.wrapping import cells, wrap

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
    """The same for the command of commands."""

    def get_help(self, ctx: Any) -> str:
        """The page that `--help` prints."""
        return str(super().get_help(ctx)) if language() == "en" else chinese_page(self, ctx)


def chinese_page(command: Any, ctx: Any) -> str:
    """Usage, what the command does, its arguments, options and commands, and what else to know."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    usage = " ".join(command.collect_usage_pieces(ctx)).replace("[OPTIONS]", "[选项]")
    usage = usage.replace("COMMAND [ARGS]...", "命令 [参数]...")
    parts = [f"用法：{ctx.command_path} {usage}", _paragraph(command.help, width)]
    listed: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            name, text = record
            listed[param.param_type_name].append((name, _explained(param.help or "", text)))
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


def translated(text: str) -> str:
    """A help text in Chinese, its default with it."""
    said = template_of(without_default(text)) if text else ""
    found = _DEFAULT.search(text)
    return f"{said.removesuffix('。')}（默认 {found['value']}）。" if found else said


def without_default(text: str) -> str:
    """A help text as the catalogue has it: without ` (default 0.1)`."""
    return _DEFAULT.sub(".", text)


def _explained(text: str, shown: str) -> str:
    """With what typer adds to it: `[default: 32]`, `[required]`."""
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
