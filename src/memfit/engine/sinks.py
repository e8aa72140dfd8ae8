"""What the engine asks of a gradient sink; strategies/lowbit has the sinks themselves."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor


class GradientSink(Protocol):
    """Takes each parameter's gradient as backward produces it, and ends the step."""

    @property
    def phases(self) -> tuple[str, ...]:
        """The backward passes of a step, by name."""

    @property
    def hooked(self) -> bool:
        """Whether gradients reach it by hooks on the parameters."""

    @property
    def capturable(self) -> bool:
        """Whether its work can be captured in a CUDA graph."""

    @property
    def updates_in_backward(self) -> bool:
        """Whether weights or moments change before backward has ended."""

    @property
    def launches_first(self) -> bool:
        """Whether the training's first step must not be replayed from a graph."""

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""

    @property
    def optimizer(self) -> Any:
        """The optimizer it feeds."""

    @property
    def loss_scale(self) -> Any:
        """The fp16 loss scale; None without one."""

    @property
    def touched(self) -> bool:
        """Whether this step has changed anything that cannot be taken back."""

    def begin(self, micro_batches: int = 1, *, replayed: bool = False) -> None:
        """Starts a step of this many micro-batches."""

    def prepare(self, index: int) -> None:
        """Does the host's part before a micro-batch."""

    def arm(self, index: int, phase: str = "apply") -> None:
        """Expects the gradients of a micro-batch."""

    def end_backward(self) -> None:
        """Ends one backward pass."""

    def finish(self) -> Tensor:
        """Makes the updates; returns the global gradient norm."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """Drops the gradients of backward passes inside."""

    def without_effect(self) -> AbstractContextManager[None]:
        """Leaves everything as it was after whole steps inside."""


class LayerwiseSink(GradientSink, Protocol):
    """A sink that updates layer by layer, so that a failed backward pass can be resumed."""

    by_layers: bool

    def pass_boundary(self) -> None:
        """Makes the updates of the layers that backward is through with."""

    def has_settled(self, p: Tensor) -> bool:
        """Whether backward will not be asked for this parameter's gradient again."""

    def drop_unsettled(self) -> None:
        """Forgets the gradients received since the last boundary."""
