"""Every strategy behind one contract: what it may change in a training, and what it must not.

Each runs inside BudgetTrainer on a small real BERT against the plain training, alone and beside
packing, with and without clipping and micro-batches.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_against_stock import distance
from transformers import AutoModelForSequenceClassification
from transformers import BertForSequenceClassification as Bert

from memfit import BudgetTrainer
from memfit.engine.micro_batches import MicroBatching
from memfit.errors import ConfigError
from memfit.strategies import (
    ORDER,
    Checkpointing,
    CudaGraphs,
    Fidelity,
    GradientRelease,
    LowBitAdamW,
    Packing,
    Strategy,
    by_name,
    ordered,
)
from small_training import collate, wide_model, wide_texts

STEPS, AN_EPOCH = 12, 6
CLIP = 0.5
LOW = LowBitAdamW()
# What is trained with: by name, the strategies of one run and the clipping they are given.
RUNS: dict[str, tuple[list[Strategy], float]] = {
    "packing": ([Packing()], CLIP),
    "checkpointing": ([Checkpointing()], CLIP),
    "checkpointing one layer": ([Checkpointing(1)], CLIP),
    "24-bit": ([LOW], CLIP),
    "24-bit, unclipped": ([LOW], 0.0),
    "16-bit": ([LowBitAdamW(16)], CLIP),
    "kept8": ([LOW, GradientRelease("kept8")], CLIP),
    "host": ([LOW, GradientRelease("host")], CLIP),
}
# Strategies that are compared where a card is, or by what they are meant to change.
ELSEWHERE = {
    "freezing": "unit/test_strategy_freezing.py",
    "lora": "unit/test_strategy_lora.py",
    "truncation": "unit/test_strategy_truncation.py",
    "half_precision": "unit/test_strategy_half_precision.py",
    "frozen_features": "unit/test_strategy_features.py",
    "fused_attention": "unit/test_strategy_attention.py",
    "fused_layers": "unit/test_fused_layers.py",
    "activation_offload": "unit/test_strategy_offload.py",
    "small_state_optimizer": "unit/test_strategy_adafactor.py",
    "state_offload": "unit/test_strategy_state_offload.py",
    "optimizer_offload": "unit/test_strategy_optimizer_offload.py",
    "fully_sharded": "unit/test_strategy_fully_sharded.py",
    "small_workspace": "unit/test_strategy_workspace.py",
    "cuda_graphs": "gpu/test_graphs_gpu.py",
}
# Largest difference of a logged loss to plain training in fp32, by fidelity.
LOSS_TOLERANCE = {Fidelity.EXACT: 1e-5, Fidelity.ROUNDING: 3e-3}


def train(
    folder: Path,
    strategies: list[Strategy],
    clip: float,
    model: Bert | None = None,
    *,
    steps: int = STEPS,
    **more: Any,
) -> tuple[BudgetTrainer, list[float]]:
    """Steps of 16 rows; the trainer and its losses."""
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=16, max_steps=steps, learning_rate=1e-3,
        lr_scheduler_type="constant", max_grad_norm=clip, optim="adamw_torch", use_cpu=True,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, seed=3,
    )  # fmt: skip
    trainer = BudgetTrainer(
        model or wide_model(), args, train_dataset=wide_texts(), data_collator=collate,
        strategies=strategies, **more,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer, [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_every_strategy_is_compared_here_or_in_a_file_of_its_own() -> None:
    here = {one.name for strategies, _ in RUNS.values() for one in strategies}
    assert sorted([*here, *ELSEWHERE]) == sorted(kind.name for kind in ORDER)
    for name, file in ELSEWHERE.items():
        text = (Path(__file__).resolve().parents[1] / file).read_text(encoding="utf-8")
        assert by_name(name).__name__ in text, name


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[float, tuple[BudgetTrainer, list[float]]]:
    return {clip: train(tmp_path_factory.mktemp("plain"), [], clip) for clip in (0.0, CLIP)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[[str], tuple[BudgetTrainer, list[float]]]:
    """Each of the runs, made once."""

    @functools.cache
    def run(name: str) -> tuple[BudgetTrainer, list[float]]:
        return train(tmp_path_factory.mktemp("run"), *RUNS[name])

    return run


@pytest.mark.parametrize("name", RUNS)
def test_the_losses_are_those_of_plain_training(plain, trained, name):
    strategies, clip = RUNS[name]
    trainer, losses = trained(name)
    expected = plain[clip][1]
    fidelity = max(strategy.fidelity for strategy in strategies)
    assert trainer.state.global_step == STEPS
    assert losses == pytest.approx(expected, abs=LOSS_TOLERANCE[fidelity])
    # Something was learned, far beyond the tolerance: doing nothing, or every step twice, shows.
    assert expected[0] - losses[-1] > 0.1


def test_a_clip_that_binds_is_felt(plain):
    assert abs(plain[0.0][1][-1] - plain[CLIP][1][-1]) > LOSS_TOLERANCE[Fidelity.ROUNDING]


@pytest.mark.parametrize("name", RUNS)
def test_micro_batches_add_up(plain, tmp_path, name):
    strategies, clip = RUNS[name]
    limits = MicroBatching(max_rows=5)
    _, losses = train(tmp_path, strategies, clip, steps=AN_EPOCH, micro_batching=limits)
    fidelity = max(strategy.fidelity for strategy in strategies)
    assert losses == pytest.approx(plain[clip][1][:AN_EPOCH], abs=2 * LOSS_TOLERANCE[fidelity])


@pytest.mark.parametrize("name", [name for name in RUNS if "packing" not in name])
def test_beside_packing(plain, tmp_path, name):
    strategies, clip = RUNS[name]
    _, losses = train(tmp_path, [Packing(), *strategies], clip, steps=AN_EPOCH)
    fidelity = max(strategy.fidelity for strategy in strategies)
    assert losses == pytest.approx(plain[clip][1][:AN_EPOCH], abs=2 * LOSS_TOLERANCE[fidelity])


@pytest.mark.parametrize("name", RUNS)
def test_the_trained_model_saves_and_loads(trained, tmp_path, name):
    trainer, _ = trained(name)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "saved", dtype=torch.float32
    )
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if hasattr(optimizer, "fp32_state_dict"):  # with what the weights' own bits cannot hold
        trained = optimizer.fp32_state_dict(trainer.model)
    else:
        trained = {name: value.float() for name, value in trainer.model.state_dict().items()}
    assert distance(dict(loaded.state_dict()), trained) == 0
    batch = {key: value for key, value in collate(wide_texts(8)).items() if key != "labels"}
    answers = loaded.eval()(**batch).logits
    assert torch.isfinite(answers).all()


@pytest.mark.parametrize("name", RUNS)
def test_nothing_of_a_training_stays_when_nobody_holds_it(tmp_path, name):
    strategies, clip = RUNS[name]
    trainer, _ = train(
        tmp_path, strategies, clip, steps=2, budget="4GB", micro_batching=MicroBatching()
    )
    parts = [weakref.ref(one) for one in (trainer, trainer.model, trainer.optimizer)]
    del trainer
    gc.collect()
    assert [part() for part in parts] == [None, None, None]


def test_checkpointing_recomputes_with_the_same_dropout(tmp_path):
    _, plain = train(tmp_path, [], CLIP, wide_model(dropout=0.1))
    _, recomputed = train(tmp_path, [Checkpointing()], CLIP, wide_model(dropout=0.1))
    assert recomputed == plain


def test_a_resumed_low_bit_run_goes_on_bit_for_bit(tmp_path):
    def run(folder: Path, resume: bool) -> dict[str, torch.Tensor]:
        args = transformers.TrainingArguments(
            str(folder), per_device_train_batch_size=16, max_steps=6, learning_rate=5e-4,
            use_cpu=True, save_steps=3, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = BudgetTrainer(
            wide_model(dropout=0.1), args, train_dataset=wide_texts(), data_collator=collate,
            strategies=[Packing(), LowBitAdamW(16), GradientRelease("kept8")],
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
        return {name: value.clone() for name, value in trainer.model.state_dict().items()}

    whole = run(tmp_path, resume=False)
    resumed = run(tmp_path, resume=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_graphs_say_why_a_cpu_has_none(tmp_path):
    with pytest.raises(ConfigError, match="a cpu has no CUDA graphs"):
        train(tmp_path, [Packing(), LOW, CudaGraphs()], CLIP)


def test_the_order_is_the_registrys_whatever_is_given():
    given = [GradientRelease("kept8"), Packing(), LOW, Checkpointing()]
    assert [type(s) for s in ordered(given)] == [k for k in ORDER if k in map(type, given)]


def test_two_of_a_kind_are_refused():
    with pytest.raises(ConfigError, match="given twice"):
        ordered([Packing(), Packing()])


@pytest.mark.parametrize("pair", list(combinations(ORDER, 2)), ids=lambda k: k)
def test_a_conflict_is_refused_both_ways(pair):
    first, second = pair
    if second.name in first.conflicts or first.name in second.conflicts:
        with pytest.raises(ConfigError, match="cannot be used together"):
            ordered([first(), second()])
    else:
        assert len(ordered([first(), second()])) == 2


@pytest.mark.parametrize("kind", ORDER)
def test_every_strategy_says_what_it_is(kind):
    assert kind.reason
    assert kind.shrinks
    assert kind().fidelity in Fidelity
