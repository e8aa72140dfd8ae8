"""The combinations of strategies that the planner may choose, and few that cover all pairs.

They are asked of the planner's own space for cards of several generations, so a new strategy
takes part as soon as the planner knows it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import transformers
from transformers import BertConfig

from memfit.config.schema import ALLOWABLE
from memfit.memory.cards import find_card
from memfit.planner.recipes import recipes_for
from memfit.planner.task import Task
from memfit.planner.trace import Tracer
from memfit.strategies import ActivationOffload, Checkpointing, Strategy, Truncation

Combination = tuple[Strategy, ...]

CARDS = (None, "GTX 1080", "RTX 3060", "H200")
"""A CPU, a card without bf16 and Triton, one with both, one with large workspaces."""
CUDA_ONLY = frozenset({"cuda_graphs", "small_workspace"})
"""What cannot run on a CPU, whoever asks."""
SHAPE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 320, "max_position_embeddings": 48, "num_labels": 3,
}  # fmt: skip
"""Three layers, so that weights may be offloaded; matrices large to the low-bit optimizer."""
LENGTHS = tuple(range(3, 19)) * 2


def chosen_for(card_name: str | None, *, clip: float, exact: bool) -> set[Combination]:
    """Every combination for a task on a card, when all is allowed."""
    args = transformers.TrainingArguments(
        "unused", per_device_train_batch_size=8, max_grad_norm=clip, report_to="none", use_cpu=True
    )
    task = Task(config=BertConfig(**SHAPE), lengths=LENGTHS, args=args)
    card = None if card_name is None else find_card(card_name)
    asked = dataclasses.replace(
        task, card=card, exact=exact, allow=frozenset() if exact else frozenset(ALLOWABLE)
    )
    recipes = recipes_for(asked, Tracer(asked)).recipes
    return {one.with_layers(count, 3) for one in recipes for count in (0, 3)}


@functools.cache
def every_combination(clip: float, without: frozenset[str] = frozenset()) -> frozenset[Combination]:
    """Over all cards, exact and not. How many layers take part makes no difference to a file."""
    found = [chosen_for(card, clip=clip, exact=exact) for card in CARDS for exact in (False, True)]
    return frozenset(
        tuple(_all_layers(one) for one in each if one.name not in without)
        for each in set().union(*found)
    )


def _all_layers(strategy: Strategy) -> Strategy:
    """The same for all layers, and one length of texts."""
    if isinstance(strategy, Checkpointing):
        return Checkpointing()
    if isinstance(strategy, ActivationOffload):
        return ActivationOffload()
    return Truncation(8) if isinstance(strategy, Truncation) else strategy


def covering_pairs(combinations_: Iterable[Combination]) -> list[Combination]:
    """The fewest (nearly) of them in which every pair of settings stands that stands in any."""
    left = {one: _pairs(one) for one in sorted(combinations_, key=repr)}
    chosen: list[Combination] = []
    missing = set().union(*left.values())
    while missing:
        best = max(left, key=lambda one: len(left[one] & missing))
        missing -= left.pop(best)
        chosen.append(best)
    return sorted(chosen, key=repr)


def _pairs(combination: Combination) -> set[frozenset[Strategy | str]]:
    """All pairs of its strategies, and each beside nothing."""
    return {frozenset(pair) for pair in combinations((*combination, "alone"), 2)}


def name_of(combination: Combination) -> str:
    """For the test's name: the strategies and what is not their default."""
    return "+".join(map(_short, combination)) or "plain"


def _short(strategy: Strategy) -> str:
    settings = {
        name: getattr(strategy, name)
        for name in strategy.__dataclass_fields__  # type: ignore[attr-defined]
    }
    default = type(strategy)()
    changed = [
        f"{name}={value}" for name, value in settings.items() if value != getattr(default, name)
    ]
    return f"{strategy.name}({','.join(changed)})" if changed else strategy.name
