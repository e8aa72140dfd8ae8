"""The one way in: every byte of a training step, from a configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.memory.cards import DeviceProfile
from memfit.memory.components import Component, MemoryPeak
from memfit.memory.events import Event
from memfit.memory.phases import (
    EVALUATION,
    RESUMING,
    SAVING,
    TRAINING,
    live_bytes,
    phase_orders,
    phase_peak,
    play_run,
    training_peak,
    with_loaded_state,
    with_workspaces,
)
from memfit.memory.predict import predict_segments
from memfit.memory.spec import StepSpec


@dataclass(frozen=True)
class MemoryEstimate:
    """What a run of the stock Trainer will need."""

    parameters: int
    trainable_parameters: int
    peak: MemoryPeak
    """The training step's highest moment."""
    phases: Mapping[str, MemoryPeak]
    """By name: training, evaluation, saving, resuming."""
    steady_bytes: int
    """What stays allocated between two steps."""
    events: list[Event]
    """Births and deaths of the run up to the end of its second step."""
    starts: tuple[tuple[int, str], ...]
    """At which event each part of the run begins."""
    traced_layers: tuple[int, ...]


def estimate_memory(
    spec: StepSpec, device: DeviceProfile | None, *, expandable_segments: bool = False
) -> MemoryEstimate:
    """Trace the step and let the device's allocator run it; None is the CPU."""
    prediction = predict_segments(spec, device)
    segments = with_loaded_state(prediction.segments)
    if device is not None:
        segments = with_workspaces(
            segments,
            device.capability,
            recompute=spec.gradient_checkpointing,
            biases=prediction.biases,
        )
    orders = phase_orders(spec, cuda=device is not None)
    run = play_run(segments, orders[TRAINING])
    peak = training_peak(run, device, expandable_segments=expandable_segments)
    phases = {TRAINING: peak}
    for name in (EVALUATION, SAVING):
        other = play_run(segments, orders[name])
        start = other.starts[-1][0] if name == EVALUATION else len(other.events)
        phases[name] = phase_peak(other, start, device, peak.reserved_bytes)
    resumed = play_run(segments, orders[RESUMING])
    phases[RESUMING] = training_peak(resumed, device, expandable_segments=expandable_segments)
    steady = live_bytes(run.events, len(run.events) - 1, rounding=device is not None)
    return MemoryEstimate(
        parameters=prediction.parameters,
        trainable_parameters=prediction.trainable_parameters,
        peak=peak,
        phases=phases,
        steady_bytes=sum(steady.values()),
        events=run.events,
        starts=run.starts,
        traced_layers=prediction.traced_layers,
    )


def predicted_step_bytes(estimate: MemoryEstimate) -> int:
    """What a step adds to what stays: gradients and activations at its highest moment."""
    peak = estimate.peak.components
    return peak[Component.GRADIENTS] + peak[Component.ACTIVATIONS]
