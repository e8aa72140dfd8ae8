"""The time of a step: what makes it longer or shorter, and how near it is to measured steps."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, TrainingArguments

from memfit import strategies
from memfit.memory.cards import Speeds, find_card, known_cards
from memfit.memory.counts import StepCounts
from memfit.planner.calibration import calibrate
from memfit.planner.timing import capture_seconds, explain, speeds_of, step_seconds
from memfit.planner.trace import trace_step
from memfit.planner.values import Candidate, Workload
from memfit.runtime.batching import MicroBatching

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "bert_large_h200.json"
H200, T4, GTX = find_card("H200"), find_card("T4"), find_card("GTX 1080")
# A step of BERT-Large in bf16 on some 2,700 packed tokens, launched from Python.
STEP = StepCounts(
    half_flops=4.9e12,
    half_attention_flops=0.1e12,
    bytes_moved=1.3e10,
    product_bytes=1.0e10,
    launches=1400,
    scripted=150,
)
FULL = dataclasses.replace(STEP, half_flops=0.0, full_flops=STEP.half_flops)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(StepCounts)])
@pytest.mark.parametrize("card", [H200, T4, GTX], ids=lambda card: card.name)
def test_doing_more_of_anything_is_never_faster(name: str, card: Any) -> None:
    more = dataclasses.replace(STEP, **{name: getattr(STEP, name) * 1.5 + 100})
    assert step_seconds(more, card) >= step_seconds(STEP, card)


@pytest.mark.parametrize("card", [H200, T4, GTX], ids=lambda card: card.name)
@pytest.mark.parametrize("size", [0.01, 0.3, 1.0, 10.0])
def test_graphs_are_never_slower_than_launching_the_same(size: float, card: Any) -> None:
    step = dataclasses.replace(STEP * size, launches=1400)
    assert step_seconds(step.as_graphs(), card) <= step_seconds(step, card)


def test_graphs_save_most_where_the_card_waits_for_python() -> None:
    def gain(card: Any) -> float:
        return step_seconds(STEP, card) / step_seconds(STEP.as_graphs(), card)

    assert gain(H200) > 3
    assert gain(T4) < 1.1


def test_capturing_costs_a_step_or_two_and_replaying_nothing_more() -> None:
    launched = step_seconds(STEP, H200)
    assert launched < capture_seconds(STEP, H200) < 5 * launched
    assert capture_seconds(STEP, H200) >= capture_seconds(STEP.as_graphs(), H200) > 0


def test_an_older_card_is_slower() -> None:
    assert step_seconds(STEP, H200) < step_seconds(STEP, T4) < step_seconds(STEP, GTX)


def test_half_precision_pays_only_where_there_are_matrix_units() -> None:
    assert step_seconds(STEP, T4) < 0.4 * step_seconds(FULL, T4)
    assert step_seconds(STEP, GTX) == pytest.approx(step_seconds(FULL, GTX))


def test_tf32_pays_from_ampere_on() -> None:
    rounded = dataclasses.replace(FULL, full_flops=0.0, tf32_flops=FULL.full_flops)
    ampere = find_card("A100 40GB")
    assert step_seconds(rounded, ampere) < 0.5 * step_seconds(FULL, ampere)
    assert step_seconds(rounded, T4) == step_seconds(FULL, T4)


def test_copies_beside_the_computation_cost_nothing_until_they_are_the_longest() -> None:
    hidden = dataclasses.replace(STEP, to_host_bytes=1e8, to_device_bytes=1e8)
    assert step_seconds(hidden, H200) == step_seconds(STEP, H200)
    shown = dataclasses.replace(STEP, to_host_bytes=1e10, to_device_bytes=1e10)
    assert step_seconds(shown, H200) > explain(shown, H200)["bus"] > step_seconds(STEP, H200)


def test_a_product_of_few_rows_waits_for_its_weights() -> None:
    few = dataclasses.replace(STEP, half_flops=STEP.half_flops / 1000, half_attention_flops=0.0)
    parts = explain(few.as_graphs(), H200)
    speeds = speeds_of(H200)
    assert parts["compute"] + parts["memory"] > few.product_bytes / speeds.memory_bytes_per_second


def test_the_hosts_update_comes_after_the_step() -> None:
    updated = dataclasses.replace(STEP, host_parameters=325e6)
    extra = step_seconds(updated, H200) - step_seconds(STEP, H200)
    assert extra == pytest.approx(325e6 / speeds_of(H200).host_parameters_per_second)
    # A CPU updates some 0.3 to 1 billion parameters a second.
    assert 0.3 < extra < 1.1


def test_no_card_reaches_its_data_sheet() -> None:
    for name in known_cards():
        card = find_card(name)
        speeds = speeds_of(card)
        assert speeds.half_flops < card.half_flops
        assert speeds.fp32_flops < card.fp32_flops
        assert speeds.memory_bytes_per_second < card.memory_bytes_per_second
        assert speeds.bus_bytes_per_second < card.bus_bytes_per_second
        assert speeds.half_flops >= 0.7 * speeds.fp32_flops


def test_what_was_measured_on_a_card_is_used_instead() -> None:
    slow = Speeds(
        half_flops=1e12, tf32_flops=1e12, fp32_flops=1e12, memory_bytes_per_second=1e11,
        bus_bytes_per_second=1e9, launch_seconds=1e-5, host_parameters_per_second=1e8,
    )  # fmt: skip
    calibrated = dataclasses.replace(H200, reached=slow)
    assert speeds_of(calibrated) is slow
    assert step_seconds(STEP.as_graphs(), calibrated) > STEP.half_flops / 1e12


def test_a_cpu_does_one_thing_after_another_at_its_measured_speed() -> None:
    profile = calibrate("cpu")
    parts = explain(FULL, None)
    assert step_seconds(FULL, None) == step_seconds(FULL, profile)
    assert step_seconds(FULL, None) == pytest.approx(sum(parts.values()) - parts["bus"])
    assert profile.reached is not None
    assert parts["compute"] > FULL.full_flops / profile.reached.fp32_flops


# ------------------------------------------------------------------ against measured steps


@functools.cache
def workload(max_grad_norm: float) -> Workload:
    """BERT-Large on texts as long as ChnSentiCorp's: 83 tokens on average, 101 when weighted."""
    drawn = random.Random(0)
    lengths = tuple(min(128, round(8 + 140 * drawn.random() ** 0.85)) for _ in range(6_988))
    config = BertConfig(
        vocab_size=21128, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
        intermediate_size=4096,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir="unused", per_device_train_batch_size=32, max_grad_norm=max_grad_norm,
        use_cpu=True, report_to="none",
    )  # fmt: skip
    return Workload(config=config, lengths=lengths, args=args)


