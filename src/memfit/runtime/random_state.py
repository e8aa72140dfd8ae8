"""The random numbers of a step, so that it can be run again with the same dropout."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """Where every generator stood at one moment."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """As they stand; costs some microseconds and no wait for the device."""
        on_cuda = device.type == "cuda"
        return cls(
            random.getstate(),
            np.random.get_state(),
            torch.random.get_rng_state(),
            torch.cuda.get_rng_state(device) if on_cuda else None,
        )

    def restore(self, device: torch.device) -> None:
        """Put all of them back there."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.random.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)
