"""`memfit export`: a trained classifier as ONNX, scored before it is handed over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli import console
from memfit.cli.options import Json, PlainCommand, config_options
from memfit.config import DataConfig
from memfit.errors import MemfitError
from memfit.i18n import t

if TYPE_CHECKING:
    from memfit.records.export_results import Export

# What belongs to splitting a table and training on it.
_NOT_HERE = (
    "path", "validation_file", "validation_split", "group_column", "task", "seed", "max_length",
)  # fmt: skip


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=PlainCommand)(export)


@config_options(DataConfig, leave_out=_NOT_HERE)
def export(
    ctx: typer.Context,
    options: dict[str, Any],
    run: Annotated[str, typer.Argument(metavar="RUN", help="An output folder or a hub id.")],
    to: Annotated[str, typer.Option(help="The format: onnx.")] = "onnx",
    int8: Annotated[
        bool, typer.Option("--int8", help="Also write a file with weights in 8 bits.")
    ] = False,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Write here instead of into RUN.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Score on this labelled table instead of the run's validation rows."),
    ] = None,
    most_lost: Annotated[
        float, typer.Option(help="Points of the headline metric that a file may lose.")
    ] = 0.5,
    as_json: Json = False,
) -> None:
    """Write ONNX files, with their size, speed and score beside torch's.

    A file that loses more than --most-lost points is not written, and the exit code is 1.
    """
    del ctx
    with console.working():
        from memfit.run.onnx_export import export as export_run

        made = export_run(
            run, to=to, int8=int8, output=output, data=data, most_lost=most_lost, **options
        )
    if as_json:
        console.show_json(made.to_dict())
    else:
        _show(made)
    if made.refused:
        raise MemfitError(made.refused)


def _show(made: Export) -> None:
    from memfit.report import sections, terminal

    measured = sections.export_table(made)
    table = terminal.table(*measured.head)
    for row in measured.rows:
        table.add_row(*row)
    terminal.console().print(table)
    console.say(t("scored on {rows}", rows=made.scored_on))
    console.say(t("written to {path}", path=made.folder / "onnx"))
