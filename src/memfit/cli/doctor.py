"""`memfit doctor`: what is installed, what is missing for what, what a card can train."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli import console
from memfit.cli.options import Display, Json, PlainCommand, Reserved, Windows, check_card
from memfit.errors import ConfigError
from memfit.i18n import N_, t
from memfit.printing import wrap
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
    windows: Windows = None,
    display: Display = False,
    reserved: Reserved = None,
    table: Annotated[bool, typer.Option(help="Whether to price the well-known models.")] = True,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure this machine's card, or CPU, in about a minute, and keep it for plans.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Versions, the GPU, what is missing for which strategy, and what the card can train."""
    place = check_card(gpu, windows, display, reserved)
    if measure:
        _measure(gpu, as_json)
        return
    with console.working():
        from memfit.doctor.diagnosis import diagnose

        found = diagnose(gpu, place, table=table)
    if as_json:
        console.show_json(found.as_json())
    else:
        _show(found)
    if not found.works:
        raise typer.Exit(1)


def _measure(gpu: str | None, as_json: bool) -> None:
    if gpu is not None:
        raise ConfigError(t("--measure is for the card of this machine; leave --gpu out"))
    with console.working():
        from memfit.doctor.measure import WHAT, measure

        made = measure()
    if as_json:
        console.show_json({**asdict(made), "pasted": made.pasted()})
        return
    console.show(made.device)
    for name, found in made.found.items():
        console.show(f"  {_measured(name, found)}")
    for name, reason in made.failed.items():
        console.show("  " + t("{what}: no ({reason})", what=t(WHAT[name]), reason=reason))
    if made.device == "CPU":
        console.show("\n" + t("There is no GPU here: the CPU was measured."))
    if not made.row:
        return
    console.show("\n" + t("Kept for plans on this machine and for plan --gpu."))
    console.show(t("To help others, paste this into an issue of memfit:") + "\n")
    console.show(made.pasted())


_SENTENCES = {
    "context": N_("{empty_bytes} empty, {loaded_bytes} with the libraries of a training"),
    "usable": N_(
        "{reached_bytes} of the {free_bytes} called free could be filled, {refused_bytes} were "
        "refused; the card has {total_bytes}"
    ),
    "process": N_("{resident_bytes} before any model, {free_bytes} of {total_bytes} free"),
    "heap": N_(
        "of {asked_bytes} in small blocks {kept_in_gaps_bytes} stay when every second is freed, "
        "{kept_after_trim_bytes} after a trim"
    ),
    "cpu": N_(
        "{fp32_flops} in fp32, {half_flops} in half precision, memory {memory_bytes_per_second}, "
        "{launch_seconds} an operator"
    ),
}


def _measured(name: str, found: Any) -> str:
    """One line of what was measured."""
    from memfit.doctor.measure import WHAT

    if isinstance(found, dict):
        text = t(_SENTENCES[name], **{key: _amount(key, one) for key, one in found.items()})
    else:
        text = t("yes") if found is True else _amount(name, found)
    return t("{what}: {found}", what=t(WHAT[name]), found=text)


def _amount(name: str, value: float) -> str:
    """A number in the unit that its name ends in."""
    if name.endswith("_bytes"):
        return format_bytes(round(value))
    if name.endswith("_flops"):
        return f"{value / 1e12:.3g} TFLOP/s"
    if name.endswith("_bytes_per_second") or name == "bus_back":
        return f"{value / 1e9:.3g} GB/s"
    if name.endswith("_seconds"):
        return f"{value * 1e6:.3g} µs"
    return f"{value:.3g}"


_FINDINGS = {
    "problem": N_("problem: {text}"),
    "note": N_("note: {text}"),
}


def _show(found: Diagnosis) -> None:
    from memfit.report import terminal

    out = terminal.console()
    here = found.environment
    console.show(terminal.listed([f"memfit {here.memfit}", f"Python {here.python}", here.platform]))
    console.show(terminal.listed(_version(here, name) for name in _SHOWN))
    for line in _cards(here):
        console.show(line)
    for one in found.findings:
        console.show("\n" + t(_FINDINGS[one.kind], text=one.text))
        if one.command:
            console.show(f"    {one.command}")
    for table in _tables(found):
        out.print()
        out.print(table)
    if found.card is None and found.works:
        console.show("\n" + t("What a card can train: memfit doctor --gpu 'RTX 3060'"))


