"""The step's numbers on the device: its clock, the loss scale and the global gradient norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.strategies.lowbit.lowbit_kernels import Hyper
from memfit.strategies.lowbit.number_formats import hash_int32

if TYPE_CHECKING:
    from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer

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
        self._counts = True
        self.hyper = torch.zeros(0, Hyper.COLUMNS, device=device)
        self.key = torch.zeros((), dtype=torch.int32, device=device)

    def add_row(self, born: int = 0) -> int:
        """A row for parameters that take their first step after step `born`."""
        self._born = torch.cat([self._born, self._born.new_tensor([born])])
        self._given = torch.cat([self._given, self._given.new_zeros(1, 5)])
        self.hyper = torch.cat([self.hyper, self.hyper.new_zeros(1, Hyper.COLUMNS)])
        return self._born.numel() - 1

    def write(self, rows: Sequence[Mapping[str, Any]], *, first: bool = True) -> None:
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
        if first != self._counts:
            self._counts = first
            self._increments[0].fill_(int(first))

    def advance(self) -> None:
        """Before a micro-batch: count the step with the first, draw fresh noise with each."""
        self.counters.add_(self._increments)
        self.derive()

    def derive(self) -> None:
        """Coefficients and noise key from the counters and what the host wrote.

        torch's own AdamW takes 1 - beta in double precision, so it is done here too.
        """
        age = self.counters[0] - self._born
        lr, beta1, beta2, eps, decay = self._given.unbind(1)
        step_size = lr / (1 - beta1**age)
        root_factor = (1 - beta2**age).rsqrt()
        columns = (beta1, 1 - beta1, beta2, 1 - beta2, step_size, root_factor, eps, 1 - lr * decay)
        self.hyper.copy_(torch.stack(columns, dim=1))
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


_SMALLEST_SCALE = 1.0


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
        growth_interval: int = 1000,
        largest: float = 2.0**15,
    ) -> None:
        self.value = torch.tensor(float(initial), device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.is_at_its_end = torch.zeros((), dtype=torch.bool, device=device)
        """Whether this step's gradients overflow at the smallest scale: no other will help."""
        self._interval, self._largest = growth_interval, largest

    def apply(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss.float() * self.value

    @torch.no_grad()
    def judge(self, finite: Tensor) -> None:
        """Note before the update whether an overflow is more than a scale that is too large."""
        self.is_at_its_end.copy_(~finite & (self.value <= _SMALLEST_SCALE))

    def judged(self, norm: Tensor | None) -> Tensor:
        """A norm that is only not finite where no smaller scale would make it so."""
        return torch.where(self.is_at_its_end, torch.inf if norm is None else norm, 0.0)

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """After a step: grow, keep or back off."""
        self.skipped_steps += ~finite
        good = torch.where(finite, self.good_steps + 1, 0)
        grow = good >= self._interval
        factor = torch.where(grow, 2.0, 1.0)
        factor = torch.where(finite, factor, 0.5)
        self.value.mul_(factor).clamp_(_SMALLEST_SCALE, self._largest)
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
        return {name: value.cpu() for name, value in self.copied().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copied in place: a captured graph keeps its addresses."""
        for name in ("value", "good_steps", "skipped_steps"):
            getattr(self, name).copy_(state[name])


class GlobalNorm:
    """Each parameter's 2-norm goes into its slot; the norm of the slots is the global one.

    Measured in fp32: torch's own clipping of bf16 gradients rounds each norm to bf16.
    """

    def __init__(self, optimizer: LowBitOptimizer) -> None:
        self._optimizer = optimizer
        self._slots = torch.zeros(0)
        self._slot_of: dict[object, int] = {}
        self._total: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """The last sum; a device scalar whose address does not change."""
        if self._total is None:
            self._total = torch.full((), torch.nan, device=self._optimizer.clock.device)
        return self._total

    def begin(self) -> None:
        """An empty slot for every large parameter and every buffer of small ones."""
        keys: list[object] = [*self._optimizer.small, *self._optimizer.large]
        if self._slot_of.keys() != set(keys):
            self._slot_of = {key: index for index, key in enumerate(keys)}
            self._slots = torch.zeros(len(keys), device=self._optimizer.clock.device)
            return
        self._slots.zero_()

    def slot(self, key: object) -> Tensor:
        """Where the norm of a parameter (or of a buffer of small ones) goes."""
        if key not in self._slot_of:  # unfrozen within this step
            self._slot_of[key] = self._slots.numel()
            self._slots = torch.cat([self._slots, self._slots.new_zeros(1)])
        return self._slots[self._slot_of[key]]

    def measure(self, p: Tensor, grad: Tensor) -> None:
        """A large parameter's norm into its slot."""
        torch.linalg.vector_norm(grad, dtype=torch.float32, out=self.slot(p))

    def measure_many(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Measures several parameters in a few launches."""
        if params:
            norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
            torch._foreach_copy_([self.slot(p) for p in params], norms)

    def measure_small(self) -> None:
        """The gathered small parameters' norms into theirs."""
        for arena in self._optimizer.small:
            arena.measure(self.slot(arena))

    def sum(self, loss_scale: LossScale | None) -> None:
        """The global norm of the true gradient: the loss scale is divided out."""
        torch.linalg.vector_norm(self._slots, out=self.total)
        if loss_scale is not None:
            self.total.div_(loss_scale.value)
