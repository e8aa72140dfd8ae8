"""The memory of real steps and of recorded events, by the code that predictions use."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from memfit import BudgetTrainer
from memfit.memory.cards import find_card
from memfit.memory.components import Component, Event, MemoryPeak
from memfit.memory.measured import RealTracker
from memfit.memory.phases import Run, peaks


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
        with tracker.following():
            loader = trainer.get_train_dataloader()
            batch = next(iter(loader))
            loading_bytes = tracker.peak_bytes  # features of a frozen encoder are computed here
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
    return max(loading_bytes, tracker.peak_bytes), weights


def peak_on_a_card(events: Sequence[Event], *, expandable_segments: bool = False) -> MemoryPeak:
    """What the caching allocator of a card makes of these events."""
    run = Run(list(events), ())
    stretch = (0, len(events))
    (found,) = peaks(run, [stretch], find_card("T4"), expandable_segments=expandable_segments)
    return found
