"""Predicts every byte of a stock Trainer's step from a configuration alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from memfit.errors import MemfitError, TraceError
from memfit.i18n import t
from memfit.memory.cards import DeviceProfile
from memfit.memory.components import Component, Event, MemoryPeak
from memfit.memory.phases import (
    EVALUATION,
    RESUMING,
    SAVING,
    TRAINING,
    Books,
    peaks,
    play_run,
    run_orders,
    served,
    with_loaded_state,
    with_workspaces,
)
from memfit.memory.stock_step import Stepper, StepSpec
from memfit.memory.tracing.attention_kernels import flash_attention, is_flash
from memfit.memory.tracing.depth import Depths, Segments, cut, deepen, plan_depths, with_layers
from memfit.memory.tracing.fake_tensors import FakeTracker, fake_trace
from memfit.memory.tracing.meta_models import (
    build_on_meta,
    empty_like,
    has_bias,
    materialize,
    model_config,
    small_random,
)
from memfit.memory.tracing.operators import CudaKernels
from memfit.memory.tracing.tracker import Tracker
from memfit.models.layers import layers_of
from memfit.units import format_bytes


@dataclass(frozen=True)
class StepPrediction:
    """The parts of a traced run and what is known of the model."""

    segments: Segments
    parameters: int
    trainable_parameters: int
    biases: bool
    """Whether a linear layer has one: such layers run through another library."""
    traced_layers: tuple[int, ...]
    """The depths that were traced: one, the full depth, or the two it was reached from."""


def predict_segments(spec: StepSpec, device: DeviceProfile | None) -> StepPrediction:
    """Trace the step on a CUDA device, or on a CPU (None)."""
    with flash_attention() if is_flash(spec.attn_implementation) else nullcontext():
        return _predict(spec, device)


def _predict(spec: StepSpec, device: DeviceProfile | None) -> StepPrediction:
    config = model_config(spec)
    model = build_on_meta(spec, config)
    parameters = list(model.parameters())
    counts = (
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        any(map(has_bias, model.modules())),
    )
    layers = layers_of(getattr(model, "base_model", model) if spec.lora else model)
    depths = plan_depths(layers) if _can_cut(config, layers) else None
    if depths is not None:
        segments = _from_shallow(spec, config, model, depths, device)
        if segments is not None:
            return StepPrediction(segments, *counts, (depths.shallow, depths.deeper))
    traced = trace_segments(spec, config, model, device)
    return StepPrediction(traced, *counts, (len(layers),))


def _can_cut(config: Any, layers: list[Any]) -> bool:
    return getattr(config.get_text_config(), "num_hidden_layers", None) == len(layers)


def _from_shallow(
    spec: StepSpec,
    config: Any,
    full: torch.nn.Module,
    depths: Depths,
    device: DeviceProfile | None,
) -> Segments | None:
    traces = []
    for count in (depths.shallow, depths.deeper):
        cut_config = with_layers(config, count)
        model = build_on_meta(_frozen_alike(spec, count), cut_config)
        traces.append(trace_segments(spec, cut_config, model, device))
    segments = deepen(traces[0], traces[1], depths.repeats)
    if segments is None:
        return None
    # Layers that look alike and are not would show here.
    weights = {id(t): t.nbytes for t in (*full.parameters(), *full.buffers())}
    expected = sum(weights.values())
    return segments if segments.born_bytes("build", Component.WEIGHTS) == expected else None


def _frozen_alike(spec: StepSpec, count: int) -> StepSpec:
    """Freezes all layers of a shallow model that has fewer than the user freezes."""
    if spec.freeze is None or not spec.freeze.isdecimal():
        return spec
    return spec.replace(freeze=str(min(count, int(spec.freeze))))


def trace_segments(
    spec: StepSpec, config: Any, model: Any, device: DeviceProfile | None
) -> Segments:
    """Run the step's parts once each on fake tensors."""
    kernels = None
    if device is not None:
        kernels = CudaKernels(device.capability, device.multiprocessors, autocast=spec.autocast)
    with no_collection(), fake_trace(kernels) as tracker, failing_as_a_trace(tracker, model):
        return _trace(spec, config, model, tracker, empty_like, cuda=device is not None)


