"""`memfit estimate`: every byte of a stock Trainer's step, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli import console
from memfit.cli.flags import FlagCommand
from memfit.cli.options import Json, config_options
from memfit.config import ModelConfig
from memfit.errors import ConfigError, OutputError
from memfit.units import MIB, format_both, format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memfit.memory.cards import DeviceProfile
    from memfit.memory.estimate import MemoryEstimate

EPILOG = (
    "It answers for the stock Trainer with these flags and any of TrainingArguments' under its "
    "own name: --optim adafactor, --bf16, --fp16, --gradient-checkpointing, "
    "--gradient-accumulation-steps 8, --eval-batch-size 64."
)

# The parts of a run in a reader's words.
_PARTS = {
    "build": "weights",
    "workspace": "workspaces",
    "micro": "forward and backward",
    "micro_more": "accumulating",
    "update_first": "first update",
    "clear": "gradients freed",
}


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
        typer.Option(help="Whether batches hold padding; so they do with more than one row."),
    ] = None,
    num_labels: Annotated[int, typer.Option(help="Outputs of the classification head.")] = 2,
    task: Annotated[
        str, typer.Option(help="single_label, multi_label or regression.")
    ] = "single_label",
    gpu: Annotated[
        str | None, typer.Option(help="A card by name ('RTX 3060', T4) or cpu; yours if not given.")
    ] = None,
    timeline: Annotated[
        str | None, typer.Option(help="Draw memory over the step as an HTML page here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the memory of training with the stock Trainer, from a config.json alone."""
    del ctx
    if "model" not in options:
        raise ConfigError("no model given; name one with --model")
    target = _check_target(timeline) if timeline is not None else None
    from memfit import api, estimating

    with console.only_results_on_stdout():
        device = estimating.device_for(gpu)
        found = api.estimate(
            **{**options, "batch_size": options.pop("per_device_train_batch_size", batch_size)},
            max_length=max_length, padding=padding, num_labels=num_labels, task=task,
            gpu=device or "cpu",
        )  # fmt: skip
        if target is not None:
            _draw(found, target, options["model"], device)
        notes = estimating.notes(options, device)
    if as_json:
        values = estimating.as_json(found, device, notes)
        console.show_json({"model": options["model"], **values})
    else:
        for note in notes:
            console.say(f"note: {note}")
        _show(found, device, named=gpu is not None)
    if target is not None:
        console.say(f"timeline: {target}")


def _check_target(timeline: str) -> Path:
    target = Path(timeline).expanduser()
    if not target.parent.is_dir() or target.is_dir():
        raise OutputError(f"cannot write the timeline {timeline}: name a file in a folder that is")
    return target


def _draw(found: MemoryEstimate, target: Path, model: str, device: DeviceProfile | None) -> None:
    from memfit.memory.timeline import write_timeline

    write_timeline(
        found.events,
        target,
        title=f"Memory of training {Path(model).name}",
        context_bytes=device.context_bytes if device is not None else 0,
        reserved_bytes=found.peak.reserved_bytes,
        phases=[(event, _PARTS.get(name, name)) for event, name in found.starts],
    )


def _show(found: MemoryEstimate, device: DeviceProfile | None, *, named: bool) -> None:
    from memfit import estimating
    from memfit.report import terminal

    learn = found.trainable_parameters
    share = "" if learn == found.parameters else f", {learn:,} of them learn"
    console.show(f"{found.parameters:,} parameters{share}")
    if device is not None:
        verdict = estimating.verdict(found, device)
        total = format_both(device.total_bytes)
        hint = "" if named or _has_gpu() else "; there is no GPU here, name yours with --gpu"
        console.show(f"{verdict} on {device.name}, {total}{hint}")
        if not device.measured:
            context = round(device.context_bytes / MIB)
            console.show(f"context about {context} MiB, by rule, not measured")
    out = terminal.console()
    out.print()
    out.print(terminal.memory_bar(terminal.peak_components(found.peak), title="Peak of a step"))
    if found.peak.module:
        console.show(f"reached in {found.peak.module}")
    out.print()
    out.print(_rules_table(found))
    out.print()
    out.print(_phase_table(found))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _rules_table(found: MemoryEstimate) -> RenderableType:
    """The four rules everybody knows, beside what the step really does."""
    from memfit import estimating
    from memfit.report import terminal

    words = {
        "weights": "4 B a parameter",
        "gradients": "4 B a parameter",
        "optimizer": "8 B a parameter (AdamW)",
        "activations": "the rest",
    }
    rules, most = estimating.classic_rules(found), estimating.component_maxima(found)
    shown = terminal.table("component", "classic rule", "says", "at the peak", "at its most")
    for name, size in found.peak.components.items():
        says = format_bytes(rules[name]) if name in rules else "–"
        shown.add_row(
            str(name), words.get(name, "–"), says,
            format_bytes(size), format_bytes(most[name]),
        )  # fmt: skip
    return shown


def _phase_table(found: MemoryEstimate) -> RenderableType:
    from memfit.report import terminal

    shown = terminal.table("phase", "tensors", "reserved", "on the device")
    for name, peak in found.phases.items():
        sizes = (peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)
        shown.add_row(name, *(format_bytes(size) for size in sizes))
    return shown
