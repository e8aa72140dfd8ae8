"""What a run says about itself before it starts: model, budget, batch, device."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from memfit.safe_text import printable
from memfit.units import Budget, format_both, parse_budget

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from memfit.planner.plan import Plan
    from memfit.runtime.trainer import BudgetTrainer


def voice(quiet: bool) -> Callable[[Any], None]:
    """Prints text and tables to stderr, or nothing at all."""
    if quiet:
        return lambda _: None
    from memfit.report import terminal

    lines, tables = plain_console(), terminal.console(stderr=True)

    def say(what: Any) -> None:
        if isinstance(what, str):
            lines.print(printable(what))
        else:
            tables.print(what)

    return say


def plain_console() -> Console:
    """Stderr for single lines: a log file gets them whole, however long."""
    from rich.console import Console

    is_terminal = sys.stderr.isatty()
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=not is_terminal)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Holds back transformers' bars over files; ours over the training is the one to watch."""
    from transformers.utils import logging as logging_module

    logging: Any = logging_module
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()


def parameters(trainer: BudgetTrainer) -> tuple[int, int]:
    """All parameters of the model, and those that learn."""
    both = [(item.numel(), item.requires_grad) for item in trainer.model.parameters()]
    return sum(count for count, _ in both), sum(count for count, learns in both if learns)


def device_memory(device: torch.device) -> tuple[int, int]:
    """Total and free bytes; for a CPU the machine's memory."""
    import psutil
    import torch

    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return total_bytes, free_bytes
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def budget_bytes(budget: str, device: torch.device) -> int:
    """The budget on this device."""
    total_bytes, free_bytes = device_memory(device)
    return parse_budget(budget).resolve(total_bytes=total_bytes, free_bytes=free_bytes)


def budget_sentence(budget: str, device: torch.device) -> str:
    """Both units, since a '4 GB' card has 4 GiB; and what is done about one that is too large."""
    total_bytes, _ = device_memory(device)
    asked: Budget = parse_budget(budget)
    sentence = format_both(budget_bytes(budget, device))
    if asked.bytes is not None and asked.bytes > total_bytes:
        return f"{sentence}: all there is, less than the {budget} asked for"
    return f"{sentence}, {budget}" if asked.bytes is None else sentence


def batch_sentence(trainer: BudgetTrainer) -> str:
    """The rows an optimizer step learns from, and how many are on the device at once."""
    micro = trainer.micro_batching
    limits = [
        f"{count:,} {what}"
        for count, what in ((micro.max_rows, "rows"), (micro.max_tokens, "tokens"))
        if count is not None
    ]
    packed = ", packed without padding" if trainer.setup.packing is not None else ""
    whole = f"{trainer.effective_rows:,} rows a step"
    if not limits:
        return f"{whole}, all on the device at once{packed}"
    return f"{whole}, at most {' and '.join(limits)} on the device at once{packed}"


def plan_sentence(plan: Plan) -> str:
    """What the plan does to the result, and the strategies it uses."""
    from memfit.messages import language
    from memfit.planner.messages import NAMES

    spoken = language()
    names = [NAMES.get(one.name, {}).get(spoken, one.name) for one in plan.strategies]
    return f"{plan.fidelity}: {', '.join(names)}" if names else str(plan.fidelity)


def time_sentence(plan: Plan) -> str:
    """A step, an epoch and the run, as predicted; empty where the plan was not explained."""
    from memfit.messages import language

    said = [one.sentence(language()) for one in plan.decisions if one.message == "time"]
    return said[0] if said else ""


def device_name(device: torch.device) -> str:
    """The card's name, or the processor's kind."""
    import platform

    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.processor() or platform.machine()})"
