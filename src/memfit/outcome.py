"""What a training ends in: its best model evaluated and saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    output = trainer.predict(tokens.validation)
    logits = output.predictions
    # Some heads return their hidden states after the logits.
    logits = logits[0] if isinstance(logits, tuple) else logits
    labels: Any = output.label_ids
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
            model.save_pretrained(folder)
        for weights in folder.glob("*.safetensors"):
            # Written as a private file; the result should be as readable as the rest of it.
            weights.chmod((folder / "config.json").stat().st_mode)
        tokenizer.save_pretrained(folder)
        trainer.state.save_to_json(str(folder / "trainer_state.json"))
