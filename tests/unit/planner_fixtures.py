"""Tasks for tests of the planner: BERT-Large's shape, and one that is traced in moments."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from transformers import BertConfig, TrainingArguments

from memfit.memory.cards import DeviceProfile, find_card
from memfit.planner.price import Pricer
from memfit.planner.search import Planning, plan_for
from memfit.planner.task import Task
from memfit.units import Budget

DEPTH, WIDTH, VOCABULARY = 24, 1024, 21128
"""BERT-Large with the Chinese vocabulary."""

PLENTY_OF_HOST = 10**12


def bert(layers: int = DEPTH, width: int = WIDTH, vocabulary: int = VOCABULARY) -> BertConfig:
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        intermediate_size=4 * width,
    )


def lengths_like_reviews(rows: int = 6988, longest: int = 128) -> tuple[int, ...]:
    """A mean of about 85 tokens, a fifth of the rows cut at the longest."""
    draw = random.Random(1)
    return tuple(min(max(8, round(draw.lognormvariate(4.4, 0.55))), longest) for _ in range(rows))


def task(
    config: Any = None,
    *,
    lengths: tuple[int, ...] | None = None,
    user_set: frozenset[str] = frozenset(),
    **arguments: Any,
) -> Task:
    given = {
        "per_device_train_batch_size": 32,
        "report_to": "none",
        "use_cpu": True,
        **arguments,
    }
    return Task(
        config=config or bert(),
        lengths=lengths or lengths_like_reviews(),
        args=TrainingArguments("unused", **given),
        user_set=user_set,
    )


BERT_LARGE = task()

SMALL = task(bert(6, 128, 500), lengths=lengths_like_reviews(400))


def h200() -> DeviceProfile:
    return find_card("H200")


def laptop() -> DeviceProfile:
    """A card that is slow enough for Python to be hidden."""
    return find_card("RTX 3050 Laptop 4GB")


def within(given: Task, budget_bytes: float, card: DeviceProfile | None, **asked: Any) -> Task:
    budget = Budget(bytes=int(budget_bytes))
    return replace(given, card=card, budget=budget, budget_bytes=int(budget_bytes), **asked)


def planned(
    given: Task,
    budget_bytes: float,
    card: DeviceProfile | None,
    *,
    pricer: Pricer | None = None,
    host_bytes_free: int = PLENTY_OF_HOST,
    **asked: Any,
) -> Planning:
    """The plan inside a budget; nothing is taken from the cache."""
    placed = within(given, budget_bytes, card, **asked)
    return plan_for(placed, fresh=True, pricer=pricer, host_bytes_free=host_bytes_free)
