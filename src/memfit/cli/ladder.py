"""`memfit ladder`: the recipe people copy, rung by rung, and memfit's plans, on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from memfit.cli import console
from memfit.cli.options import FlagCommand, Json, Quiet, config_options
from memfit.config import DataConfig, ModelConfig, RunConfig
from memfit.config.schema import DATA_SOURCES
from memfit.i18n import t

EPILOG = (
    "Rungs: baseline, accumulation, checkpointing, adafactor, frozen, tuned, shorter, plan; each "
    "on top of the ones before. TrainingArguments' fields are options under their own names: "
    "--batch-size 32, --epochs 2, --learning-rate 2e-5. Results go to ./ladder or --output-dir; "
    "the same command again goes on where it was stopped."
)


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=FlagCommand, epilog=EPILOG)(ladder)


@config_options(
    RunConfig,
    ModelConfig,
    DataConfig,
    # What changes no memory and no speed.
    leave_out=(
        "path", "plan", "on_nan", "class_weights", "threshold", "early_stopping", "positive_label",
        "gpus",
    ),
)  # fmt: skip
def ladder(
    ctx: typer.Context,
    options: dict[str, Any],
    data: Annotated[str | None, typer.Argument(help=f"{DATA_SOURCES}.")] = None,
    config: Annotated[
        str | None, typer.Option(help="A TOML file with any of these; options win over it.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps that are timed, after three to warm up.")] = 20,
    rungs: Annotated[
        list[str] | None, typer.Option(help="Only these, by name; the baseline always.")
    ] = None,
    plan_budget: Annotated[
        list[str] | None,
        typer.Option(help="What memfit plans for: 4GB, 80%, auto, or half of the baseline."),
    ] = None,
    quality: Annotated[
        bool, typer.Option("--quality", help="Train every rung to its end and compare F1.")
    ] = False,
    seeds: Annotated[int, typer.Option(help="Trainings a rung, for --quality.")] = 3,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what the folder already has.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the usual memory savings one by one, and memfit's plans, on your machine."""
    del ctx
    with console.working(quiet=quiet):
        from memfit import api

        found = api.ladder(
            data, config=config, steps=steps, rungs=rungs or (), plan_budgets=plan_budget or (),
            quality=quality, seeds=seeds, fresh=fresh, quiet=quiet, **options,
        )  # fmt: skip
    if as_json:
        console.show_json(found.as_json())
        return
    from memfit.ladders import show
    from memfit.report import terminal

    console.show(show.title(found))
    out = terminal.console()
    out.print()
    out.print(show.table(found))
    out.print()
    for sentence in show.sentences(found):
        out.print(sentence)
    out.print()
    # Paths are printed whole, however long: people copy them.
    console.show(t("{folder}: ladder.json, ladder.md", folder=found.folder))
