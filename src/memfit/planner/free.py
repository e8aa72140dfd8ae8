"""Strategies that change nothing in the result and cost nothing: used wherever they work."""

from __future__ import annotations

import torch
from transformers import TrainingArguments

from memfit.strategies import Packing, Setup, Strategy


def free_strategies(
    model: torch.nn.Module, args: TrainingArguments
) -> tuple[list[Strategy], dict[str, str]]:
    """Those to use, and for each of the others why not, in a sentence."""
    setup = Setup(model=model, args=args, device=args.device)
    used: list[Strategy] = []
    left_out: dict[str, str] = {}
    for strategy in (Packing(),):
        if args.torch_compile:
            left_out[strategy.name] = "torch_compile wants the same shapes in every step"
        elif reason := strategy.unavailable(setup):
            left_out[strategy.name] = reason
        else:
            used.append(strategy)
    return used, left_out
