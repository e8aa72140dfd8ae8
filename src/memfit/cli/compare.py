"""`memfit compare`: runs beside each other, as a table and as a page."""

from __future__ import annotations

from typing import Annotated

import typer

from memfit.cli import console
from memfit.cli.options import Json, PlainCommand


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=PlainCommand)(compare)


def compare(
    folders: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR...", help="Output folders of runs, or a folder that holds them."
        ),
    ],
    output: Annotated[str, typer.Option(help="Where the page goes.")] = "comparison.html",
    as_json: Json = False,
) -> None:
    """Put runs beside each other: settings that differ, metrics, memory, time, curves."""
    from memfit import api
    from memfit.report import terminal

    with console.only_results_on_stdout():
        compared = api.compare(*folders)
        page = compared.write_page(output)
    if as_json:
        console.show_json({**compared.to_dict(), "page": page})
        return
    terminal.console().print(compared)
    console.show(terminal.fact("report", page))
