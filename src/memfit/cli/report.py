"""`memfit report`: the page about a run, drawn again from what the run left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli import console
from memfit.cli.options import Json, PlainCommand
from memfit.i18n import t


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=PlainCommand)(report)


def report(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The output folder of a run.")],
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve it on localhost, with a box to try sentences.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write report.html from a run's files and say where it is."""
    if serve:
        _serve(folder, as_json=as_json)
        return
    from memfit.report.page import write_report

    with console.only_results_on_stdout():
        path = write_report(folder)
    if as_json:
        console.show_json({"report": path})
    else:
        console.show(str(path))


def _serve(folder: str, *, as_json: bool) -> None:
    from memfit.serve.server import require_server

    require_server()
    from memfit.i18n import chosen_language
    from memfit.serve.live import serve

    def say(url: str) -> None:
        if as_json:
            console.show_json({"url": url})
        else:
            console.show(url)
            console.say(t("only this machine can open it; Ctrl-C ends it"))

    serve(Path(folder).expanduser().absolute(), chosen_language(), say)
