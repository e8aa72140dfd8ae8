"""What a rung is predicted to need: the stock Trainer's step, or the price of a plan."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memfit import estimating
from memfit.config import RunConfig
from memfit.errors import MemfitError
from memfit.memory.cards import this_card
from memfit.memory.components import MemoryPeak
from memfit.memory.estimate import estimate_memory
from memfit.memory.phases import TRAINING
from memfit.planner.here import plan_here
from memfit.planner.workload import workload_of_run
from memfit.runtime.lengths import row_lengths
from memfit.units import parse_budget

if TYPE_CHECKING:
    from transformers import PretrainedConfig, TrainingArguments

    from memfit.data.values import LabelSpace, TextData, TokenizedData
    from memfit.planner.plan import Plan


def of_stock(
    run: RunConfig, args: TrainingArguments, labels: LabelSpace, lengths: Sequence[int]
) -> MemoryPeak | None:
    """The stock Trainer's step on the longest rows of the table; None where it has no price."""
    rows = args.per_device_train_batch_size
    longest = sorted(lengths, reverse=True)[:rows]
    options: dict[str, Any] = {
        **run.training,
        "per_device_train_batch_size": rows,
        "max_length": longest[0],
        "num_labels": labels.num_labels,
        "task": labels.task,
        # Rows cut at the same length are padded with nothing.
        "padding": rows > 1 and longest[-1] < longest[0],
    }
    try:
        spec = estimating.step_spec(run.model, options)
        card = this_card() if args.device.type == "cuda" else None
        return estimate_memory(spec, card).peak
    except MemfitError:
        return None


def planned(
    run: RunConfig,
    settings: PretrainedConfig,
    args: TrainingArguments,
    text: TextData,
    tokens: TokenizedData,
    budget: str,
) -> Plan:
    """The fastest plan inside the budget on this machine, as `memfit train` makes it."""
    workload = workload_of_run(
        run, copy.deepcopy(settings), args, text.labels, row_lengths(tokens.train),
        eval_rows=len(tokens.validation),
    )  # fmt: skip
    made = plan_here(
        workload, parse_budget(budget), args.device, exact=run.exact, allow=run.allowed
    )
    return made.chosen


def of_plan(plan: Plan) -> dict[str, Any]:
    """Its training's peak (a few steps are measured, no checkpoint), its strategies, its word."""
    price = plan.price
    predicted = None if price is None else price.phases.get(TRAINING, price.peak)
    return {
        "predicted": predicted,
        "fidelity": str(plan.fidelity),
        "strategies": [one.name for one in plan.strategies],
        "micro_batching": vars_of(plan.micro_batching),
        "targets": targets(plan),
    }


def vars_of(limits: Any) -> dict[str, Any]:
    """What is on the device at once."""
    return {"max_rows": limits.max_rows, "max_tokens": limits.max_tokens}


def targets(plan: Plan) -> list[str]:
    """The components its strategies shrink, in the order they are always named."""
    shrunk = {part for one in plan.strategies for part in one.shrinks}
    return [name for name in ("weights", "gradients", "optimizer", "activations") if name in shrunk]
