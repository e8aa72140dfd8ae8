"""One step tried before the first, to say how long the training will take.

It leaves no trace: gradients are dropped, no weight moves, random numbers are put back.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from memfit.runtime.checkpoint import preserved_rng

if TYPE_CHECKING:
    from memfit.runtime.trainer import BudgetTrainer

_TRIES = 2
"""The first also loads kernels and warms caches."""
_LONG_SECONDS = 5.0
"""Nobody should wait for a second try of a step that takes this long."""


def rehearsed_step_seconds(trainer: BudgetTrainer) -> float:
    """Forward and backward of one effective batch of rows from all over the dataset."""
    dataset: Any = trainer.train_dataset
    count = min(trainer.args.per_device_train_batch_size, len(dataset))
    rows = [dataset[index * len(dataset) // count] for index in range(count)]
    seconds = 0.0
    with preserved_rng():
        batch = trainer.data_collator(rows)
        trainer.model.train()
        for _ in range(_TRIES):
            started = time.perf_counter()
            trainer.executor.run(trainer.model, batch)
            if trainer.args.device.type == "cuda":
                torch.cuda.synchronize(trainer.args.device)
            seconds = time.perf_counter() - started
            trainer.model.zero_grad()
            if seconds > _LONG_SECONDS:
                break
    return seconds
