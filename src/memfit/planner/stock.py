"""What of a plan the stock Trainer can do, as its own arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from memfit.planner.plan import Plan

STOCK = ("half_precision", "checkpointing", "small_state_optimizer")
"""Strategies the stock Trainer has an argument for."""


def stock_arguments(args: TrainingArguments, plan: Plan) -> TrainingArguments:
    """Change these arguments to the plan's nearest."""
    chosen = plan.candidate
    halved = chosen.get("half_precision") or chosen.get("lowbit_adamw")
    dtype = getattr(halved or chosen.get("optimizer_offload"), "dtype", None)
    if dtype is not None:
        short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
        setattr(args, short, True)
        args.mixed_precision = short
    recomputed = chosen.get("checkpointing")
    if recomputed is not None:
        args.gradient_checkpointing = True
        args.gradient_checkpointing_kwargs = {"use_reentrant": False}
    if (small := chosen.get("small_state_optimizer")) is not None:
        args.optim = small.rule
    frozen = chosen.get("freezing")
    if frozen is not None and frozen.head_learning_rate is not None:
        args.learning_rate = frozen.head_learning_rate
    rows = rows_at_once(plan)
    effective = args.per_device_train_batch_size * args.gradient_accumulation_steps
    args.per_device_train_batch_size = rows
    args.gradient_accumulation_steps = effective // rows
    return args


def rows_at_once(plan: Plan) -> int:
    """Rows of one device batch of padded texts: a divisor of the effective batch."""
    limits, digest = plan.micro_batching, plan.digest
    most = limits.max_rows or digest.effective_rows
    if limits.max_tokens is not None:
        most = min(most, max(limits.max_tokens // digest.longest_tokens, 1))
    whole = digest.effective_rows
    return max(rows for rows in range(1, min(most, whole) + 1) if whole % rows == 0)
