"""TrainingArguments as transformers has them, that also take what older tutorials write."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
import transformers

from memfit._compat import OLD_FIELDS, modernize
from memfit.config.launched import cards_are_shared, launched_rank
from memfit.errors import ConfigError, nearest
from memfit.i18n import t

# The last word of a metric's name decides; "neg_mean_squared_error" is scikit-learn's negated kind.
_SMALLER_IS_BETTER = (
    "loss", "error", "mse", "mae", "rmse", "mape", "msle", "rmsle", "mad",
    "perplexity", "brier", "deviance", "wer", "cer", "ece",
)  # fmt: skip


def smaller_is_better(metric: str) -> bool:
    """Whether the best value of this metric is the smallest: loss, mse, mae, rmse, ..."""
    name = metric.lower().removeprefix("eval_")
    if name.startswith("neg_"):
        return False
    return name.replace("-", "_").rsplit("_", 1)[-1] in _SMALLER_IS_BETTER


class TrainingArguments(transformers.TrainingArguments):
    """transformers' TrainingArguments; older spellings are taken, with a word on today's.

    `metric_for_best_model="mse"` keeps the smallest, as does every metric that is an error.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        known = [field.name for field in dataclasses.fields(type(self))]
        unknown = next((name for name in kwargs if name not in {*known, *OLD_FIELDS}), None)
        if unknown is not None:
            raise ConfigError(
                "TrainingArguments has no field {unknown}.{hint}",
                unknown=repr(unknown),
                hint=nearest(unknown, known),
            )
        fields, notes = modernize(kwargs)
        for note in notes:
            warnings.warn(t("TrainingArguments: {note}", note=note), FutureWarning, stacklevel=2)
        super().__init__(*args, **fields)

    def __post_init__(self) -> None:
        if launched_rank().world_size > 1:
            here = torch.accelerator.current_accelerator(check_available=True)
            if here is None or here.type == "mps":
                self.use_cpu = True  # accelerate joins ranks on a CPU only if told to use it
            elif cards_are_shared():
                self.ddp_backend = "gloo"  # NCCL refuses two ranks on one GPU
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not smaller_is_better(self.metric_for_best_model)
        super().__post_init__()  # type: ignore[no-untyped-call]
