"""`memfit doctor`: what is installed, what is missing for what, what a card can train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli import console
from memfit.cli.flags import PlainCommand
from memfit.cli.options import Json
from memfit.units import format_both, format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from memfit.doctor.diagnosis import Diagnosis
    from memfit.doctor.environment import Environment
    from memfit.doctor.reach import Cell

_SHOWN = ("torch", "transformers", "accelerate", "datasets", "huggingface_hub", "scikit-learn")


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=PlainCommand)(doctor)


def doctor(
    gpu: Annotated[
        str | None,
        typer.Option(help="Judge for a card by name ('RTX 3060', T4) instead of this machine's."),
    ] = None,
    table: Annotated[bool, typer.Option(help="Whether to price the well-known models.")] = True,
    as_json: Json = False,
) -> None:
    """Versions, the GPU, what is missing for which strategy, and what the card can train."""
    from memfit.doctor.diagnosis import diagnose

    with console.only_results_on_stdout():
        found = diagnose(gpu, table=table, say=console.say)
    if as_json:
        console.show_json(found.as_json())
    else:
        _show(found)
    if not found.works:
        raise typer.Exit(1)


def _show(found: Diagnosis) -> None:
    from memfit.report import terminal

    out = terminal.console()
    here = found.environment
    console.show(f"memfit {here.memfit}, Python {here.python}, {here.platform}")
    console.show(", ".join(_version(here, name) for name in _SHOWN))
    for line in _cards(here):
        console.show(line)
    for one in found.findings:
        console.show(f"\n{one.kind}: {one.text}")
        if one.command:
            console.show(f"    {one.command}")
    for table in _tables(found):
        out.print()
        out.print(table)
    if found.card is None and found.works:
        console.show("\nWhat a card can train: memfit doctor --gpu 'RTX 3060'")


def _version(here: Environment, name: str) -> str:
    version = here.package(name).version
    if version is None:
        return f"no {name}"
    if name == "torch":
        cuda = here.torch.cuda
        return f"torch {version} ({f'CUDA {cuda}' if cuda else 'no CUDA'})"
    return f"{name} {version}"


def _cards(here: Environment) -> list[str]:
    lines = []
    for card in here.cards:
        capability = ".".join(map(str, card.capability))
        free = format_bytes(card.free_bytes)
        memory = f"{format_both(card.total_bytes)}, {free} of it free"
        lines.append(f"{card.name}, compute capability {capability}, {memory}")
    if here.driver is not None:
        newest = ".".join(map(str, here.driver.cuda))
        lines.append(f"driver {here.driver.version}, which runs CUDA up to {newest}")
    free = format_bytes(here.host_free_bytes)
    lines.append(f"host memory {format_both(here.host_bytes)}, {free} of it free")
    return lines


def _tables(found: Diagnosis) -> list[RenderableType]:
    tables = [_packages(found.environment)]
    if found.strategies:
        tables.append(_strategies(found))
    if found.trains:
        tables.append(_trains(found))
    return tables


def _words(*columns: str) -> Table:
    """A table of words, all to the left."""
    from memfit.report import terminal

    made = terminal.table(*columns)
    for column in made.columns:
        column.justify = "left"
    return made


def _packages(here: Environment) -> RenderableType:
    shown = _words("optional package", "version", "for")
    for one in here.packages:
        if not one.required:
            purpose = f"{one.purpose}\n{one.command}" if one.lacking else one.purpose
            shown.add_row(one.name, one.version or "–", purpose)
    return shown


def _strategies(found: Diagnosis) -> RenderableType:
    where = "here" if found.card is None else f"on {found.card.name}"
    shown = _words("strategy", "fidelity", where)
    for one in found.strategies:
        said = one.reason or ("ready" if not one.note else f"ready; {one.note}")
        shown.add_row(one.strategy, one.fidelity, f"{said}\n{one.command}" if one.command else said)
    return shown


def _trains(found: Diagnosis) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from memfit.doctor.reach import ROWS, TOKENS
    from memfit.report import terminal

    assert found.card is not None
    title = Text(
        f"What {found.card.name} can train in {format_both(found.budget_bytes)}: "
        f"batches of {ROWS} texts of {TOKENS} tokens",
        style="bold",
    )
    shown = terminal.table("model", "exact", "rounding", "with --allow")
    for one in found.trains:
        if one.problem:
            shown.add_row(one.model.name, "cannot be priced")
            continue
        cells = (_cell(one.exact), _cell(one.rounding), _cell(one.allowed))
        shown.add_row(one.model.name, *cells)
    foot = Text(
        "memory and texts a second of the fastest plan that fits, predicted; in brackets what the "
        "smallest would need. exact: the same numbers; rounding: fewer bits, no loss of quality "
        "that was measured; --allow: another optimizer, LoRA, frozen weights, shorter texts. "
        "Everywhere else every parameter learns",
        style="dim",
    )
    return Group(title, shown, foot)


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "not needed"
    size = f"{cell.device_bytes / 10**9:.1f} GB"
    return f"{size}, {cell.texts_per_second:,.0f}/s" if cell.fits else f"no ({size})"
