"""The memory of real steps and of recorded events, by the code that predictions use."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param

from memfit import BudgetTrainer
from memfit.memory.cards import find_card
from memfit.memory.components import Component, Event, MemoryPeak
from memfit.memory.measured import plain_tensors
from memfit.memory.phases import Run, peaks
from memfit.memory.tracing.tracker import Tracker


class RealTracker(Tracker):  # type: ignore[no-untyped-call]
    """Also follows weights that are divided among ranks, and gathered for a while."""

    def _born(self, tensor: torch.Tensor) -> None:
        for part in plain_tensors(tensor):
            super()._born(part)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside, FSDP2 says when it empties a storage or fills it again."""

        def telling(change: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
            def changed(tensor: torch.Tensor) -> None:
                change(tensor)
                self.resized(tensor)

            return changed

        with (
            patch.object(_fsdp_param, "alloc_storage", telling(_fsdp_param.alloc_storage)),
            patch.object(_fsdp_param, "free_storage", telling(_fsdp_param.free_storage)),
        ):
            yield


def peak_of_two_steps(trainer: BudgetTrainer) -> tuple[int, int]:
    """The highest use of two steps of the first batch, and what the weights take."""
    model: Any = trainer.accelerator.prepare(trainer.model)
    trainer.create_optimizer_and_scheduler(2)
    model.train()
    tracker = RealTracker()
    tracker.adopt(iter((*model.parameters(), *model.buffers())), Component.WEIGHTS)
    weights = tracker.live_bytes
    gc.collect()
    gc.disable()
    try:
        with tracker.told(), tracker:
            loader = trainer.get_train_dataloader()
            batch = next(iter(loader))
            trainer.prepare_steps(loader)
            tracker.peak_bytes = tracker.live_bytes  # sizes of a checkpoint were looked at
            for _ in range(2):
                trainer.training_step(model, dict(batch))
                if trainer.args.max_grad_norm:
                    trainer._clip_grad_norm(model)
                elif trainer.setup.sink is not None:
                    trainer._get_grad_norm(model)
                trainer.optimizer.step()
                model.zero_grad()
    finally:
        gc.enable()
        trainer.setup.restore()
    return tracker.peak_bytes, weights


def peak_on_a_card(events: Sequence[Event], *, expandable_segments: bool = False) -> MemoryPeak:
    """What the caching allocator of a card makes of these events."""
    run = Run(list(events), ())
    stretch = (0, len(events))
    (found,) = peaks(run, [stretch], find_card("T4"), expandable_segments=expandable_segments)
    return found