@contextmanager
def failing_as_a_trace(tracker: FakeTracker, model: Any) -> Iterator[None]:
    """Inside, an error of the model's code becomes a TraceError that names its module."""
    try:
        yield
    except MemfitError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        where = t(" in {module}", module=tracker.module) if tracker.module else ""
        raise TraceError(
            "{name} cannot be traced{where}: {error}",
            name=type(model).__name__,
            where=where,
            error=error,
        ) from error


def run_segments(spec: StepSpec) -> Segments:
    """Runs the parts on real CPU tensors; the trace must equal the result."""
    config = model_config(spec)
    model = build_on_meta(spec, config)
    with no_collection(), Tracker() as tracker:
        return _trace(spec, config, model, tracker, small_random, cuda=False)


def _trace(
    spec: StepSpec,
    config: Any,
    model: Any,
    tracker: Tracker,
    make: Callable[[torch.Tensor], torch.Tensor],
    *,
    cuda: bool,
) -> Segments:
    recorder = Recorder(tracker)
    with recorder.part("build"), tracker.accounting(Component.WEIGHTS):
        materialize(model, make)
    tracker.watch(model)
    try:
        run_parts(Stepper(spec, config, model, tracker, cuda=cuda), recorder)
    finally:
        tracker.unwatch()
    return cut(recorder.events(), oldest_first=("update_first", "clear", "update"))


def run_parts(stepper: Stepper, recorder: Recorder) -> None:
    """Runs every distinct part of a run once."""
    with recorder.part("micro"):
        stepper.micro_batch()
    if stepper.spec.gradient_accumulation_steps > 1:
        with recorder.part("micro_more"):
            stepper.micro_batch()
    with recorder.part("update_first"):
        stepper.update()
    with recorder.part("clear"):
        stepper.drop_gradients()
    # A later update finds its state; the gradients it needs are put there unrecorded.
    for parameter in stepper.parameters:
        parameter.grad = torch.zeros_like(parameter)
    with recorder.part("update"):
        stepper.update()
    stepper.drop_gradients()
    with recorder.part("evaluate"):
        stepper.evaluate()


class Recorder:
    """Remembers which stretch of the tracker's events is which part."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._stretches: dict[str, tuple[int, int]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Events inside belong to the part `name`."""
        start = self._tracker.position
        yield
        self._stretches[name] = (start, self._tracker.position)

    def events(self) -> dict[str, Any]:
        """The events of each part, as they are known by now."""
        return {name: self._tracker.events(*ends) for name, ends in self._stretches.items()}


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside, there is no garbage collection, which would free storages at random moments.

    Around many traces it also saves time: a collection visits everything that was imported. Each
    trace collects what it leaves.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
    """Births and deaths of the run up to the end of its second step, as the allocator served them:
    a block may be larger than its tensor."""
    starts: tuple[tuple[int, str], ...]
    """At which event each part of the run begins."""
    traced_layers: tuple[int, ...]

    def __repr__(self) -> str:
        parts = ", ".join(f"{n} {format_bytes(size)}" for n, size in self.peak.components.items())
        return (
            f"<MemoryEstimate: {self.parameters:,} parameters, a peak of "
            f"{format_bytes(self.peak.device_bytes)} on the device: {parts}>"
        )


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
    books = Books(device, expandable_segments=expandable_segments)
    stretches = [(0, end), (end, end), (end, count)]
    training, saving, evaluation = peaks(run, stretches, device, books=books)
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
        events=served(run.events[:end], books),
        starts=run.starts[:-1],
        traced_layers=prediction.traced_layers,
    )
