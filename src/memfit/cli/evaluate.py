"""`memfit evaluate`: how good a trained classifier is on a labelled table."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from memfit.cli import console
from memfit.cli.options import Backend, Json, PlainCommand, config_options
from memfit.config import DataConfig

# What belongs to splitting a table and training on it.
_NOT_HERE = (
    "path", "validation_file", "validation_split", "group_column", "task", "seed", "max_length",
)  # fmt: skip


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=PlainCommand)(evaluate)


@config_options(DataConfig, leave_out=_NOT_HERE)
def evaluate(
    ctx: typer.Context,
    options: dict[str, Any],
    model: Annotated[str, typer.Argument(help="An output folder or a hub id.")],
    data: Annotated[str, typer.Argument(help="A table of texts and labels.")],
    max_length: Annotated[
        int | None, typer.Option(help="Cut texts here; where the training did if not given.")
    ] = None,
    backend: Backend = "torch",
    as_json: Json = False,
) -> None:
    """Accuracy, F1, precision and recall per class, and the confusion matrix."""
    del ctx
    with console.working():
        from memfit import api

        evaluation = api.evaluate(model, data, max_length=max_length, backend=backend, **options)
    from memfit.records.results import trained_with_weights
    from memfit.records.run_warnings import answer_warnings

    warnings = answer_warnings(evaluation, weighted=trained_with_weights(model))
    if as_json:
        said = [one.to_dict() for one in warnings]
        console.show_json({"model": model, "data": data, **evaluation.to_dict(), "warnings": said})
        return
    from memfit.report import terminal

    out = terminal.console()
    out.print(terminal.metrics_table(evaluation))
    if warnings:
        out.print()
        out.print(terminal.warnings_list(warnings))
