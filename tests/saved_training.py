"""A small training that is saved half-way, resumed by another process's model, and exported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from memfit import BudgetTrainer
from memfit.records.scoring import Scoring
from memfit.run.save import save_model
from small_training import collate, model_of
from strategy_combinations import LENGTHS, SHAPE, Combination

STEPS, SAVED_AT = 3, 2


class Words:
    """As much of a tokenizer as saving a model asks for."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Called beside the model's own."""


def texts() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(5, 300, (length,), generator=draw).tolist() for length in LENGTHS]
    return [{"input_ids": row, "labels": row[0] % 3} for row in ids]


def trained(
    folder: Path,
    strategies: Combination,
    *,
    clip: float = 1.0,
    resume: bool = False,
    dropout: float = 0.1,
    callbacks: Sequence[Any] = (),
    compute_metrics: Callable[[Any], dict[str, float]] | None = None,
    **more: Any,
) -> BudgetTrainer:
    """All steps with two checkpoints, or those after the first checkpoint from other weights."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8, "max_steps": STEPS, "save_steps": SAVED_AT,
        "learning_rate": 1e-3, "max_grad_norm": clip, "logging_steps": 1, "report_to": "none",
        "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    args = transformers.TrainingArguments(str(folder), **{**settings, **more})
    torch.manual_seed(11)
    trainer = BudgetTrainer(
        # What is not part of a checkpoint of adapters is the model itself: it must be the same.
        model_of(dropout, seed=7 if resume and not _has_adapters(strategies) else 0, **SHAPE),
        args,
        strategies=strategies,
        train_dataset=texts(),
        eval_dataset=texts()[:8],
        callbacks=list(callbacks),
        compute_metrics=compute_metrics,
        data_collator=collate,
        processing_class=Words(),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}") if resume else None)
    return trainer


def _has_adapters(strategies: Combination) -> bool:
    return any(one.name == "lora" for one in strategies)


def losses(trainer: BudgetTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def exported(trainer: BudgetTrainer, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the model somebody would use, as they lie in the file."""
    folder.mkdir()
    save_model(trainer, folder, Scoring())
    return load_file(folder / "model.safetensors")


def logits_of(folder: Path) -> torch.Tensor:
    """What the exported model says, loaded as anybody would."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.dtype == torch.float32
    batch = {name: value for name, value in collate(texts()).items() if name != "labels"}
    with torch.no_grad():
        return model.eval()(**batch).logits
