"""`memfit report`: the page about a run, drawn again from what the run left."""

from __future__ import annotations

from typing import Annotated

import typer

from memfit.cli import console
from memfit.cli.options import Json, PlainCommand


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=PlainCommand)(report)


def report(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The output folder of a run.")],
    as_json: Json = False,
) -> None:
    """Write report.html from a run's files and say where it is."""
    from memfit.report.page import write_report

    with console.only_results_on_stdout():
        path = write_report(folder)
    if as_json:
        console.show_json({"report": path})
    else:
        console.show(str(path))
