"""What a training ends in: its best model evaluated and saved."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import RunStoppedError
from memfit.evaluation import Evaluation, evaluate_predictions, worst_mistakes
from memfit.files import staged_files
from memfit.results import write_evaluation

if TYPE_CHECKING:
    from memfit.data.values import TextData, TokenizedData
    from memfit.runtime.trainer import BudgetTrainer


def evaluate(
    trainer: BudgetTrainer, text: TextData, tokens: TokenizedData, folder: Path
) -> Evaluation:
    """Metrics and the worst mistakes on the validation rows, written to evaluation.json."""
    from memfit.runtime.predictions import logits_and_labels

    logits, labels = trainer.known_predictions() or (None, None)
    if logits is None or labels is None:
        logits, labels = logits_and_labels(trainer.predict(tokens.validation))
    evaluation = evaluate_predictions(logits, labels, text.labels)
    mistakes = worst_mistakes(logits, labels, text.labels, text.validation["text"])
    write_evaluation(folder, evaluation, mistakes)
    return evaluation


def save_model(trainer: BudgetTrainer, target: Path) -> None:
    """The best model as pipeline() wants it: adapters merged, tokenizer beside it."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    adapted = hasattr(model, "merge_and_unload")
    if adapted:
        trainer.widen_weights()
        model = model.merge_and_unload()
    tokenizer: Any = trainer.processing_class
    with staged_files(target) as folder:
        if adapted or not trainer.export_weights(folder):
            checkpoint = None if adapted else _checkpoint_of(trainer)
            if checkpoint is None or not _linked(checkpoint, folder):
                model.save_pretrained(folder)
        for weights in folder.glob("*.safetensors"):
            # Written as a private file; the result should be as readable as the rest of it.
            weights.chmod((folder / "config.json").stat().st_mode)
        tokenizer.save_pretrained(folder)
        trainer.state.save_to_json(str(folder / "trainer_state.json"))


def _checkpoint_of(trainer: BudgetTrainer) -> Path | None:
    """The checkpoint that holds the weights as they are now, whole and under its name."""
    try:
        trainer.settle_checkpoint()
    except RunStoppedError:
        return None  # said once the model is saved
    best = trainer.state.best_model_checkpoint
    if best and trainer.args.load_best_model_at_end:
        return Path(best)
    return trainer.held_checkpoint()


def _linked(checkpoint: Path, folder: Path) -> bool:
    """Gives the files of a checkpoint's model a second name; whether that could be done.

    Nothing is written twice. Where the disk has no links the model is saved once more.
    """
    weights = checkpoint / "model.safetensors"
    config = checkpoint / "config.json"
    if not weights.is_file() or weights.is_symlink() or not config.is_file():
        return False
    try:
        shutil.copyfile(config, folder / config.name)
        os.link(weights, folder / weights.name)
    except OSError:
        return False
    return True
