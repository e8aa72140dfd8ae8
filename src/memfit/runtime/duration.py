"""How long a training takes, by what its rehearsal measured."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from memfit.runtime.guarded import GuardedTraining

_FORWARD_SHARE = 1 / 3
"""A forward pass against forward and backward, which takes twice as long."""
_UPDATE_BYTES = 40
"""Of a parameter: its gradient is read for the norm, then read and scaled; AdamW reads weight,
gradient and two moments, and writes three of them."""
_SAVED_BYTES_PER_SECOND = 7.5e8
"""Of a checkpoint: copied to the host, written, read for its checksum and flushed."""


def update_seconds(trainer: GuardedTraining) -> float:
    """What the optimizer needs after each backward, by how fast memory is read and written.

    Nothing where the update is part of what was rehearsed, or is done elsewhere.
    """
    if trainer.setup.sink is not None or trainer.setup.make_optimizer is not None:
        return 0.0
    learning = [one for one in trainer.model.parameters() if one.requires_grad]
    largest = max(learning, key=torch.Tensor.numel)
    on_cuda = largest.device.type == "cuda"
    seconds = []
    with torch.no_grad():
        for _ in range(2):  # the first loads the kernel
            started = time.perf_counter()
            largest.mul_(1)  # every bit stays as it is
            if on_cuda:
                torch.cuda.synchronize(largest.device)
            seconds.append(time.perf_counter() - started)
    each = min(seconds) / max(2 * largest.nbytes, 1)
    return each * _UPDATE_BYTES * sum(one.numel() for one in learning)


def seconds_between_steps(trainer: GuardedTraining, step_seconds: float) -> float:
    """Evaluations and checkpoints that come before the last step."""
    args, state = trainer.args, trainer.state
    steps = state.max_steps - state.global_step
    an_epoch = max(round(state.max_steps / max(state.num_train_epochs, 1)), 1)
    rows = len(trainer.eval_dataset) if hasattr(trainer.eval_dataset, "__len__") else 0  # type: ignore[arg-type]
    batches = rows / max(args.per_device_train_batch_size, 1)
    evaluation = batches * step_seconds * _FORWARD_SHARE
    saving = trainer.checkpoint_bytes / _SAVED_BYTES_PER_SECOND
    evaluations = _before_the_last(args.eval_strategy, state.eval_steps, steps, an_epoch)
    saves = _before_the_last(args.save_strategy, state.save_steps, steps, an_epoch)
    return evaluations * evaluation + saves * saving


def _before_the_last(strategy: Any, every: int | None, steps: int, an_epoch: int) -> int:
    kind = str(getattr(strategy, "value", strategy))
    each = {"epoch": an_epoch, "steps": every or 0}.get(kind, 0)
    return max(steps - 1, 0) // each if each else 0
