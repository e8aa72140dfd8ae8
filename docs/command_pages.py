"""The pages of the command line list every command and option, in the words of `--help`.

A Sphinx extension: it puts the list and the tables where the pages `commands` mark them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from languages import complete

from memfit.cli import app
from memfit.cli.options import help_rows, translated
from memfit.i18n import Language, speaking

PAGES: dict[str, Language] = {"commands": "en", "zh/commands": "zh"}
LIST, HELP = "<!-- the list of commands -->", "<!-- the help of every command -->"
_PANELS = {
    "en": {"argument": "Arguments", "option": "Options", "Run": "The run", "Model": "The model",
           "Data": "The data"},
    "zh": {"argument": "参数", "option": "选项", "Run": "训练", "Model": "模型", "Data": "数据"},
}  # fmt: skip


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    complete(app, PAGES, completed)
    return {"parallel_read_safe": True}


def completed(text: str, spoken: Language) -> str:
    """The page with the list and the help where they are marked."""
    with speaking(spoken):
        root: Any = typer.main.get_command(app)
        top = root.context_class(root, info_name="memfit")
        told = [_section(command, top, spoken) for command in root.commands.values()]
        rows = [
            (f"[`memfit {name}`](#memfit-{name})", _said(command.help))
            for name, command in root.commands.items()
        ]
    return text.replace(LIST, _table(rows)).replace(HELP, "\n".join(told))


def _section(command: Any, top: Any, spoken: Language) -> str:
    ctx = command.context_class(command, info_name=command.name, parent=top)
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    if spoken == "zh":
        usage = usage.replace("[OPTIONS]", "[选项]")
    rows = help_rows(command, ctx)
    tables = [
        f"**{_PANELS[spoken][kind]}**\n\n"
        + _table((f"`{name}`", _marked(text)) for _, name, text in grouped)
        for kind, grouped in _by_panel(rows)
    ]
    parts = [f"## memfit {command.name}", _said(command.help), f"```text\n{usage}\n```", *tables]
    return "\n\n".join([*parts, *([_said(command.epilog)] if command.epilog else [])]) + "\n"


def _by_panel(
    rows: list[tuple[Any, str, str]],
) -> Iterator[tuple[str, Iterable[tuple[Any, str, str]]]]:
    """Arguments first, then the command's own options, then those of the run, model and data."""

    def panel(row: tuple[Any, str, str]) -> str:
        return getattr(row[0], "rich_help_panel", None) or str(row[0].param_type_name)

    order = list(_PANELS["en"])
    rows = [row for row in rows if "--help" not in row[0].opts]
    return itertools.groupby(sorted(rows, key=lambda row: order.index(panel(row))), panel)


def _said(text: str | None) -> str:
    return _marked(translated(text or ""))


def _marked(text: str) -> str:
    """Options as code, which keeps their two dashes."""
    return re.sub(r"(?<![\w-])--[a-z][a-z0-9-]*(?: \d[\w.-]*)?", r"`\g<0>`", text)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = (f"| {name} | {text} |".replace("\n", " ") for name, text in rows)
    return "\n".join(["|  |  |", "| --- | --- |", *lines]) + "\n"
