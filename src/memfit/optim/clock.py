"""The step's numbers on the device: the host writes before a step, the device derives in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memfit.optim.formats import hash_int32
from memfit.optim.layout import Hyper

_LR, _BETA1, _BETA2, _EPS, _DECAY = range(5)


class StepClock:
    """Step count, noise counter and hyper-parameters of every group.

    `write` is the host's part and stays outside a captured graph; `advance` is the
    device's and belongs inside: it counts, and derives each group's row of
    coefficients and the step's noise key from what it finds on the device.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.seed = seed
        self.counters = torch.zeros(2, dtype=torch.int64, device=device)  # steps, draws
        self._increments = torch.ones(2, dtype=torch.int64, device=device)
        self._born = torch.zeros(0, dtype=torch.int64, device=device)
        self._given = torch.zeros(0, 5, dtype=torch.float64, device=device)
        self._written: dict[tuple[int, int], float] = {}
        self._ends = (True, True)
        self._part_of_step = torch.ones(Hyper.COLUMNS, dtype=torch.bool, device=device)
        self._idle = torch.zeros(Hyper.COLUMNS, device=device)
        self._idle[[Hyper.KEEP1, Hyper.KEEP2, Hyper.SHRINK]] = 1.0
        self.whole = torch.zeros(0, Hyper.COLUMNS, device=device)
        self.part = torch.zeros(0, Hyper.COLUMNS, device=device)
        self.key = torch.zeros((), dtype=torch.int32, device=device)

    def add_row(self, born: int = 0) -> int:
        """A row for parameters that take their first step after step `born`."""
        self._born = torch.cat([self._born, self._born.new_tensor([born])])
        self._given = torch.cat([self._given, self._given.new_zeros(1, 5)])
        self.whole = torch.cat([self.whole, self.whole.new_zeros(1, Hyper.COLUMNS)])
        self.part = self.whole.clone()
        return self._born.numel() - 1

    def write(
        self, rows: Sequence[Mapping[str, Any]], *, first: bool = True, last: bool = True
    ) -> None:
        """Bring each row's learning rate, betas, eps and decay to the device where they changed.

        A fill carries its value in the launch: no host memory that the next step could
        overwrite too early, and no wait.
        """
        for row, group in enumerate(rows):
            values = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
            for column, value in enumerate(map(float, values)):
                if self._written.get((row, column)) != value:
                    self._given[row, column].fill_(value)
                    self._written[row, column] = value
        if (first, last) != self._ends:
            self._ends = (first, last)
            self._increments[0].fill_(int(first))
            for column in (Hyper.KEEP1, Hyper.KEEP2):
                self._part_of_step[column].fill_(first)
            for column in (Hyper.STEP_SIZE, Hyper.SHRINK):
                self._part_of_step[column].fill_(last)

    def advance(self) -> None:
        """Before a micro-batch: count the step with the first, draw fresh noise with each."""
        self.counters.add_(self._increments)
        self.derive()

    def derive(self) -> None:
        """Coefficients and noise key from the counters and what the host wrote.

        `whole` is an undivided step. `part` is one micro-batch of a step that adds up in
        the moments: they decay with the first and the weights move with the last.
        torch's own AdamW takes 1 - beta in double precision, so it is done here too.
        """
        age = self.counters[0] - self._born
        lr, beta1, beta2, eps, decay = self._given.unbind(1)
        step_size = lr / (1 - beta1**age)
        root_factor = (1 - beta2**age).rsqrt()
        columns = (beta1, 1 - beta1, beta2, 1 - beta2, step_size, root_factor, eps, 1 - lr * decay)
        self.whole.copy_(torch.stack(columns, dim=1))
        torch.where(self._part_of_step, self.whole, self._idle, out=self.part)
        seeded = self.counters[1].to(torch.int32) + _mixed(self.seed)
        self.key.copy_(hash_int32(hash_int32(seeded)))

    def rewind(self, skipped: Tensor) -> None:
        """Take the step back where it was skipped; the noise counter goes on."""
        self.counters[0].sub_(skipped.to(torch.int64))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same numbers."""
        return {"counters": self.counters.cpu(), "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copied in place: a captured graph keeps its addresses."""
        self.counters.copy_(state["counters"])
        self.seed = int(state["seed"])


def _mixed(seed: int) -> int:
    """Far-apart 31-bit starting points for neighbouring seeds."""
    return (seed * 0x632BE59B + 0x1B873593) % 2**31
