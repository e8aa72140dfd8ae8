"""A Trainer that looks at the numbers it trains with: finite losses, weights that move."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from memfit.runtime.health import LossWatch, check_weights, gate_sink, rows_of_step
from memfit.runtime.noise import BatchNoise
from memfit.runtime.saving import SafeSaving
from memfit.runtime.stall import StallWatch


class WatchedTraining(SafeSaving):
    """What BudgetTrainer adds around each update; health.py says what is done and why."""

    watch: LossWatch
    noise: BatchNoise
    _step_loss: Tensor | None = None
    _tr_loss: Tensor
    _globalstep_last_logged: int

    def watch_training(self, on_nan: str) -> None:
        """Begin, once the Trainer is made."""
        self.watch = LossWatch(on_nan, rows_of=self._rows_of, record=self._record_skipped)
        self.add_callback(StallWatch())
        self.noise = BatchNoise()
        self.add_callback(self.noise)

    def _seen(self, loss: Tensor) -> Tensor:
        """Keep a step's loss until its gradient is there, too; returns what the log adds up."""
        self._step_loss = loss
        if not self.watch.skips:
            return loss
        steps = 1 + self.state.global_step - self._globalstep_last_logged
        return self.watch.to_log(loss, self._tr_loss / steps)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        loss, self._step_loss = self._step_loss, None
        if loss is not None and self._leaves_out(loss, norm):
            model.zero_grad()  # an optimizer without gradients does nothing
            return torch.zeros_like(norm) if isinstance(norm, Tensor) else norm
        return norm

    def _leaves_out(self, loss: Tensor, norm: Any) -> bool:
        scaler = getattr(self.accelerator, "scaler", None)
        if self.watch.skips and self.accelerator.num_processes > 1:
            # All ranks must decide alike; the norm is that of all of them already.
            loss = self.accelerator.reduce(loss.detach().clone(), reduction="mean")
        inner: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        sink: Any = self.setup.sink
        if (scale := getattr(sink, "loss_scale", None)) is not None:
            norm = scale.judged(norm)
        return self.watch.after_backward(
            self.state.global_step + 1,
            loss,
            # An overflow of scaled gradients is nothing unusual: the scaler skips and scales down.
            norm if scaler is None else None,
            inner if sink is None and scaler is None else None,
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, without the norm of a step that overflowed: JSON has no word for it."""
        if not math.isfinite(logs.get("grad_norm", 0.0)):
            logs = {name: value for name, value in logs.items() if name != "grad_norm"}
        super().log(logs, *args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As the Trainer's; a sink is told to skip where that was asked for."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        if self.watch.skips and self.setup.sink is not None:
            gate_sink(self.setup.sink, self.args.device)
        return optimizer

    def before_saving(self) -> None:
        """No checkpoint holds what a batch that is not finite made of the weights."""
        super().before_saving()
        self.watch.settle()
        assert self.model is not None
        check_weights(self.model, self.state.global_step)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.watch.settle()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _rows_of(self, step: int) -> list[int] | None:
        return rows_of_step(self.callback_handler.train_dataloader, step)

    def _record_skipped(self, entry: dict[str, Any]) -> None:
        self.state.log_history.append(entry)
