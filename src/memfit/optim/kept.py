"""Sinks that keep every gradient until the global norm is known: as they are, or in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memfit.optim.backends import pick_kernels
from memfit.optim.layout import Addition, CodedGradient, flat, new_coded
from memfit.optim.pinned import HostMemory
from memfit.optim.sinks import GradientSink

_KEPT_STREAMS = 1 << 20
"""Noise of kept gradients is numbered after that of any model's parameters."""


class KeptGradients(GradientSink):
    """Gradients stay in `.grad` until the step, as in any training loop: 2 bytes a parameter.

    Micro-batches add up in the gradient's own dtype. The step frees them.
    """

    name = "kept"
    hooked = False

    @property
    def measures(self) -> bool:
        """Only where somebody needs it: the Trainer may clip by itself."""
        return self.max_grad_norm > 0 or self.loss_scale is not None

    def take(self, p: Tensor, grad: Tensor) -> None:
        """Never called, since nothing watches backward."""
        raise AssertionError(f"a kept gradient of {grad.numel()} of {p.numel()} elements was taken")

    def begin(self, micro_batches: int = 1, *, replayed: bool = False) -> None:
        """As in the base; parameters unfrozen since the last step get their state first."""
        if replayed and micro_batches > 1:
            raise ValueError(
                "a replayed backward overwrites the gradients of the micro-batch before; "
                "use the sink kept8"
            )
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.optimizer.ensure_state(p)
        super().begin(micro_batches, replayed=replayed)

    def _settle(self) -> None:
        params = [p for p in self.optimizer.large if p.grad is not None]
        grads = [flat(p.grad, "gradient") for p in params if p.grad is not None]
        if self.measures:
            self._norm.measure_many(params, grads)
        self._decide()
        self.optimizer.update_many(list(zip(params, grads, strict=True)))
        for p in params:
            p.grad = None


class KeptInt8(GradientSink):
    """Gradients added up in 8 bits until the norm is known: one byte a parameter.

    Each is rounded stochastically, so the kept sum is unbiased; the norm is taken of the
    sum before it is rounded.
    """

    name = "kept8"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[Tensor, CodedGradient] = {}
        self._due: dict[Tensor, None] = {}
        self._keep: Tensor | None = None
        self._memory: HostMemory | None = None

    def begin(self, micro_batches: int = 1, *, replayed: bool = False) -> None:
        """Make the buffers once; they live as long as the sink, so graphs may use them."""
        super().begin(micro_batches, replayed=replayed)
        self._due = dict.fromkeys(self.optimizer.large) if replayed else {}
        self.allocate()

    def allocate(self) -> None:
        """The buffers."""
        for p in self.optimizer.large:
            self._buffer(p)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """With the buffers that the steps will have."""
        with super().rehearsal():
            self.allocate()
            yield

    def prepare(self, index: int) -> None:
        """The first micro-batch overwrites what the last step left."""
        super().prepare(index)
        if self._keep is None:
            self._keep = torch.zeros((), device=self.optimizer.clock.device)
        if not self.capturing:
            self._keep.fill_(float(index > 0))

    def take(self, p: Tensor, grad: Tensor) -> None:
        """Add to the kept sum."""
        assert self._keep is not None
        self._due[p] = None
        optimizer = self.optimizer
        how = Addition(
            keep=self._keep,
            key=optimizer.clock.key,
            stream=_KEPT_STREAMS + optimizer.stream_of(p),
            block=optimizer.block,
            norm=self._norm.slot(p),
        )
        pick_kernels(optimizer.backend, p).accumulate(self._buffer(p), grad, how)

    def _settle(self) -> None:
        self._decide()
        self.optimizer.update_many([(p, self._kept[p]) for p in self._due])
        self._due.clear()

    def _buffer(self, p: Tensor) -> CodedGradient:
        if p not in self._kept:
            optimizer = self.optimizer
            if optimizer.gradients_on_host and self._memory is None:
                self._memory = HostMemory(p.device)  # its own: a checkpoint holds no gradients
            self._kept[p] = new_coded(p.numel(), optimizer.block, p.device, self._memory)
        return self._kept[p]
