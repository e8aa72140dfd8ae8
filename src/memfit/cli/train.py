"""`memfit train`: from a table to a classifier in a folder."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from memfit.cli import console
from memfit.cli.options import FlagCommand, Json, NoCache, Quiet, config_options
from memfit.config import DataConfig, ModelConfig, RunConfig, files
from memfit.config.schema import DATA_SOURCES
from memfit.errors import ConfigError
from memfit.i18n import t
from memfit.waiting import doing, telling

EPILOG = (
    "Every field of transformers' TrainingArguments is an option under its own name, with dashes "
    "or underscores: --learning-rate 3e-5, --bf16, --no-bf16, --optim adafactor; --batch-size and "
    "--epochs are short for --per-device-train-batch-size and --num-train-epochs."
)


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=FlagCommand, epilog=EPILOG)(train)


@config_options(RunConfig, ModelConfig, DataConfig, leave_out=("path",))
def train(
    ctx: typer.Context,
    options: dict[str, Any],
    data: Annotated[
        list[str] | None,
        typer.Argument(help=f"{DATA_SOURCES}."),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="A TOML file with any of these; options win over it.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run that --output-dir holds; begin it if there is none and data "
            "and model are named.",
        ),
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the report on localhost while it trains.")
    ] = False,
    no_cache: NoCache = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fine-tune a classifier on a table of texts and labels."""
    del ctx
    tables = data or []
    if len(tables) > 1:
        raise ConfigError(
            "memfit train takes one table and got {count}: {tables}; join them into one file, "
            "or train on each with its own --output-dir",
            count=len(tables),
            tables=", ".join(tables),
        )
    with (
        files.cache_unused(no_cache),
        telling(quiet=quiet),
        doing(t("preparing …")),
        console.only_results_on_stdout(),
    ):
        from memfit import api

        how: dict[str, Any] = {"resume": resume, "quiet": quiet, "watch": watch}
        result = api.finetune(tables[0] if tables else None, config=config, **how, **options)
    if as_json:
        console.show_json({"output_dir": result.output_dir, **result.summary.to_dict()})
        return
    from memfit.report import terminal

    out = terminal.console()
    out.print(terminal.metrics_table(result.evaluation))
    out.print()
    if result.summary.warnings:
        out.print(terminal.warnings_list(result.summary.warnings))
        out.print()
    told = dataclasses.replace(result.summary, metrics={})  # the table has said them
    out.print(terminal.training_result(told))
    # Paths are printed whole, however long: people copy them.
    console.show(terminal.fact("model", result.output_dir))
    console.show(terminal.fact("report", result.output_dir / "report.html"))
