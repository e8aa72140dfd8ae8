"""Memory reaches what the Trainer reports to: TensorBoard itself, and any other callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import TrainerCallback

from memfit import BudgetTrainer, TrainingArguments
from memfit.engine.micro_batches import MicroBatching
from memfit.strategies import Packing
from memfit.training.progress import MemoryLogging, register_memory_logging

STEPS = 4


class Recorder(TrainerCallback):
    """What W&B and MLflow are: a callback that is handed the logs."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        self.logs.append(dict(logs or {}))


def trained(folder: Path, model_dir: Path, *callbacks: Any, **options: Any) -> BudgetTrainer:
    from transformers import AutoModelForSequenceClassification

    rows = [
        {"input_ids": [2, 7, 8, 3], "attention_mask": [1] * 4, "labels": n % 2} for n in range(8)
    ]
    trainer = BudgetTrainer(
        AutoModelForSequenceClassification.from_pretrained(model_dir),
        TrainingArguments(
            str(folder), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1,
            save_strategy="no", use_cpu=True, disable_tqdm=True, **options,
        ),
        train_dataset=rows,
        callbacks=list(callbacks),
        budget="2GiB",
        strategies=[Packing()],
        micro_batching=MicroBatching(),
    )  # fmt: skip
    trainer.train()
    return trainer


def test_tensorboard_draws_memory_beside_the_loss(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    trained(tmp_path / "run", tiny_model_dir, report_to="tensorboard")
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    drawn = {name: [one.value for one in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert len(drawn["train/memory_gib"]) == len(drawn["train/loss"]) == STEPS
    assert drawn["train/memory_budget_gib"] == [2.0] * STEPS
    now = psutil.Process().memory_info().rss / 2**30
    assert drawn["train/memory_peak_gib"][-1] == pytest.approx(now, rel=0.5)


def test_other_reporters_get_it_and_the_history_stays_as_it_is(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    recorder = Recorder()
    trainer = trained(tmp_path, tiny_model_dir, recorder)
    steps = [logs for logs in recorder.logs if "loss" in logs]
    assert len(steps) == STEPS
    for logs in steps:
        assert 0 < logs["memory_gib"] <= logs["memory_peak_gib"]
        assert logs["memory_budget_gib"] == 2.0
    summary = recorder.logs[-1]
    assert "train_runtime" in summary
    assert "memory_gib" not in summary
    assert all("memory_gib" not in entry for entry in trainer.state.log_history)


def test_it_is_registered_once_and_before_all_others(tmp_path: Path, tiny_model_dir: Path) -> None:
    trainer = trained(tmp_path, tiny_model_dir)
    register_memory_logging(trainer)
    callbacks = trainer.callback_handler.callbacks
    assert sum(isinstance(one, MemoryLogging) for one in callbacks) == 1
    reporting = [type(one).__name__ for one in callbacks]
    assert reporting.index("MemoryLogging") < reporting.index("DefaultFlowCallback")
