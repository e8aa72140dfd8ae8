"""Micro-batches chosen for a budget: the largest that fit, and a clear word when none do."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from memfit import TrainingArguments
from memfit.errors import DoesNotFitError
from memfit.parts import freeze
from memfit.planner import choose_micro_batching, predict_micro_batch, spec_of
from memfit.planner.microbatch import largest_that_fits
from memfit.runtime.batching import MicroBatching
from memfit.units import Budget


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path):
    return AutoModelForSequenceClassification.from_pretrained(tiny_model_dir)


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> TrainingArguments:
    folder = str(tmp_path_factory.mktemp("out"))
    return TrainingArguments(folder, per_device_train_batch_size=16, use_cpu=True)


@pytest.mark.parametrize("budget", [95, 100, 109, 110, 131, 250, 10_000])
def test_the_line_search_finds_what_counting_up_finds(budget: int) -> None:
    def bytes_of(rows: int) -> int:
        return max(95, 60 + 10 * rows)  # the update's peak, then the activations'

    most = 40
    counted = max(rows for rows in range(1, most + 1) if bytes_of(rows) <= budget)
    found = largest_that_fits(bytes_of, budget, known=(1, bytes_of(1)), most=most)
    assert found == counted


def test_the_line_search_asks_few_times() -> None:
    asked = []

    def bytes_of(rows: int) -> int:
        asked.append(rows)
        return 1_000_000 + 12_345 * rows

    assert largest_that_fits(bytes_of, 1_500_000, known=(1, 1_012_345), most=400) == 40
    assert len(asked) <= 4


def test_a_slack_budget_leaves_the_effective_batch_whole(model, args) -> None:
    chosen = choose_micro_batching(
        model=model, args=args, budget=Budget(bytes=10**9), effective_rows=16, longest_tokens=32
    )
    assert chosen == MicroBatching()


def test_a_budget_that_binds_takes_the_most_tokens_that_fit(model, args) -> None:
    def peak(rows: int) -> int:
        return predict_micro_batch(model, args, rows=rows, length=32).device_bytes

    budget = Budget(bytes=(peak(5) + peak(6)) // 2)
    chosen = choose_micro_batching(
        model=model, args=args, budget=budget, effective_rows=16, longest_tokens=32
    )
    assert chosen == MicroBatching(max_tokens=5 * 32)


def test_a_budget_nothing_fits_says_what_is_missing(model, args) -> None:
    with pytest.raises(DoesNotFitError, match=r"one row at a time needs .* missing"):
        choose_micro_batching(
            model=model, args=args, budget=Budget(bytes=1000), effective_rows=16, longest_tokens=32
        )


def test_what_the_user_froze_is_priced_as_frozen(tiny_model_dir: Path, args) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir)
    assert spec_of(model, args, rows=4, length=16).freeze is None
    freeze(model, "embeddings")
    assert spec_of(model, args, rows=4, length=16).freeze == "embeddings"
    freeze(model, "1")
    assert spec_of(model, args, rows=4, length=16).freeze == "1"
    freeze(model, "encoder")
    assert spec_of(model, args, rows=4, length=16).freeze == "encoder"


def test_micro_batches_smaller_than_the_effective_batch_keep_gradients(model, args) -> None:
    assert spec_of(model, args, rows=16, length=16).gradient_accumulation_steps == 1
    assert spec_of(model, args, rows=4, length=16).gradient_accumulation_steps == 2
