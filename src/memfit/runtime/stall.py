"""A run that stands still: updates so small that they round to nothing in the weights' type.

In bfloat16 a weight of 0.02 has neighbours 0.00006 away; an update of 2e-5 does not reach the
middle between them, so without fp32 copies of the weights most of them never move. Looked at in
three steps of the run at most, in a few thousand weights.
"""

# ruff: noqa: ARG002 - the Trainer decides what its callbacks are given.

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memfit.messages import t

_LOOKS = 3
"""All of them must show it: a single batch may have next to no gradient."""
_STEPS_BETWEEN = 10
_TENSORS, _ELEMENTS = 12, 512
_MOVED_AT_LEAST = 0.5
"""In fp32 practically all weights with a gradient move; in pure bf16 about a quarter do."""
_OF_THE_LARGEST_RATE = 0.25
"""Warm-up and the end of the schedule make small steps on purpose."""


class StallWatch(TrainerCallback):
    """Says once that the weights do not move, if they do not."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._shares: list[float] = []
        self._next_step = 0
        self._is_done = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Optimizers of our own keep what the weights have no bits for; torch's do not."""
        optimizer = parts.get("optimizer")
        inner = type(getattr(optimizer, "optimizer", optimizer)).__module__
        self._shares, self._before = [], []
        self._is_done = not inner.startswith(("torch.optim", "transformers."))
        self._next_step = state.global_step + self._wait(state)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Remember some weights that have a gradient."""
        optimizer = parts.get("optimizer")
        due = not self._is_done and state.global_step + 1 >= self._next_step
        if due and _steps_in_earnest(optimizer):
            self._before = _sample(optimizer)
            self._next_step = state.global_step + 1 + self._wait(state)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """See how many of them are others now."""
        if not self._before:
            return
        moved = sum(int((_picked(p, at) != was).sum()) for p, at, was in self._before)
        count = sum(was.numel() for _, _, was in self._before)
        kind = str(self._before[0][2].dtype).removeprefix("torch.")
        self._before = []
        self._shares.append(moved / count)
        self._is_done = self._shares[-1] >= _MOVED_AT_LEAST or len(self._shares) == _LOOKS
        if max(self._shares) < _MOVED_AT_LEAST and len(self._shares) == _LOOKS:
            self._say(state.global_step + 1, kind, parts["optimizer"])

    def _wait(self, state: TrainerState) -> int:
        """Steps to the next look; in a short run a share of it."""
        return max(min(_STEPS_BETWEEN, state.max_steps // (_LOOKS + 1)), 1)

    def _say(self, step: int, kind: str, optimizer: Any) -> None:
        rate = max(group["lr"] for group in optimizer.param_groups)
        remedy = t("use a larger learning rate")
        if kind in ("bfloat16", "float16"):
            remedy = t(
                "keep the weights in float32 (--bf16 still computes in bfloat16), or use an "
                "optimizer with master weights"
            )
        warnings.warn(
            t(
                "the run stands still: in step {step} only {share:.0%} of the weights "
                "with a gradient moved; at a learning rate of {rate:.1e} updates round "
                "to nothing in {kind}; {remedy}",
                step=step,
                share=self._shares[-1],
                rate=rate,
                kind=kind,
                remedy=remedy,
            ),
            UserWarning,
            stacklevel=2,
        )


def _steps_in_earnest(optimizer: Any) -> bool:
    """Whether the learning rate is near its largest; each group's was noted by its schedule."""
    return any(
        group["lr"] >= _OF_THE_LARGEST_RATE * group.get("initial_lr", group["lr"]) > 0
        for group in optimizer.param_groups
    )


def _sample(optimizer: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """From the largest parameters: where, and what stands there; only with a gradient."""
    learning = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None and not p.grad.is_sparse
    ]
    taken = []
    for p in sorted(learning, key=lambda p: -p.numel())[:_TENSORS]:
        step = max(p.numel() // _ELEMENTS, 1)
        places = torch.arange(0, p.numel(), step, device=p.device)
        places = places[_picked(p.grad, places) != 0]
        if places.numel():
            taken.append((p, places, _picked(p, places).clone()))
    return taken


def _picked(tensor: Tensor, places: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[places]
