"""The stock Trainer's optimizer step, as `transformers.Trainer` runs it.

Forward under autocast, backward, clipping, optimizer, gradients dropped. The same code
runs on fake tensors for a prediction and on real CPU tensors to check it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from memfit.memory.components import Component
from memfit.memory.models import make_batch
from memfit.memory.optimizers import make_optimizer, state_tensors
from memfit.memory.spec import StepSpec
from memfit.memory.trace import Tracker


@dataclass
class Stepper:
    """A model, its optimizer and a tracker: one training step at a time."""

    spec: StepSpec
    config: Any
    model: Any
    tracker: Tracker
    cuda: bool

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.spec, self.model, cuda=self.cuda)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def micro_batch(self) -> None:
        """Forward and backward of one device batch; the gradients stay."""
        spec = self.spec
        batch = make_batch(spec, self.config, spec.rows, spec.length)
        loss = self._loss(batch)
        del batch
        torch.autograd.backward(loss / spec.gradient_accumulation_steps)
        self.tracker.tag(
            (p.grad for p in self.parameters if p.grad is not None), Component.GRADIENTS
        )

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with self._autocast():
            outputs = self.model(**batch)
        # accelerate turns what leaves autocast into fp32, the logits too.
        loss: torch.Tensor = outputs["loss"].float()
        if self.spec.autocast:
            outputs["logits"].float()
        return loss

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if not self.spec.autocast:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=getattr(torch, self.spec.autocast_dtype))

    def update(self) -> None:
        """Clip, then step the optimizer."""
        with self.tracker.accounting(Component.OPTIMIZER):
            if self.spec.max_grad_norm > 0:
                torch.nn.utils.clip_grad_norm_(
                    self.parameters, self.spec.max_grad_norm, foreach=self.cuda
                )
            self.optimizer.step()
        self.tracker.tag(state_tensors(self.optimizer, host=False), Component.OPTIMIZER)
        if self.cuda:
            self.tracker.forget(state_tensors(self.optimizer, host=True))

    def drop_gradients(self) -> None:
        """`model.zero_grad()`: the gradients are freed, not zeroed."""
        self.model.zero_grad(set_to_none=True)

    def evaluate(self) -> None:
        """One evaluation batch: forward without a graph."""
        spec = self.spec
        rows, length = spec.eval_rows or spec.rows, spec.eval_length or spec.length
        self.model.eval()
        with torch.no_grad():
            self._loss(make_batch(spec, self.config, rows, length))
        self.model.train()
