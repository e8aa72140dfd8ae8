"""`memfit doctor`: what is installed, what is missing for what, what a card can train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

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


_SENTENCES = {
    "context": N_("{empty_bytes} empty, {loaded_bytes} with the libraries of a training"),
    "usable": N_(
        "{reached_bytes} of the {free_bytes} called free could be filled, {refused_bytes} were "
        "refused; the card has {total_bytes}"
    ),
    "cpu": N_(
        "{fp32_flops} in fp32, {half_flops} in half precision, memory {memory_bytes_per_second}, "
        "{launch_seconds} an operator"
    ),
}


def _measure(gpu: str | None, as_json: bool) -> None:
    if gpu is not None:
        raise ConfigError("--measure is for the card of this machine; leave --gpu out")
    with console.working():
        from memfit.doctor.measure import WHAT, measure

        made = measure()
    if as_json:
        console.show_json({**asdict(made), "pasted": made.pasted()})
        return
    console.show(made.device)
    for name, found in made.found.items():
        if isinstance(found, dict):
            text = t(_SENTENCES[name], **{key: _amount(key, one) for key, one in found.items()})
        else:
            text = t("yes") if found is True else _amount(name, found)
        console.show("  " + t("{what}: {found}", what=t(WHAT[name]), found=text))
    for name, reason in made.failed.items():
        console.show("  " + t("{what}: no ({reason})", what=t(WHAT[name]), reason=reason))
    if made.device == "CPU":
        console.show("\n" + t("There is no GPU here: the CPU was measured."))
    if made.row:
        console.show("\n" + t("Kept for plans on this machine and for plan --gpu."))
        console.show(t("To help others, paste this into an issue of memfit:") + "\n")
        console.show(made.pasted())


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

    here = found.environment
    versions = []
    for name in _SHOWN:
        version = here.package(name).version
        if version is None:
            versions.append(t("no {name}", name=name))
        elif name != "torch":
            versions.append(f"{name} {version}")
        elif here.torch.cuda:
            cuda = here.torch.cuda
            versions.append(t("torch {version} (CUDA {cuda})", version=version, cuda=cuda))
        else:
            versions.append(t("torch {version} (no CUDA)", version=version))
    console.show(terminal.listed([f"memfit {here.memfit}", f"Python {here.python}", here.platform]))
    console.show(terminal.listed(versions))
    for line in _machine(here):
        console.show(line)
    for one in found.findings:
        console.show("\n" + t(_FINDINGS[one.kind], text=one.text))
        if one.command:
            console.show(f"    {one.command}")
    out = terminal.console()
    for table in (_packages(here), _strategies(found), _trains(found)):
        if table is not None:
            out.print()
            out.print(table)
    if found.card is None and found.works:
        console.show("\n" + t("What a card can train: memfit doctor --gpu 'RTX 3060'"))


def _machine(here: Environment) -> Iterator[str]:
    """The cards, the driver and the host's memory, a line each."""
    for card in here.cards:
        yield t(
            "{name}, compute capability {capability}, {total}, {free} of it free",
            name=card.name,
            capability=".".join(map(str, card.capability)),
            total=format_both(card.total_bytes),
            free=format_bytes(card.free_bytes),
        )
    if here.driver is not None:
        yield t(
            "driver {version}, which runs CUDA up to {cuda}",
            version=here.driver.version,
            cuda=".".join(map(str, here.driver.cuda)),
        )
    free, total = format_bytes(here.host_free_bytes), format_both(here.host_bytes)
    yield t("host memory {total}, {free} of it free", total=total, free=free)


def _words(*columns: str) -> Table:
    """A table of words, all to the left."""
    from memfit.report import terminal

    made = terminal.table(*columns)
    for column in made.columns:
        column.justify = "left"
    return made


def _packages(here: Environment) -> Table:
    shown = _words(t("optional package"), t("version"), t("for"))
    for one in here.packages:
        if not one.required:
            purpose = f"{one.purpose}\n{one.command}" if one.lacking else one.purpose
            shown.add_row(one.name, one.version or "–", purpose)
    return shown


def _strategies(found: Diagnosis) -> Table | None:
    if not found.strategies:
        return None
    from memfit.report.formatting import named

    where = t("here") if found.card is None else t("on {card}", card=found.card.name)
    shown = _words(t("strategy"), t("fidelity"), where)
    for one in found.strategies:
        ready = t("ready; {note}", note=one.note) if one.note else t("ready")
        text = one.reason or ready
        shown.add_row(
            named("strategy", one.strategy),
            named("fidelity", one.fidelity),
            f"{text}\n{one.command}" if one.command else text,
        )
    return shown


def _trains(found: Diagnosis) -> RenderableType | None:
    if found.card is None or not found.trains:
        return None
    from rich.console import Group
    from rich.text import Text

    from memfit.doctor.reach import ROWS, TOKENS
    from memfit.report import terminal
    from memfit.report.formatting import named

    title = t(
        "What {card} can train in {budget}: batches of {rows} texts of {tokens} tokens",
        card=found.card.name,
        budget=format_both(found.budget_bytes),
        rows=ROWS,
        tokens=TOKENS,
    )
    note = t(
        "memory and texts a second of the fastest plan that fits, predicted; in brackets "
        "what the smallest would need. exact: the same numbers; rounding: fewer bits, no "
        "loss of quality that was measured; --allow: another optimizer, LoRA, frozen "
        "weights, shorter texts. Everywhere else every parameter is trained"
    )
    fidelities = [named("fidelity", name) for name in ("exact", "rounding")]
    shown = terminal.table(t("model"), *fidelities, t("with --allow"))
    for one in found.trains:
        cells = [t("cannot be priced")] if one.problem else []
        for cell in () if one.problem else (one.exact, one.rounding, one.allowed):
            if cell is None:
                cells.append(t("not needed"))
                continue
            size = f"{cell.device_bytes / 10**9:.1f} GB"
            speed = f"{cell.texts_per_second:,.0f}"
            text = N_("{size}, {speed}/s") if cell.fits else N_("no ({size})")
            cells.append(t(text, size=size, speed=speed))
        shown.add_row(one.model.name, *cells)
    # Wrapped here: Chinese breaks between its characters, which rich does not know.
    width = min(terminal.console().width, terminal.MAX_WIDTH)
    head, foot = ("\n".join(wrap(text, width)) for text in (title, note))
    return Group(Text(head, style="bold"), shown, Text(foot, style="dim"))
