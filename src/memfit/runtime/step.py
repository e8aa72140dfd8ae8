"""One optimizer step's gradient: the effective batch, run as micro-batches.

    split  ->  prepare (move to the device)  ->  loss  ->  scaled backward

This is the one place that decides how an effective batch is run; strategies hook in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.errors import DataError
from memfit.messages import t
from memfit.runtime.batching import Batch, MicroBatch, MicroBatching, Trim, split


def _no_context(model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG001
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Share:
    """What a micro-batch's mean is a mean of, and what the whole batch's is."""

    weight: float
    total: float


@dataclass(frozen=True)
class StepExecutor:
    """Runs effective batches so that their gradient is the one of the whole batch at once.

    `weigh` says what a micro-batch's mean loss is a mean of (runtime/loss.py); `loss` gets the
    prepared inputs and that weight; `mean_over_ranks` averages the weight of whole batches over
    data-parallel ranks, so that ranks with fewer rows count less. Each of `around` is entered
    around the loss and the backward of every micro-batch.
    """

    micro_batching: MicroBatching
    trim: Trim
    weigh: Callable[[Batch], float]
    prepare: Callable[[Batch], Batch]
    loss: Callable[[nn.Module, Batch, float], torch.Tensor]
    backward: Callable[[torch.Tensor], None]
    no_sync: Callable[[nn.Module], AbstractContextManager[None]] = _no_context
    mean_over_ranks: Callable[[float], float] = float
    around: Sequence[Callable[[], AbstractContextManager[Any]]] = ()
    packed: bool = False

    def run(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Leave the batch's gradient in the parameters; return its mean loss, detached."""
        parts = self.weighted_parts(batch)
        losses = []
        for index, (part, share) in enumerate(parts):
            # Ranks exchange gradients once, with the last micro-batch.
            is_last = index == len(parts) - 1
            with ExitStack() as contexts:
                contexts.enter_context(nullcontext() if is_last else self.no_sync(model))
                losses.append(self.micro_step(model, part, share))
        return torch.stack(losses).sum()

    def weighted_parts(self, batch: Batch) -> list[tuple[MicroBatch, Share]]:
        """The micro-batches that count, each with its share in the batch's mean."""
        parts = [(part, self.weigh(part.inputs)) for part in self.split(batch)]
        # A micro-batch of ignored labels only has no mean, and no share in the whole one.
        parts = [(part, weight) for part, weight in parts if weight > 0]
        total = self.mean_over_ranks(sum(weight for _, weight in parts))
        if not parts:
            raise DataError(
                t("a training batch has no label that counts: all are -100 or of weight zero")
            )
        return [(part, Share(weight, total)) for part, weight in parts]

    def micro_step(self, model: nn.Module, part: MicroBatch, share: Share) -> torch.Tensor:
        """Forward and backward of one micro-batch; its part of the mean loss, detached."""
        with self.contexts():
            loss = self.forward(model, part, share)
            self.backward(loss)
        return loss.detach()

    def forward(self, model: nn.Module, part: MicroBatch, share: Share) -> torch.Tensor:
        """A micro-batch's part of the mean loss."""
        mean = self.loss(model, self.prepare(part.inputs), share.weight)
        return mean * (share.weight / share.total)

    @contextmanager
    def contexts(self) -> Iterator[None]:
        """What is around the loss and the backward of a micro-batch."""
        with ExitStack() as entered:
            for context in self.around:
                entered.enter_context(context())
            yield

    def rehearse(self, model: nn.Module, batch: Batch) -> None:
        """Forward and backward as in `run`; the gradients are the caller's to drop."""
        self.run(model, batch)

    def dress(self, model: nn.Module, batch: Batch, steps: int = 1) -> None:
        """Whole steps that change nothing, as far as that can be had; gradients as in `rehearse`.

        Without a sink the update is left out: it would move the optimizer's state.
        """
        for _ in range(steps):
            model.zero_grad()
            self.rehearse(model, batch)

    def on_stream(self) -> AbstractContextManager[None]:
        """What is launched inside runs where the steps do."""
        return nullcontext()

    @property
    def captured_graphs(self) -> int:
        """CUDA graphs that are held now."""
        return 0

    def drop(self) -> None:
        """Give back memory that is only held to be faster."""

    def split(self, batch: Batch) -> list[MicroBatch]:
        """How this batch will be run."""
        return split(batch, self.micro_batching, self.trim, packed=self.packed)
