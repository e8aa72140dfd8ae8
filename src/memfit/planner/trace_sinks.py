"""What the low-bit optimizer's sinks hold, told to a trace."""

from __future__ import annotations

from typing import Any

import torch

from memfit.memory.components import Component
from memfit.memory.fake import FakeTracker
from memfit.optim import GradientRelease, GradientSink, HostGradients
from memfit.optim.host_traced import TracedHostGradients
from memfit.optim.release import FLUSH_BYTES
from memfit.strategies import Setup


def use_traced_sinks(setup: Setup) -> None:
    """Sinks that work on streams of their own are replaced by what they allocate."""
    if setup.card is not None and setup.make_sink is HostGradients:
        setup.make_sink = TracedHostGradients


def watch_gradients(sink: GradientSink, tracker: FakeTracker) -> None:
    """What a sink is handed are gradients; what it makes at the end of a step, the optimizer's."""
    watched: Any = sink
    take, finish = sink.take, sink.finish

    def finishing() -> torch.Tensor:
        with tracker.accounting(Component.OPTIMIZER):
            return finish()

    def noted(p: torch.Tensor, grad: torch.Tensor) -> None:
        tracker.tag(iter((grad,)), Component.GRADIENTS)
        take(p, grad)

    watched.take, watched.finish = noted, finishing
    if isinstance(sink, GradientRelease):
        _gather_alike(sink, tracker)


def kept_gradients(sink: GradientSink) -> list[torch.Tensor]:
    """The buffers of a sink that adds gradients up in fewer bits."""
    kept = getattr(sink, "_kept", {})
    return [tensor for coded in kept.values() for tensor in (coded.codes, coded.scales)]


def _gather_alike(sink: GradientRelease, tracker: FakeTracker) -> None:
    """Every layer holds as many gathered gradients as any may, until the end of backward.

    They are let go whenever enough are gathered, which falls elsewhere in each layer; a trace of
    a few layers must not depend on where. What is gathered at most is counted all the time.
    """
    watched: Any = sink
    watched._flush_bytes = 1
    take, end = sink.take, sink.end_backward
    gathered: list[torch.Tensor] = []

    def gathering(p: torch.Tensor, grad: torch.Tensor) -> None:
        if not gathered:
            total = sum(one.nbytes for one in sink.optimizer.large)
            gathered.append(torch.empty(min(FLUSH_BYTES, total), dtype=torch.uint8))
            tracker.tag(iter(gathered), Component.GRADIENTS)
        take(p, grad)

    def ending() -> None:
        gathered.clear()
        end()

    watched.take, watched.end_backward = gathering, ending
