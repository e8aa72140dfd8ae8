"""The one way in: every byte of a training step, from a configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.memory.cards import DeviceProfile
from memfit.memory.components import MemoryPeak
from memfit.memory.events import Event
from memfit.memory.phases import (
    EVALUATION,
    RESUMING,
    SAVING,
    TRAINING,
    peaks,
    play_run,
    run_orders,
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
    first, second = run_orders(spec, cuda=device is not None)
    run, resumed = play_run(segments, first), play_run(segments, second)
    end, count = run.starts[-1][0], len(run.events)
    training, saving, evaluation = peaks(
        run, [(0, end), (end, end), (end, count)], device, expandable_segments=expandable_segments
    )
    (resuming,) = peaks(
        resumed, [(0, len(resumed.events))], device, expandable_segments=expandable_segments
    )
    phases = {
        TRAINING: training,
        EVALUATION: evaluation,
        SAVING: saving,
        RESUMING: resuming,
    }
    return MemoryEstimate(
        parameters=prediction.parameters,
        trainable_parameters=prediction.trainable_parameters,
        peak=training,
        phases=phases,
        steady_bytes=saving.allocated_bytes,
        events=run.events[:end],
        starts=run.starts[:-1],
        traced_layers=prediction.traced_layers,
    )
