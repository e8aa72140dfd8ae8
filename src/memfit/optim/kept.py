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

    @torch.no_grad()
    def measure(self) -> Tensor:
        """As in the base; all gradients are in `.grad` then, where callbacks look for them."""
        is_first = not self._measured
        norm = self._measure()
        if is_first and self._measured and not self.capturing:
            for arena in self.optimizer.small:
                arena.show()
        return norm

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

    def _decide(self) -> None:
        self._norm.measure_many(*self._large_gradients())
        super()._decide()

    def _settle(self) -> None:
        params, grads = self._large_gradients()
        self.optimizer.update_many(list(zip(params, grads, strict=True)))
        for p in params:
            p.grad = None
        for arena in self.optimizer.small:
            arena.take_back()

    def _large_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        params = [p for p in self.optimizer.large if p.grad is not None]
        return params, [flat(p.grad, "gradient") for p in params if p.grad is not None]


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
        self._captured: dict[Tensor, None] = {}
        """Parameters that captured micro-batches have a gradient for."""
        self._is_replayed = False
        self._keep: tuple[Tensor, Tensor] | None = None
        self._memory: HostMemory | None = None

    def begin(self, micro_batches: int = 1, *, replayed: bool = False) -> None:
        """Make the buffers once; they live as long as the sink, so graphs may use them."""
        super().begin(micro_batches, replayed=replayed)
        self._due = dict(self._captured) if replayed else {}
        self._is_replayed = replayed
        self.allocate()
        if replayed and self._kept:
            # A graph cannot know which gradient is its parameter's first in a step.
            torch._foreach_zero_([kept.scales for kept in self._kept.values()])

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
        """As in the base; the two numbers that a kept sum may be multiplied by are made once."""
        super().prepare(index)
        if self._keep is None:
            nothing = torch.zeros((), device=self.optimizer.clock.device)
            self._keep = (nothing, torch.ones_like(nothing))

    def take(self, p: Tensor, grad: Tensor) -> None:
        """Add to the kept sum; a step's first gradient overwrites what the last step left.

        That need not be in its first micro-batch: layers may be left out of some.
        """
        assert self._keep is not None
        nothing, all_of_it = self._keep
        keep = all_of_it if self._is_replayed or p in self._due else nothing
        self._due[p] = None
        if self.capturing and self._is_replayed:
            self._captured[p] = None
        optimizer = self.optimizer
        how = Addition(
            keep=keep,
            key=optimizer.clock.key,
            stream=_KEPT_STREAMS + optimizer.stream_of(p),
            block=optimizer.block,
            norm=self._norm.slot(p),
        )
        pick_kernels(optimizer.backend, p).accumulate(self._buffer(p), grad, how)

    def _settle(self) -> None:
        self.optimizer.update_many([(p, self._kept[p]) for p in self._due])
        self._due.clear()

    def _buffer(self, p: Tensor) -> CodedGradient:
        if p not in self._kept:
            optimizer = self.optimizer
            if optimizer.gradients_on_host and self._memory is None:
                self._memory = HostMemory(p.device)  # its own: a checkpoint holds no gradients
            self._kept[p] = new_coded(p.numel(), optimizer.block, p.device, self._memory)
        return self._kept[p]
