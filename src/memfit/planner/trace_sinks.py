"""What the low-bit optimizer's sinks hold, told to a trace."""

from __future__ import annotations

from typing import Any

import torch

from memfit.memory.components import Component
from memfit.memory.fake import FakeTracker
from memfit.optim import GradientRelease, GradientSink, HostGradients
from memfit.optim.host_traced import TracedHostGradients
from memfit.optim.release import FLUSH_BYTES
from memfit.runtime.boundaries import LayerBoundaries
from memfit.strategies import Setup
from memfit.strategies._layers import stack_problem


def use_traced_sinks(setup: Setup) -> None:
    """Sinks that work on streams of their own are replaced by what they allocate."""
    if setup.card is not None and setup.make_sink is HostGradients:
        setup.make_sink = TracedHostGradients


def prepare_sink(sink: GradientSink, tracker: FakeTracker) -> None:
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


def layer_boundaries(
    setup: Setup, sink: GradientSink, tracker: FakeTracker, large_bytes: int
) -> LayerBoundaries | None:
    """What lets a released backward go on where it failed; BudgetTrainer has it in every run.

    `large_bytes` are those of all the gradients the sink will be handed at full depth.
    """
    if not isinstance(sink, GradientRelease):
        return None
    if not stack_problem(setup.model, None):
        return LayerBoundaries(setup.model, sink, setup.device, lambda _: None)
    if large_bytes > FLUSH_BYTES:
        _gather_alike(sink, tracker)
    return None


def begin(sink: GradientSink, tracker: FakeTracker, parts: int) -> None:
    """All that lives as long as the run is made now; the step says it once more."""
    sink.begin(parts)
    if isinstance(sink, HostGradients):
        for p in sink.optimizer.large:
            sink._buffer(p)
    tracker.tag(iter(kept_gradients(sink)), Component.GRADIENTS)


def kept_gradients(sink: GradientSink) -> list[torch.Tensor]:
    """The buffers of a sink that adds gradients up."""
    kept = getattr(sink, "_kept", {})
    on_host = getattr(sink, "_host", {})
    return [t for coded in kept.values() for t in (coded.codes, coded.scales)] + [*on_host.values()]


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
            gathered.append(torch.empty(FLUSH_BYTES, dtype=torch.uint8))
            tracker.tag(iter(gathered), Component.GRADIENTS)
        take(p, grad)

    def ending() -> None:
        gathered.clear()
        end()

    watched.take, watched.end_backward = gathering, ending
