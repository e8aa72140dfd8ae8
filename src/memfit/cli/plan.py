"""`memfit plan`: the fastest way of training that fits, with its reasons, before it is run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli import console
from memfit.cli.options import (
    Display,
    FlagCommand,
    Json,
    NoCache,
    Reserved,
    Windows,
    check_card,
    check_target,
    config_options,
)
from memfit.config import DataConfig, ModelConfig, RunConfig, files
from memfit.config.schema import DATA_SOURCES
from memfit.errors import DoesNotFitError
from memfit.i18n import N_, language, t
from memfit.units import format_both
from memfit.waiting import doing

if TYPE_CHECKING:
    from memfit.memory.cards import CardPlace
    from memfit.planner.advice import NothingFitsError
    from memfit.run.prepare import Prepared

EPILOG = (
    "Every option of memfit train is one of memfit plan, and what you set is kept. The plan is a "
    "file: edit it, commit it, train by it with memfit train --plan plan.toml, and see whether it "
    "still fits with memfit plan --check plan.toml (exit code 3 where it does not)."
)

_CANNOT_WRITE = N_("cannot write the plan {path}: name a file in a folder that is there")


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=FlagCommand, epilog=EPILOG)(plan)


@config_options(
    RunConfig, ModelConfig, DataConfig, leave_out=("path", "output_dir", "plan", "on_nan")
)
def plan(
    ctx: typer.Context,
    options: dict[str, Any],
    data: Annotated[str | None, typer.Argument(help=f"{DATA_SOURCES}.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="A card by name ('RTX 3050 4GB', T4) or cpu; yours if none.")
    ] = None,
    windows: Windows = None,
    display: Display = False,
    reserved: Reserved = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Write the plan here, as TOML.")
    ] = None,
    check: Annotated[
        str | None, typer.Option(help="A plan.toml: does it still fit? Changes nothing.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="A TOML file with any of these; options win over it.")
    ] = None,
    no_cache: NoCache = False,
    as_json: Json = False,
) -> None:
    """Plan a training inside a budget: each decision and its reason, memory and time."""
    del ctx
    place = check_card(gpu, windows, display, reserved)
    target = check_target(output, _CANNOT_WRITE) if output is not None else None
    if data is not None:
        options = {**options, "path": data}
    with files.cache_unused(no_cache):
        if check is not None:
            _check(check, config, gpu, place, options, as_json)
        else:
            _plan(target, config, gpu, place, options, as_json)


def _plan(
    target: Path | None,
    config: str | None,
    gpu: str | None,
    place: CardPlace | None,
    options: dict[str, Any],
    as_json: bool,
) -> None:
    began = time.perf_counter()
    run = RunConfig.build(config, **options)
    with console.working():
        from memfit.planner.advice import NothingFitsError, alternatives
        from memfit.report import plan_json, plan_terminal, terminal
        from memfit.run.prepare import prepare_to_plan

        prepared = prepare_to_plan(run, gpu, place)
        with doing(t("planning …")):
            try:
                made = prepared.plan()
            except NothingFitsError as error:
                failed: NothingFitsError | None = error
            else:
                failed, other = None, alternatives(made)
    if failed is not None:
        raise _nothing_fits(prepared, failed, as_json)
    if target is not None:
        made.chosen.write(target, language())
    if as_json:
        console.show_json(plan_json.planning_json(run.model.model, prepared.task, made, other))
    else:
        assert made.chosen.price is not None
        seconds = plan_json.run_seconds(prepared.task, made.chosen.price)
        name = Path(run.model.model).name
        view = plan_terminal.plan_view(
            made, other, seconds, name, planned_seconds=time.perf_counter() - began
        )
        terminal.console().print(view)
        if prepared.task.card is None and gpu is None:
            console.say(t("there is no GPU here; plan for one with --gpu NAME"))
    if target is not None:
        console.say(t("written to {path}", path=target))


def _nothing_fits(prepared: Prepared, error: NothingFitsError, as_json: bool) -> DoesNotFitError:
    """Shows the smallest plan; the sentence itself is the error's."""
    from memfit.report import plan_json, plan_terminal, terminal

    if as_json:
        model = prepared.config.model.model
        console.show_json(plan_json.nothing_fits_json(model, prepared.task, error))
    else:
        terminal.console().print(plan_terminal.smallest_view(error.smallest, error.notes))
    return DoesNotFitError(error.text(language()))


def _check(
    path: str,
    config: str | None,
    gpu: str | None,
    place: CardPlace | None,
    options: dict[str, Any],
    as_json: bool,
) -> None:
    with console.working():
        from memfit.planner import plan as plans
        from memfit.report import plan_json
        from memfit.run.choose_plan import does_not_fit_sentence
        from memfit.run.prepare import prepare_to_plan
        from memfit.run.resume import stored_options

        plan = plans.Plan.read(Path(path))
        stored, card, there = stored_options(plan.run)
        run = RunConfig.build(config, **{**stored, **options})
        prepared = prepare_to_plan(run, gpu or card, place if gpu else there)
        with doing(t("planning …")):
            checked = plans.check(plan, prepared.task)
    if as_json:
        console.show_json(plan_json.checked_json(run.model.model, prepared.task, checked))
    if not checked.fits:
        raise DoesNotFitError(does_not_fit_sentence(checked, path))
    if as_json:
        return
    price = checked.plan.price
    assert price is not None
    sentence = t(
        "{name} fits: {needs} of {budget}, a step in {step}",
        name=path,
        needs=format_both(price.device_bytes),
        budget=format_both(prepared.task.budget_bytes),
        step=f"{price.step_seconds:.3g} s",
    )
    console.show(sentence)
    if checked.changed:
        console.show(t("changed since: {what}", what="; ".join(checked.changed)))
