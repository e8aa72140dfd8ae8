"""Gradients in host memory as a memory trace sees them: what they take of the device meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memfit import traced
from memfit.optim.host import IN_FLIGHT_BYTES, STAGE_NUMEL, HostGradients


class TracedHostGradients(HostGradients):
    """The CUDA way of `HostGradients` on fake tensors.

    Which gradients are on their way at a moment depends on the bus; as many as may be are.
    """

    _in_transit: Tensor | None = None

    def take(self, p: Tensor, grad: Tensor) -> None:
        """Send it, added to what the micro-batches before have sent."""
        if self._in_transit is None:
            self._in_transit = torch.empty(IN_FLIGHT_BYTES, dtype=torch.uint8)
        host = self._buffer(p)
        if p in self._filled:
            fetched = torch.empty_like(grad)
            grad = fetched.copy_(host).add_(grad)
        self._norm.measure(p, grad)
        host.copy_(grad)
        self._filled[p] = None

    def _settle(self) -> None:
        self._in_transit = None
        super()._settle()

    def _fetched(self) -> Iterator[tuple[Tensor, int, Tensor]]:
        """Two buffers on the device, in turn."""
        size = min(STAGE_NUMEL, max((p.numel() for p in self._filled), default=0))
        stages: dict[tuple[int, torch.dtype], Tensor] = {}
        number = 0
        for p in self._filled:
            for start in range(0, p.numel(), STAGE_NUMEL):
                part = self._host[p][start : start + STAGE_NUMEL]
                key = (number % 2, part.dtype)
                if key not in stages:
                    stages[key] = torch.empty(size, dtype=part.dtype)
                yield p, start, stages[key][: part.numel()].copy_(part)
                number += 1

    def _buffer(self, p: Tensor) -> Tensor:
        if p not in self._host:
            self._host[p] = traced.hosted(torch.empty(p.numel(), dtype=self._dtype or p.dtype))
        return self._host[p]
