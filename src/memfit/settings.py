"""TrainingArguments for a run: memfit's few defaults under what the user gave.

| field | memfit | TrainingArguments |
|---|---|---|
| per_device_train_batch_size | 32 | 8 |
| per_device_eval_batch_size | 64 | 8 |
| learning_rate | 2e-5 | 5e-5 |
| eval_strategy | epoch | no |
| save_strategy | as eval_strategy | steps |
| save_total_limit | 3 | none |
| load_best_model_at_end | where saving and evaluating go together | no |
| metric_for_best_model | f1, for a regression mse | loss |
| logging_steps | 2 % of the steps | 500 |
| dataloader_pin_memory | with a GPU | yes |

Where the whole encoder is frozen the learning rate is 1e-3, unless you give one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import ConfigError, MemfitError

if TYPE_CHECKING:
    from memfit.arguments import TrainingArguments

DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "learning_rate": 2e-5,
    "eval_strategy": "epoch",
    "save_total_limit": 3,
    "logging_steps": 0.02,
}


HEAD_LEARNING_RATE = 1e-3
"""At 2e-5 a fresh head on a frozen encoder learns nothing (benchmarks/quality.py)."""


def training_arguments(
    training: Mapping[str, Any], output_dir: Path, best_metric: str, *, head_only: bool = False
) -> TrainingArguments:
    """The Trainer's arguments, or a ConfigError that names what they refuse."""
    import torch

    from memfit.arguments import TrainingArguments

    fields = with_defaults(training, best_metric)
    if head_only and "learning_rate" not in training:
        fields["learning_rate"] = HEAD_LEARNING_RATE
    fields.setdefault("dataloader_pin_memory", torch.cuda.is_available())
    try:
        return TrainingArguments(output_dir=str(output_dir), **fields)
    except MemfitError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"TrainingArguments refuses what was given: {reason}") from None


def with_defaults(training: Mapping[str, Any], best_metric: str) -> dict[str, Any]:
    """Fields that belong together follow the one the user set."""
    fields = {**DEFAULTS, **training}
    evaluates = str(fields["eval_strategy"])
    if "save_strategy" not in fields:
        # Without evaluation there are still checkpoints, for --resume.
        fields["save_strategy"] = "epoch" if evaluates == "no" else evaluates
    if fields.get("eval_steps") is not None:
        fields.setdefault("save_steps", fields["eval_steps"])
    together = evaluates != "no" and str(fields["save_strategy"]) in (evaluates, "best")
    fields.setdefault("load_best_model_at_end", together)
    if fields["load_best_model_at_end"] or str(fields["save_strategy"]) == "best":
        fields.setdefault("metric_for_best_model", best_metric)
    return fields
