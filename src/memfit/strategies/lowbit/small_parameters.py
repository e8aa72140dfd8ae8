"""Biases, norms and a fresh head: fp32 AdamW over one flat buffer, a handful of launches for all.

They are two thirds of a BERT's tensors and a thousandth of its bytes: full precision is
free here, and 8-bit state would only add noise and launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from memfit.strategies.lowbit.lowbit_kernels import Hyper, StepScalars, flat


class SmallParameters:
    """Small parameters of one row and dtype: `remainder` is what the weight's dtype cannot hold.

    The master is weight + remainder, so a weight changed from outside (a loaded
    checkpoint, an averaged model) is respected.
    """

    def __init__(self, params: Sequence[Tensor], row: int) -> None:
        self.params = list(params)
        self.row = row
        self._starts = [0, *accumulate(p.numel() for p in params)]
        total = self._starts[-1]
        device = self.params[0].device
        self.remainder, self.moment1, self.moment2, self.grad, self._work = (
            torch.zeros(total, device=device) for _ in range(5)
        )
        self._work_views = self.views(self._work)
        self._seen: set[int] = set()
        self._shown: list[tuple[int, Tensor, int]] = []
        self._masks: dict[frozenset[int], Tensor] = {}

    def views(self, buffer: Tensor) -> list[Tensor]:
        """One view a parameter, in its shape."""
        parts = torch.split(buffer, [p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    def gather(self) -> None:
        """Add the gradients that are there to the flat fp32 one, and free them."""
        present = [i for i, p in enumerate(self.params) if p.grad is not None]
        if not present:
            return
        if len(present) < len(self.params):
            self._work.zero_()
        grads = [g for p in self.params if (g := p.grad) is not None]
        torch._foreach_copy_([self._work_views[i] for i in present], grads)
        self.grad.add_(self._work)
        for i in present:
            self.params[i].grad = None
        self._seen.update(present)

    def show(self) -> None:
        """Put what was gathered into `.grad` again, for whoever looks before the update."""
        dtype = self.params[0].dtype
        # Not the buffer itself, even in fp32: changes come back through `take_back`.
        views = self.views(self.grad.to(dtype, copy=True))
        for i in self._seen:
            self.params[i].grad = views[i]
            self._shown.append((i, views[i], views[i]._version))

    def take_back(self) -> None:
        """Take a changed `.grad` as the gradient, and free all."""
        gathered = self.views(self.grad)
        for i, shown, version in self._shown:
            now, self.params[i].grad = self.params[i].grad, None
            if now is not None and (now is not shown or now._version != version):
                gathered[i].copy_(now)
        self._shown.clear()

    def expect_all(self) -> None:
        """Graphs will gather: every parameter counts as seen."""
        self._seen.update(range(len(self.params)))

    def measure(self, norm: Tensor) -> None:
        """The 2-norm of what was gathered, into `norm`."""
        torch.linalg.vector_norm(self.grad, out=norm)

    def clear(self) -> None:
        """Forget what was gathered."""
        self.grad.zero_()
        self._shown.clear()
        self._seen.clear()

    def update(self, scalars: StepScalars) -> None:
        """One AdamW step on what was gathered; parameters without a gradient stay."""
        if not self._seen:
            return
        gate = scalars.gate & self._mask() if len(self._seen) < len(self.params) else scalars.gate
        hyper = scalars.hyper[self.row].unbind()
        grad = self.grad.mul_(scalars.grad_scale)
        m = self.moment1 * hyper[Hyper.KEEP1] + grad * hyper[Hyper.GAIN1]
        v = self.moment2 * hyper[Hyper.KEEP2] + grad.square() * hyper[Hyper.GAIN2]
        scaled = v.sqrt().mul_(hyper[Hyper.ROOT_FACTOR]).add_(hyper[Hyper.EPS])
        torch._foreach_copy_(self._work_views, [p.detach() for p in self.params])
        master = self._work.add_(self.remainder)
        new = (master * hyper[Hyper.SHRINK]).sub_((m * hyper[Hyper.STEP_SIZE]).div_(scaled))
        torch.where(gate, new, master, out=self._work)
        torch.where(gate, m, self.moment1, out=self.moment1)
        torch.where(gate, v, self.moment2, out=self.moment2)
        rounded = self._work.to(self.params[0].dtype).float()
        torch.sub(self._work, rounded, out=self.remainder)
        torch._foreach_copy_([p.detach() for p in self.params], self._work_views)
        self.clear()

    def _mask(self) -> Tensor:
        """True at the parameters that got a gradient."""
        key = frozenset(self._seen)
        if key not in self._masks:
            mask = torch.zeros_like(self._work, dtype=torch.bool)
            for i in key:
                self.views(mask)[i].fill_(True)
            self._masks[key] = mask
        return self._masks[key]

    def state_of(self, index: int) -> dict[str, Tensor]:
        """The entries of `optimizer.state` for one parameter: views of the flat buffers."""
        p, start = self.params[index], self._starts[index]
        parts = {"remainder": self.remainder, "moment1": self.moment1, "moment2": self.moment2}
        return {
            name: buffer[start : start + p.numel()].view(p.shape) for name, buffer in parts.items()
        }


def fp32_of(param: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a small parameter."""
    return flat(param).float().add_(remainder.reshape(-1)).view(param.shape)
