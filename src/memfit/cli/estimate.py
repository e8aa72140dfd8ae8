"""`memfit estimate`: every byte of a stock Trainer's step, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli import console
from memfit.cli.options import (
    Display,
    FlagCommand,
    Json,
    Reserved,
    Windows,
    check_card,
    check_target,
    config_options,
)
from memfit.config import ModelConfig
from memfit.errors import ConfigError
from memfit.i18n import N_, t
from memfit.units import MIB, format_both, format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memfit.memory.cards import DeviceProfile
    from memfit.memory.stock_estimate import MemoryEstimate

EPILOG = (
    "It answers for the stock Trainer with these flags and any of TrainingArguments' under its "
    "own name: --optim adafactor, --bf16, --fp16, --gradient-checkpointing, "
    "--gradient-accumulation-steps 8, --eval-batch-size 64."
)

_CANNOT_WRITE = N_("cannot write the timeline {path}: name a file in a folder that is there")


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=FlagCommand, epilog=EPILOG)(estimate)


@config_options(ModelConfig, leave_out=("from_scratch",))
def estimate(
    ctx: typer.Context,
    options: dict[str, Any],
    batch_size: Annotated[int, typer.Option(help="Rows on the device at once.")] = 32,
    max_length: Annotated[int, typer.Option(help="Tokens a row, padding included.")] = 128,
    padding: Annotated[
        bool | None,
        typer.Option(help="Pad batches (default: yes for more than one row)."),
    ] = None,
    num_labels: Annotated[int, typer.Option(help="Outputs of the classification head.")] = 2,
    task: Annotated[
        str, typer.Option(help="single_label, multi_label or regression.")
    ] = "single_label",
    gpu: Annotated[
        str | None, typer.Option(help="A card by name ('RTX 3060', T4) or cpu; yours if not given.")
    ] = None,
    windows: Windows = None,
    display: Display = False,
    reserved: Reserved = None,
    timeline: Annotated[
        str | None, typer.Option(help="Draw memory over the step as an HTML page here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the memory of training with the stock Trainer, from a config.json alone."""
    del ctx
    if "model" not in options:
        raise ConfigError("no model given; name one with --model")
    place = check_card(gpu, windows, display, reserved)
    target = check_target(timeline, _CANNOT_WRITE) if timeline is not None else None
    with console.working():
        from memfit import api
        from memfit.report import estimate_json
        from memfit.run import stock_flags

        device = stock_flags.device_for(gpu, place)
        found = api.estimate(
            **{**options, "batch_size": options.pop("per_device_train_batch_size", batch_size)},
            max_length=max_length, padding=padding, num_labels=num_labels, task=task,
            gpu=device or "cpu",
        )  # fmt: skip
        if target is not None:
            _draw(found, target, options["model"], device)
        notes = stock_flags.notes(options, device)
    if as_json:
        values = estimate_json.estimate_json(found, device, notes)
        console.show_json({"model": options["model"], **values})
    else:
        for note in notes:
            console.say(t("note: {text}", text=note))
        _show(found, device, named=gpu is not None)
    if target is not None:
        console.say(t("timeline: {path}", path=target))


_PARTS = {
    "build": N_("weights"),
    "workspace": N_("workspaces"),
    "micro": N_("forward and backward"),
    "micro_more": N_("accumulating"),
    "update_first": N_("first update"),
    "clear": N_("gradients freed"),
}

_PHASES = {
    "training": N_("training"),
    "evaluation": N_("evaluation"),
    "saving": N_("saving"),
    "resuming": N_("resuming"),
}

_VERDICTS = {
    "fits": N_("fits on {card}, {total}"),
    "barely": N_("fits barely on {card}, {total}"),
    "over": N_("does not fit on {card}, {total}"),
}

_RULES = {
    "weights": N_("4 B a parameter"),
    "gradients": N_("4 B a parameter"),
    "optimizer": N_("8 B a parameter (AdamW)"),
    "activations": N_("the rest"),
}


def _draw(found: MemoryEstimate, target: Path, model: str, device: DeviceProfile | None) -> None:
    from memfit.report.timeline import write_timeline

    write_timeline(
        found.events,
        target,
        title=t("Memory of training {model}", model=Path(model).name),
        context_bytes=device.context_bytes if device is not None else 0,
        reserved_bytes=found.peak.reserved_bytes,
        phases=[
            (event, t(_PARTS[name]) if name in _PARTS else name) for event, name in found.starts
        ],
    )


def _show(found: MemoryEstimate, device: DeviceProfile | None, *, named: bool) -> None:
    from memfit.report import memory_bar, terminal

    learn = found.trainable_parameters
    kind = (
        N_("{count} parameters")
        if learn == found.parameters
        else N_("{count} parameters, {learning} of them trainable")
    )
    console.show(t(kind, count=f"{found.parameters:,}", learning=f"{learn:,}"))
    if device is not None:
        console.show(_verdict(found, device, named=named))
        if not device.measured:
            console.show(
                t(
                    "context {low} to {high} MiB, not measured: the most is counted",
                    low=round(device.context_low_bytes / MIB),
                    high=round(device.context_bytes / MIB),
                )
            )
        if kept := device.total_bytes - device.usable_bytes:
            console.show(
                t(
                    "{kept} of the card are left to its system and to what is not known",
                    kept=format_both(kept),
                )
            )
    out = terminal.console()
    out.print()
    out.print(memory_bar.memory_bar(found.peak, title=t("Peak of a step")))
    if found.peak.module:
        console.show(t("reached in {module}", module=found.peak.module))
    out.print()
    out.print(_rules_table(found))
    out.print()
    out.print(_phase_table(found))


def _verdict(found: MemoryEstimate, device: DeviceProfile, *, named: bool) -> str:
    from memfit.memory.device import has_cuda
    from memfit.report.estimate_json import verdict_on

    verdict = verdict_on(found, device)
    said = t(_VERDICTS[verdict], card=device.name, total=format_both(device.total_bytes))
    return (
        said
        if named or has_cuda()
        else t("{verdict}; there is no GPU here, name yours with --gpu", verdict=said)
    )


def _rules_table(found: MemoryEstimate) -> RenderableType:
    """The four rules everybody knows, beside what the step really does."""
    from memfit.report import terminal
    from memfit.report.estimate_json import classic_rules, component_maxima
    from memfit.report.formatting import named

    rules, most = classic_rules(found), component_maxima(found)
    heads = (t("component"), t("classic rule"), t("says"), t("at the peak"), t("at its most"))
    shown = terminal.table(*heads)
    for name, size in found.peak.components.items():
        rule, says = "–", "–"
        if name in rules:
            rule, says = t(_RULES[name]), format_bytes(rules[name])
        called = named("component", str(name))
        shown.add_row(called, rule, says, format_bytes(size), format_bytes(most[name]))
    return shown


def _phase_table(found: MemoryEstimate) -> RenderableType:
    from memfit.report import terminal

    shown = terminal.table(t("phase"), t("tensors"), t("reserved"), t("on the device"))
    for name, peak in found.phases.items():
        sizes = (peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)
        shown.add_row(t(_PHASES[name]), *(format_bytes(size) for size in sizes))
    return shown