def _version(here: Environment, name: str) -> str:
    version = here.package(name).version
    if version is None:
        return t("no {name}", name=name)
    if name == "torch":
        kind = (
            N_("torch {version} (CUDA {cuda})")
            if here.torch.cuda
            else N_("torch {version} (no CUDA)")
        )
        return t(kind, version=version, cuda=here.torch.cuda)
    return f"{name} {version}"


def _cards(here: Environment) -> list[str]:
    lines = []
    for card in here.cards:
        said = {
            "name": card.name,
            "capability": ".".join(map(str, card.capability)),
            "total": format_both(card.total_bytes),
            "free": format_bytes(card.free_bytes),
        }
        lines.append(
            t("{name}, compute capability {capability}, {total}, {free} of it free", **said)
        )
    if here.driver is not None:
        newest = ".".join(map(str, here.driver.cuda))
        lines.append(
            t(
                "driver {version}, which runs CUDA up to {cuda}",
                version=here.driver.version,
                cuda=newest,
            )
        )
    free, total = format_bytes(here.host_free_bytes), format_both(here.host_bytes)
    lines.append(t("host memory {total}, {free} of it free", total=total, free=free))
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
    shown = _words(t("optional package"), t("version"), t("for"))
    for one in here.packages:
        if not one.required:
            purpose = f"{one.purpose}\n{one.command}" if one.lacking else one.purpose
            shown.add_row(one.name, one.version or "–", purpose)
    return shown


def _strategies(found: Diagnosis) -> RenderableType:
    from memfit.report.formatting import named

    card = found.card
    where = t("here") if card is None else t("on {card}", card=card.name)
    shown = _words(t("strategy"), t("fidelity"), where)
    for one in found.strategies:
        ready = t("ready; {note}", note=one.note) if one.note else t("ready")
        said = one.reason or ready
        shown.add_row(
            named("strategy", one.strategy),
            named("fidelity", one.fidelity),
            f"{said}\n{one.command}" if one.command else said,
        )
    return shown


def _trains(found: Diagnosis) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from memfit.doctor.reach import ROWS, TOKENS
    from memfit.report import terminal
    from memfit.report.formatting import named

    assert found.card is not None
    budget = format_both(found.budget_bytes)
    title = t(
        "What {card} can train in {budget}: batches of {rows} texts of {tokens} tokens",
        card=found.card.name,
        budget=budget,
        rows=ROWS,
        tokens=TOKENS,
    )
    model, allowed = t("model"), t("with --allow")
    shown = terminal.table(
        model, named("fidelity", "exact"), named("fidelity", "rounding"), allowed
    )
    for one in found.trains:
        if one.problem:
            shown.add_row(one.model.name, t("cannot be priced"))
            continue
        cells = (_cell(one.exact), _cell(one.rounding), _cell(one.allowed))
        shown.add_row(one.model.name, *cells)
    # Wrapped here: Chinese breaks between its characters, which rich does not know.
    width = min(terminal.console().width, terminal.MAX_WIDTH)
    head, foot = (
        "\n".join(wrap(text, width))
        for text in (
            title,
            t(
                "memory and texts a second of the fastest plan that fits, predicted; in brackets "
                "what the smallest would need. exact: the same numbers; rounding: fewer bits, no "
                "loss of quality that was measured; --allow: another optimizer, LoRA, frozen "
                "weights, shorter texts. Everywhere else every parameter learns"
            ),
        )
    )
    return Group(Text(head, style="bold"), shown, Text(foot, style="dim"))


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return t("not needed")
    size, speed = f"{cell.device_bytes / 10**9:.1f} GB", f"{cell.texts_per_second:,.0f}"
    return t(N_("{size}, {speed}/s") if cell.fits else N_("no ({size})"), size=size, speed=speed)