MEASURED = {run["name"]: run for run in json.loads(RESULTS.read_text())["runs"]}
MEAN_TOKENS = 2658


@pytest.mark.parametrize(
    "name",
    [
        "24-bit, release, graphs",
        "16-bit, release, recompute, graphs",
        "24-bit, release, graphs, not fused",
        "24-bit, 8-bit gradients clipped, recompute, graphs, not fused",
        "16-bit, release, recompute",
    ],
)
def test_a_measured_step_is_within_fifteen_percent(name: str) -> None:
    run = MEASURED[name]
    known = {one: getattr(strategies, one) for one in strategies.__all__}
    chosen = tuple(eval(text, known) for text in run["run"]["strategies"])
    task = workload(run["run"].get("args", {}).get("max_grad_norm", 1.0))
    candidate = Candidate(chosen, MicroBatching())
    counts = trace_step(task, candidate, H200, tokens=MEAN_TOKENS).counts
    assert step_seconds(counts, H200) == pytest.approx(run["step_seconds_median"], rel=0.15)


def test_more_tokens_are_never_faster() -> None:
    candidate = Candidate((strategies.Packing(),), MicroBatching())
    seconds = [
        step_seconds(trace_step(workload(1.0), candidate, T4, tokens=tokens, layers=2).counts, T4)
        for tokens in (256, 512, 2048, 4096)
    ]
    assert seconds == sorted(seconds)
    # Twice the tokens of a batch that fills the card are nearly twice the time.
    assert 1.7 < seconds[3] / seconds[2] < 2.1
