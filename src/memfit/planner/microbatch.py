"""The largest micro-batches that stay inside a budget."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel, TrainingArguments

from memfit.announce import device_memory
from memfit.errors import DoesNotFitError
from memfit.memory.cards import this_card
from memfit.memory.components import MemoryPeak
from memfit.memory.estimate import estimate_memory
from memfit.planner.steps import spec_of
from memfit.runtime.batching import MicroBatching
from memfit.units import Budget, format_both, format_bytes


def choose_micro_batching(
    *,
    model: PreTrainedModel | torch.nn.Module,
    args: TrainingArguments,
    budget: Budget,
    effective_rows: int,
    longest_tokens: int,
) -> MicroBatching:
    """No limit where the whole effective batch fits, else as many tokens as do.

    Rows of the longest text are the worst a batch can hold; shorter ones come more at a time.
    """
    total_bytes, free_bytes = device_memory(args.device)
    budget_bytes = budget.resolve(total_bytes=total_bytes, free_bytes=free_bytes)

    def peak_of(rows: int) -> MemoryPeak:
        return predict_micro_batch(model, args, rows=rows, length=longest_tokens)

    if peak_of(effective_rows).device_bytes <= budget_bytes:
        return MicroBatching()
    smallest = peak_of(1)
    if smallest.device_bytes > budget_bytes:
        raise DoesNotFitError(_what_is_missing(smallest, budget_bytes))
    rows = largest_that_fits(
        lambda count: peak_of(count).device_bytes,
        budget_bytes,
        known=(1, smallest.device_bytes),
        most=effective_rows - 1,
    )
    return MicroBatching(max_tokens=rows * longest_tokens)


def predict_micro_batch(
    model: PreTrainedModel | torch.nn.Module, args: TrainingArguments, *, rows: int, length: int
) -> MemoryPeak:
    """The highest moment of a training step on micro-batches of this size."""
    on_cuda = args.device.type == "cuda"
    card = this_card(args.device.index or 0) if on_cuda else None
    return estimate_memory(spec_of(model, args, rows=rows, length=length), card).peak


def largest_that_fits(
    bytes_of: Callable[[int], int], budget_bytes: int, *, known: tuple[int, int], most: int
) -> int:
    """A count within the budget that one more row, by the last two points, would exceed.

    Memory is flat while the optimizer's update is the peak and then grows by the same amount a
    row, so a line through two points high up hits the budget at once; every count returned was
    checked, since a trace costs a second and a wrong guess a run.
    """
    fits = known[0]
    too_many = most + 1
    points = [known]
    guess = most
    while too_many - fits > 1:
        guess = max(fits + 1, min(guess, too_many - 1))
        guess_bytes = bytes_of(guess)
        points.append((guess, guess_bytes))
        if guess_bytes <= budget_bytes:
            fits = guess
        else:
            too_many = guess
        if len(points) == 2:
            guess = (fits + too_many) // 2
            continue
        (x0, y0), (x1, y1) = points[-2:]
        row_bytes = (y1 - y0) / (x1 - x0)
        guess = int(x1 + (budget_bytes - y1) / row_bytes) if row_bytes > 0 else too_many - 1
        if guess <= fits and points[-1][0] == fits:
            break
    return fits


def _what_is_missing(smallest: MemoryPeak, budget_bytes: int) -> str:
    """The smallest plan, what is missing, and what would help."""
    largest = sorted(smallest.components.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in largest if count)
    missing_bytes = smallest.device_bytes - budget_bytes
    return (
        f"one row at a time needs {format_both(smallest.device_bytes)} ({parts}) and the budget "
        f"is {format_both(budget_bytes)}: {format_bytes(missing_bytes)} are missing; raise "
        "--budget, add --gradient-checkpointing, choose --optim adafactor, a shorter "
        "--max-length, or a smaller model"
    )
