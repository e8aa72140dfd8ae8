"""Memory against the prediction: every strategy's step on a CPU, traced and really run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, TrainingArguments, XLMRobertaConfig
from transformers import BertForSequenceClassification as Bert

import small_training
from memfit import BudgetTrainer
from memfit import strategies as strategies_module
from memfit.engine.micro_batches import MicroBatching
from memfit.memory.cards import find_card
from memfit.memory.components import Component
from memfit.memory.phases import TRAINING
from memfit.planner.task import Task
from memfit.strategies import (
    ORDER,
    Checkpointing,
    Freezing,
    FrozenFeatures,
    GradientRelease,
    HalfPrecision,
    Lora,
    LowBitAdamW,
    Packing,
    SmallStateOptimizer,
    Strategy,
    Truncation,
)
from step_memory import peak_of_two_steps
from traced_plans import Candidate, price_memory

MEASURED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "bert_large_h200.json"
LARGEST_DRAWN = 3_225
"""Tokens of the largest batch the measured runs drew (benchmarks/plan_accuracy.py draws again)."""
LARGE: dict[str, Any] = {
    "vocab_size": 21128, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "max_position_embeddings": 514,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 512, "max_position_embeddings": 64, "num_labels": 2,
}  # fmt: skip
LENGTHS = (48, 45, 40, 37, 33, 30, 26, 21, 19, 18, 14, 11, 9, 8, 6, 5)
ALLOWED = 0.01
ALLOWED_SPLIT = 0.03
"""The parts of a split step differ; the trace has the largest of them throughout."""
LOW = LowBitAdamW()
SPLIT = MicroBatching(max_tokens=200)
WHOLE = MicroBatching()
# What a CPU has no use for says so (tests/unit/test_planner_trace.py); these run there.
RUNS: dict[str, tuple[list[Strategy], MicroBatching, float]] = {
    "nothing": ([], WHOLE, 1.0),
    "nothing, split": ([], SPLIT, 1.0),
    "packing": ([Packing()], WHOLE, 1.0),
    "packing, split": ([Packing()], SPLIT, 1.0),
    "checkpointing": ([Checkpointing()], WHOLE, 1.0),
    "checkpointing two layers": ([Checkpointing(2)], WHOLE, 1.0),
    "half precision": ([HalfPrecision()], WHOLE, 1.0),
    "freezing two layers": ([Freezing(2)], WHOLE, 1.0),
    "freezing the encoder": ([Freezing()], WHOLE, 1.0),
    "features": ([Freezing(), FrozenFeatures()], WHOLE, 1.0),
    "LoRA": ([Lora()], WHOLE, 1.0),
    "Adafactor": ([SmallStateOptimizer()], WHOLE, 1.0),
    "truncation": ([Truncation(24)], WHOLE, 1.0),
    "low-bit": ([LOW], WHOLE, 1.0),
    "low-bit, split": ([LOW], SPLIT, 1.0),
    "low-bit, 16 bits": ([LowBitAdamW(16)], WHOLE, 1.0),
    "low-bit, kept in 8 bits": ([LOW, GradientRelease("kept8")], SPLIT, 1.0),
    "low-bit, host": ([LOW, GradientRelease("host")], SPLIT, 1.0),
    "low-bit, kept in 8 bits, packed, recomputed": (
        [Packing(), Checkpointing(), LOW, GradientRelease("kept8")], WHOLE, 1.0,
    ),
    "half precision, packed, recomputed": (
        [Packing(), HalfPrecision(), Checkpointing(2)], WHOLE, 1.0,
    ),
    "LoRA, packed": ([Lora(), Packing()], WHOLE, 1.0),
}  # fmt: skip


def arguments(folder: Path, clip: float) -> TrainingArguments:
    return TrainingArguments(
        str(folder), per_device_train_batch_size=len(LENGTHS), max_grad_norm=clip, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip


def rows() -> list[dict[str, Any]]:
    return [
        {"input_ids": [2, *[5 + at] * (length - 2), 3], "labels": at % 2}
        for at, length in enumerate(LENGTHS)
    ]


def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    padded = small_training.collate(batch)
    return {**padded, "token_type_ids": torch.zeros_like(padded["input_ids"])}


def really(
    folder: Path, strategies: list[Strategy], limits: MicroBatching, clip: float
) -> tuple[int, int]:
    """The highest use of two steps of BudgetTrainer, and what its weights take."""
    torch.manual_seed(0)
    trainer = BudgetTrainer(
        Bert(BertConfig(**CONFIG)),
        arguments(folder, clip),
        strategies=strategies,
        micro_batching=limits,
        train_dataset=rows(),
        data_collator=collate,
    )
    return peak_of_two_steps(trainer)


@pytest.mark.parametrize("name", RUNS)
def test_the_traced_peak_is_that_of_the_real_step(name: str, tmp_path: Path) -> None:
    strategies, limits, clip = RUNS[name]
    workload = Task(config=BertConfig(**CONFIG), lengths=LENGTHS, args=arguments(tmp_path, clip))
    _, phases, trace = price_memory(workload, Candidate(tuple(strategies), limits), None)
    measured, weights = really(tmp_path, strategies, limits, clip)
    predicted = phases[TRAINING]
    assert predicted.components[Component.WEIGHTS] == weights
    allowed = ALLOWED if limits is WHOLE else ALLOWED_SPLIT
    assert predicted.allocated_bytes == pytest.approx(measured, rel=allowed)
    assert trace.parameters > 0


def launched_runs() -> list[dict[str, Any]]:
    """Measured runs of memfit's strategies that a card launched kernel by kernel.

    `GradientRelease()` released gradients inside backward when they were measured.
    """
    runs = json.loads(MEASURED.read_text(encoding="utf-8"))["runs"]
    not_now = {"CudaGraphs()", "GradientRelease()"}
    return [
        run
        for run in runs
        if not not_now & set(run.get("run", {}).get("strategies", not_now)) and "error" not in run
    ]


@pytest.mark.parametrize("run", launched_runs(), ids=lambda run: run["name"])
def test_what_a_card_measured_is_predicted_without_it(run: dict[str, Any], tmp_path: Path) -> None:
    made = {name: getattr(strategies_module, name) for name in strategies_module.__all__}
    chosen = tuple(eval(text, made) for text in run["run"]["strategies"])
    is_xlmr = run["run"].get("model") == "xlmr"
    shape = {**LARGE, "vocab_size": 250002, "pad_token_id": 1} if is_xlmr else LARGE
    config = (XLMRobertaConfig if is_xlmr else BertConfig)(**shape)
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=32, report_to="none", use_cpu=True,
        **run["run"].get("args", {}),
    )  # fmt: skip
    workload = Task(config=config, lengths=(128,) * 64, args=args)
    _, phases, _ = price_memory(
        workload, Candidate(chosen, WHOLE), find_card("H200"), tokens=LARGEST_DRAWN
    )
    offloads = any(one.name == "activation_offload" for one in chosen)
    found = phases[TRAINING].allocated_bytes
    assert found == pytest.approx(run["max_memory_allocated"], rel=0.05 if offloads else 0.03)


def test_every_strategy_that_a_cpu_has_a_use_for_is_compared() -> None:
    compared = {one.name for strategies, _, _ in RUNS.values() for one in strategies}
    elsewhere = {
        "fused_attention", "fused_layers", "activation_offload", "optimizer_offload",
        "small_workspace", "cuda_graphs", "state_offload", "fully_sharded",
    }  # fmt: skip
    assert compared == {kind.name for kind in ORDER} - elsewhere
