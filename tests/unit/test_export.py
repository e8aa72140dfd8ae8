"""A model trained in few bits is saved with all of them."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from memfit import BudgetTrainer
from memfit.records.scoring import Scoring
from memfit.run import save
from memfit.strategies import Lora, LowBitAdamW, Packing, Strategy
from small_training import collate, wide_model, wide_texts


def trained(
    folder: Path, strategies: list[Strategy] | None = None, **arguments: Any
) -> BudgetTrainer:
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=4, learning_rate=1e-3,
        report_to="none", disable_tqdm=True, **{"save_strategy": "no", **arguments},
    )  # fmt: skip
    calls: list[Any] = []

    def earlier_is_better(found: Any) -> dict[str, float]:
        calls.append(found)
        return {"earliness": -float(len(calls))}

    trainer = BudgetTrainer(
        wide_model(0.0), args, compute_metrics=earlier_is_better, train_dataset=wide_texts(),
        eval_dataset=wide_texts()[:8],
        data_collator=collate, strategies=strategies or [Packing(), LowBitAdamW()],
    )  # fmt: skip
    trainer.train()
    return trainer


def test_a_saved_model_is_the_masters_in_float32(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    trainer.save_model(str(tmp_path / "model"))
    saved = load_file(tmp_path / "model" / "model.safetensors")
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    masters = optimizer.fp32_state_dict(trainer.model)
    assert all(value.dtype == torch.float32 for value in saved.values())
    assert all(torch.equal(value, masters[name]) for name, value in saved.items())
    finer = [name for name, value in saved.items() if not torch.equal(value, _halved(value))]
    assert finer  # bits that half precision does not have
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.float32


def test_the_folder_of_an_upload_stays_until_it_is_done(tmp_path: Path) -> None:
    """The upload lists the output folder in its own thread, and fails if a part disappears."""
    trainer = trained(tmp_path, hub_strategy="every_save")
    job: Future[None] = Future()

    def push(folder: str) -> None:
        assert (Path(folder) / "model.safetensors").is_file()
        trainer.push_in_progress = SimpleNamespace(jobs=[job])

    trainer.masters.push(tmp_path, push)
    assert len(list(tmp_path.glob("_float32-*"))) == 1
    job.set_result(None)
    assert list(tmp_path.glob("_float32-*")) == []
    trainer.masters.push(tmp_path, lambda _: None)  # an upload that does not begin
    assert list(tmp_path.glob("_float32-*")) == []


def test_the_best_model_is_saved_with_the_masters_of_its_own_step(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    trainer = trained(
        tmp_path, load_best_model_at_end=True, metric_for_best_model="earliness",
        greater_is_better=True, **best,
    )  # fmt: skip
    assert trainer.state.best_model_checkpoint is not None
    assert trainer.state.best_global_step == 2
    trainer.save_model(str(tmp_path / "model"))
    saved = load_file(tmp_path / "model" / "model.safetensors")
    kept = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    for name, value in saved.items():
        half = kept[name].float()
        # A master rounds to its half-precision value, or lies within half a step of it.
        torch.testing.assert_close(value, half, rtol=2**-8, atol=1e-6)
    assert any(not torch.equal(saved[name], kept[name].float()) for name in saved)


def test_without_their_masters_weights_are_saved_as_they_are(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    trainer = trained(
        tmp_path, load_best_model_at_end=True, save_only_model=True, greater_is_better=True,
        metric_for_best_model="earliness", **best,
    )  # fmt: skip
    assert trainer.state.best_global_step < trainer.state.global_step
    trainer.save_model(str(tmp_path / "model"))
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(value.dtype == torch.float32 for value in saved.values())
    kept = load_file(Path(str(trainer.state.best_model_checkpoint)) / "model.safetensors")
    assert all(torch.equal(value, kept[name].float()) for name, value in saved.items())


def test_merged_adapters_are_saved_with_the_bits_they_were_trained_in(tmp_path: Path) -> None:
    trainer = trained(tmp_path, strategies=[Packing(), Lora(rank=2), LowBitAdamW()])
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    masters = optimizer.fp32_state_dict(trainer.model)
    trainer.processing_class = _NoTokenizer()
    (tmp_path / "model").mkdir()
    save.save_model(trainer, tmp_path / "model", Scoring())
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(value.dtype == torch.float32 for value in saved.values())
    name = "bert.encoder.layer.1.attention.self.query"
    part = f"base_model.model.{name}"
    lora_a, lora_b = (masters[f"{part}.lora_{one}.default.weight"] for one in "AB")
    expected = masters[f"{part}.base_layer.weight"] + 2.0 * lora_b @ lora_a
    torch.testing.assert_close(saved[f"{name}.weight"], expected, rtol=1e-6, atol=1e-8)
    assert not torch.equal(expected, _halved(expected))
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.float32


class _NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """There is none to save."""


def _halved(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16().float()
