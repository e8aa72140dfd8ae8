"""Dynamic loss scaling for fp16 that never asks the host: scale and overflow on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class LossScale:
    """Multiplies the loss, so that small fp16 gradients do not vanish; the sink divides it out.

    A step whose gradients overflow is skipped and the scale halved; after
    `growth_interval` good steps in a row it is doubled. All of it happens on the
    device: no wait for the host, and it may be part of a captured graph. Beyond 2^15 the
    scale itself, the gradient of an fp16 loss, would overflow.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        initial: float = 2.0**14,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 1000,
        smallest: float = 1.0,
        largest: float = 2.0**15,
    ) -> None:
        self.value = torch.tensor(float(initial), device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.is_at_its_end = torch.zeros((), dtype=torch.bool, device=device)
        """Whether this step's gradients overflow at the smallest scale: no other will help."""
        self._growth, self._backoff = growth, backoff
        self._interval, self._range = growth_interval, (smallest, largest)

    def apply(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss.float() * self.value

    @torch.no_grad()
    def judge(self, finite: Tensor) -> None:
        """Note before the update whether an overflow is more than a scale that is too large."""
        self.is_at_its_end.copy_(~finite & (self.value <= self._range[0]))

    def judged(self, norm: Tensor | None) -> Tensor:
        """A norm that is only not finite where no smaller scale would make it so."""
        return torch.where(self.is_at_its_end, torch.inf if norm is None else norm, 0.0)

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """After a step: grow, keep or back off."""
        self.skipped_steps += ~finite
        good = torch.where(finite, self.good_steps + 1, 0)
        grow = good >= self._interval
        factor = torch.where(grow, self._growth, 1.0)
        factor = torch.where(finite, factor, self._backoff)
        self.value.mul_(factor).clamp_(*self._range)
        self.good_steps.copy_(torch.where(grow, 0, good))

    def copied(self) -> dict[str, Tensor]:
        """A copy of the state that stays on the device, for `load_state_dict`."""
        return {
            "value": self.value.clone(),
            "good_steps": self.good_steps.clone(),
            "skipped_steps": self.skipped_steps.clone(),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """On the host, for a checkpoint."""
        return {
            "value": self.value.cpu(),
            "good_steps": self.good_steps.cpu(),
            "skipped_steps": self.skipped_steps.cpu(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copied in place: a captured graph keeps its addresses."""
        self.value.copy_(state["value"])
        self.good_steps.copy_(state["good_steps"])
        self.skipped_steps.copy_(state["skipped_steps"])
