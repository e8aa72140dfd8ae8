"""memfit fine-tunes a transformer text classifier inside the memory you have."""

from __future__ import annotations

import importlib
from typing import Any

from memfit._version import __version__

# name -> module; loaded on first use, so that importing memfit imports no torch.
_EXPORTS: dict[str, str] = {
    "Budget": "memfit.units",
    "BudgetTrainer": "memfit.training.trainer",
    "Classifier": "memfit.run.inference",
    "MemfitError": "memfit.errors",
    "RunConfig": "memfit.config",
    "TrainingArguments": "memfit.config.training_arguments",
    "compare": "memfit.api",
    "estimate": "memfit.api",
    "evaluate": "memfit.api",
    "export": "memfit.api",
    "finetune": "memfit.api",
    "ladder": "memfit.api",
    "load": "memfit.api",
    "plan": "memfit.api",
    "push": "memfit.api",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name == "finetune_many":
        raise AttributeError(
            "memfit.finetune_many is gone: call memfit.finetune for each table, or join the tables"
        )
    if name not in _EXPORTS:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
