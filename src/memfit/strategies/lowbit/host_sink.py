"""Gradients in pinned host memory: nothing kept on the card, one backward, the exact norm."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from memfit.memory.tracing import traced_device
from memfit.strategies.lowbit.gradient_sinks import LowBitSink

STAGE_NUMEL = 2**22
"""Elements of each of the two device buffers through which gradients come back."""

IN_FLIGHT_BYTES = 32 * 2**20
"""Gradients on their way to the host before backward waits for the bus."""


class HostGradients(LowBitSink):
    """Each gradient goes to the host as it is produced and comes back in chunks for the step.

    Copies run beside the computation, on their own stream; at most a few gradients are on the card
    at any time.
    """

    capturable = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._host: dict[Tensor, Tensor] = {}
        self._filled: dict[Tensor, None] = {}
        self._side: torch.cuda.Stream | None = None
        self._in_flight: deque[tuple[int, torch.cuda.Event]] = deque()

    def begin(self, micro_batches: int = 1, *, replayed: bool = False) -> None:
        """Starts a step without gradients."""
        super().begin(micro_batches, replayed=replayed)
        self._filled = {}
        if self._side is None and self.optimizer.clock.device.type == "cuda":
            self._side = torch.cuda.Stream(self.optimizer.clock.device)  # type: ignore[no-untyped-call]

    def take(self, p: Tensor, grad: Tensor) -> None:
        """Send it, added to what the micro-batches before have sent."""
        host = self._buffer(p)
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
            grad.record_stream(self._side)
        with self._beside():
            if p in self._filled:
                grad = host.to(grad.device, non_blocking=True).add_(grad)
            self._norm.measure(p, grad)
            host.copy_(grad, non_blocking=True)
        self._filled[p] = None
        if self._side is not None:
            self._limit_in_flight(grad.numel() * grad.element_size(), self._side)

    def _limit_in_flight(self, size_bytes: int, side: torch.cuda.Stream) -> None:
        """A gradient's memory is free once it has arrived: let backward wait for old ones."""
        self._in_flight.append((size_bytes, side.record_event()))
        while sum(size for size, _ in self._in_flight) > IN_FLIGHT_BYTES:
            _, arrived = self._in_flight.popleft()
            torch.cuda.current_stream().wait_event(arrived)

    def _decide(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
            self._in_flight.clear()
        super()._decide()

    def _settle(self) -> None:
        for p, start, chunk in self._fetched():
            self.optimizer.update(p, chunk, start)

    def _fetched(self) -> Iterator[tuple[Tensor, int, Tensor]]:
        """Chunks on the device, the next one on its way while the last one is used."""
        device = self.optimizer.clock.device
        chunks = [
            (p, start, part)
            for p in self._filled
            for start, part in zip(
                range(0, p.numel(), STAGE_NUMEL),
                torch.split(self._host[p], STAGE_NUMEL),
                strict=True,
            )
        ]
        if self._side is None:
            yield from chunks
            return
        main = torch.cuda.current_stream()
        size = max((part.numel() for _, _, part in chunks), default=0)
        stages: dict[tuple[int, torch.dtype], Tensor] = {}
        used: dict[tuple[int, torch.dtype], torch.cuda.Event] = {}
        for number, (p, start, part) in enumerate(chunks):
            key = (number % 2, part.dtype)
            if key not in stages:
                stages[key] = torch.empty(size, dtype=part.dtype, device=device)
                self._side.wait_stream(main)
            else:
                self._side.wait_event(used[key])
            stage = stages[key][: part.numel()]
            with self._beside():
                stage.copy_(part, non_blocking=True)
            main.wait_stream(self._side)
            yield p, start, stage
            used[key] = main.record_event()

    def _buffer(self, p: Tensor) -> Tensor:
        if p not in self._host:
            self._host[p] = torch.empty(p.numel(), dtype=p.dtype, pin_memory=p.is_cuda)
        return self._host[p]

    def _beside(self) -> torch.cuda.StreamContext | nullcontext[None]:
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)


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
            self._host[p] = traced_device.hosted(torch.empty(p.numel(), dtype=p.dtype))
        return self._host[p]
