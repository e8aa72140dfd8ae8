"""memfit's own step on fake tensors, part by part: the strategies, executors and sinks that train.

build       the model goes to the device as the strategies left it
start       the optimizer, what its sink keeps, low-bit state
micro       forward and backward of one micro-batch; micro_more: of another one
update      clipping and the optimizer; the first one makes the state of a stock optimizer
clear       gradients are dropped
evaluate    one batch without a graph
features    texts through a frozen encoder, where its features are computed once
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memfit.engine.executors import GraphedExecutor, StepExecutor
from memfit.engine.loss import counted_labels
from memfit.engine.micro_batches import MicroBatch, MicroBatching, trimming_for
from memfit.memory.components import Component
from memfit.memory.stock_estimate import Recorder
from memfit.memory.stock_step import make_optimizer, parameter_groups, state_tensors
from memfit.memory.tracing import traced_device as traced
from memfit.memory.tracing.counting import Counting, StepCounts
from memfit.memory.tracing.fake_tensors import FakeTracker
from memfit.memory.tracing.meta_models import children_first, empty_like, materialize
from memfit.memory.tracing.traced_device import TracedDevice
from memfit.planner.task import Task
from memfit.planner.traced_setup import (
    Batch,
    TracedRows,
    apply_on_meta,
    apply_one,
    device_to_trace,
    labels_for,
    make_batch,
    make_setup,
    optimizer_spec,
    rows_at_once,
)
from memfit.strategies import FrozenFeatures, Setup, Strategy, find
from memfit.strategies.frozen_features import FEATURES
from memfit.strategies.lowbit.gradient_sinks import LowBitSink
from memfit.strategies.lowbit.host_sink import HostGradients, TracedHostGradients


def use_traced_sinks(setup: Setup) -> None:
    """Sinks that work on streams of their own are replaced by what they allocate."""
    if setup.card is not None and setup.make_sink is HostGradients:
        setup.make_sink = TracedHostGradients


def prepare_sink(sink: LowBitSink, tracker: FakeTracker) -> None:
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


def begin(sink: LowBitSink, tracker: FakeTracker, parts: int) -> None:
    """All that lives as long as the run is made now; the step says it once more."""
    sink.begin(parts)
    if isinstance(sink, HostGradients):
        for p in sink.optimizer.large:
            sink._buffer(p)
    tracker.tag(iter(kept_gradients(sink)), Component.GRADIENTS)


def kept_gradients(sink: LowBitSink) -> list[torch.Tensor]:
    """The buffers of a sink that adds gradients up."""
    kept = getattr(sink, "_kept", {})
    on_host = getattr(sink, "_host", {})
    return [t for coded in kept.values() for t in (coded.codes, coded.scales)] + [*on_host.values()]


@dataclass(frozen=True)
class Told:
    """The tracker and the counter, told by `traced_device` what tensors cannot say."""

    device: TracedDevice
    tracker: FakeTracker
    counter: Counting
    _done: dict[Hashable, tuple[int, StepCounts]] = field(default_factory=dict)

    def hosted(self, tensor: torch.Tensor) -> None:
        self.tracker.hosted(tensor)
        self.counter.on_host(tensor)

    def on_host(self) -> contextlib.AbstractContextManager[Any]:
        return self.tracker.on_host()

    def resized(self, tensor: torch.Tensor) -> None:
        self.tracker.resized(tensor)

    def alike(self, key: Hashable, run: Callable[[], None], times: int) -> None:
        if key not in self._done:
            before, live_bytes = self.counter.counts(), self.tracker.live_bytes
            highest, self.tracker.peak_bytes = self.tracker.peak_bytes, live_bytes
            run()
            taken_bytes = self.tracker.peak_bytes - live_bytes
            self.tracker.peak_bytes = max(highest, self.tracker.peak_bytes)
            self._done[key] = (taken_bytes, self.counter.counts() - before)
            times -= 1
        taken_bytes, counts = self._done[key]
        self.tracker.transient(taken_bytes)
        self.counter.add(counts * times)


class TracedRun:
    """One candidate's training on fake tensors; `run` does every part once."""

    def __init__(
        self,
        task: Task,
        strategies: tuple[Strategy, ...],
        limits: MicroBatching,
        model: Any,
        rows: TracedRows,
        half: torch.dtype | None,
    ) -> None:
        self._task, self._strategies, self._limits = task, strategies, limits
        self._card = task.card
        self._rows, self._half = rows, half
        self.setup: Setup = make_setup(task, model)
        self._rest = apply_on_meta(strategies, self.setup)
        self.counts: dict[str, StepCounts] = {}

    # ------------------------------------------------------------------------- the parts

    def run(self, tracker: FakeTracker, counter: Counting) -> dict[str, Any]:
        """Every part once, under a tracker that is entered; the events of each."""
        self._tracker, self._counter = tracker, counter
        self._recorder = Recorder(tracker)
        told = Told(device_to_trace(self._card), tracker, counter)
        with traced.tracing(told):
            self._prepare()
            with self._part("build"):
                self._move()
            tracker.watch(self.setup.model)
            try:
                self._train()
                with self._part("evaluate"):
                    self._evaluate()
            finally:
                tracker.unwatch()
        return self._recorder.events()

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        before = self._counter.counts()
        with self._recorder.part(name):
            yield
        self.counts[name] = self._counter.counts() - before

    def _prepare(self) -> None:
        """The strategies change the model while it is still on the host."""
        with self._tracker.on_host():
            materialize(self.setup.model, empty_like)
            for strategy in self._rest:
                apply_one(strategy, self.setup)
            self._executor = self._make_executor()

    def _move(self) -> None:
        """Everything that is left on the host goes to the device, in the order `to` does it."""
        with self._tracker.accounting(Component.WEIGHTS):
            for first in self.setup.before_move:
                first(self.setup.device)
        for module in children_first(self.setup.model):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._tracker.moved(tensor)

    def _train(self) -> None:
        self.setup.model.train()
        if find(self._strategies, FrozenFeatures) is not None:
            with self._part("features"):
                self._encode()
        with self._part("start"):
            self._start()
        # Until here the host held the weights themselves, as any training does.
        self._tracker.host_peak_bytes = self._tracker.host_bytes
        self._step()
        with self._part("update_first"):
            self._update()
        with self._part("clear"):
            self.setup.model.zero_grad()
        if self.setup.sink is None:
            # A later update finds its state; the gradients it needs are put there unrecorded.
            for parameter in self._learning:
                parameter.grad = torch.zeros_like(parameter)
            with self._part("update"):
                self._update()
            self.setup.model.zero_grad()

    # ------------------------------------------------------------------------ one step

    def _start(self) -> None:
        setup = self.setup
        self._learning = [p for p in setup.model.parameters() if p.requires_grad]
        groups = parameter_groups(setup.model)
        with self._tracker.accounting(Component.OPTIMIZER):
            if setup.make_optimizer is None:
                spec = optimizer_spec(self._task, setup)
                cuda = self._card is not None
                self._optimizer = make_optimizer(spec, setup.model, cuda=cuda)
                return
            use_traced_sinks(setup)
            self._optimizer = setup.make_optimizer(groups, setup.args)
            if isinstance(setup.sink, LowBitSink):
                prepare_sink(setup.sink, self._tracker)
                begin(setup.sink, self._tracker, self._rows.parts)

    def _step(self) -> None:
        parts = self._parts()
        if isinstance(self._executor, GraphedExecutor) and self._is_graphed(len(parts)):
            self._graphed_step(self._executor, parts)
        else:
            self._cuts = iter(("", "micro_more") if len(parts) > 1 else ())
            with contextlib.ExitStack() as self._stack:
                self._stack.enter_context(self._part("micro"))
                self._executor.run_parts(self.setup.model, parts)
        grads = (p.grad for p in self._learning if p.grad is not None)
        self._tracker.tag(grads, Component.GRADIENTS)

    def _parts(self) -> list[MicroBatch]:
        """Two micro-batches where there are several: the second adds to the first's gradients."""
        inputs = self._inputs(self._rows.lengths)
        part = MicroBatch(tuple(range(len(self._rows.lengths))), inputs)
        return [part] * min(self._rows.parts, 2)

    def _inputs(self, lengths: tuple[int, ...]) -> Batch:
        if find(self._strategies, FrozenFeatures) is not None:
            features = torch.zeros(len(lengths), self._config.hidden_size)
            return {FEATURES: features, "labels": labels_for(self._task, len(lengths))}
        return make_batch(self._task, self._config, lengths)

    @property
    def _config(self) -> Any:
        model: Any = self.setup.model
        return model.config

    def _is_graphed(self, parts: int) -> bool:
        """As GraphedExecutor decides."""
        sink: Any = self.setup.sink
        return bool(sink.capturable and (sink.hooked or parts == 1))

    def _graphed_step(self, executor: GraphedExecutor, parts: list[MicroBatch]) -> None:
        """What a graph captures, once; several micro-batches are several replays of it."""
        sink: Any = self.setup.sink
        tokens, longest = sum(self._rows.lengths), max(self._rows.lengths)
        with self._tracker.on_host():
            packed = executor.packing.pack(
                parts[0].inputs,
                pad_to_tokens=executor.buckets.fit(tokens),
                pad_to_rows=max(executor.rows, len(parts[0].rows)),
                max_seqlen=-(-longest // 64) * 64,
            )
        with self._part("static"):
            static = packed._map(torch.clone)
        self._static = static
        with self._part("micro"):
            if len(parts) == 1:
                executor._whole_step(self.setup.model, static)
            else:
                sink.begin(len(parts), replayed=True)
                sink.prepare(0)
                executor._micro(self.setup.model, static)

    def _update(self) -> None:
        setup = self.setup
        with self._tracker.accounting(Component.OPTIMIZER):
            if setup.sink is not None:
                setup.sink.measure()
                self._optimizer.step()
                setup.model.zero_grad()
                return
            if (setup.args.max_grad_norm or 0) > 0:
                norm: Any = torch.nn.utils.clip_grad_norm_
                norm(self._learning, setup.args.max_grad_norm, foreach=self._card is not None)
            self._optimizer.step()
        self._tracker.tag(state_tensors(self._optimizer, host=False), Component.OPTIMIZER)
        if self._card is not None:
            self._tracker.forget(state_tensors(self._optimizer, host=True))

    # ------------------------------------------------------------ what the Trainer hands over

    def _make_executor(self) -> StepExecutor:
        setup = self.setup
        executor = StepExecutor(
            micro_batching=self._limits,
            trim=trimming_for(setup.model),
            weigh=counted_labels,
            prepare=self._prepare_inputs,
            loss=self._loss,
            backward=torch.autograd.backward,
            around=tuple(setup.around_micro_batch),
            packed=setup.packing is not None,
        )
        for wrap in setup.wrap_executor:
            executor = wrap(executor)
        return executor

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """As BudgetTrainer's: packed on the host, then moved."""
        if name := next(self._cuts, ""):
            self._stack.close()
            self._stack.enter_context(self._part(name))
        return self._moved(inputs)

    def _moved(self, inputs: Batch) -> Batch:
        packing = self.setup.packing
        if packing is not None and "input_ids" in inputs:
            with self._tracker.on_host():
                inputs = packing.pack(inputs).inputs()
        return {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }

    def _loss(self, model: nn.Module, inputs: Batch, weight: float) -> torch.Tensor:
        del weight
        with self._autocast():
            outputs: Any = model(**inputs)
        # accelerate turns what leaves autocast into fp32, the logits too.
        shown: Any = outputs if isinstance(outputs, Mapping) else dict(enumerate(outputs))
        loss: torch.Tensor = shown["loss" if "loss" in shown else 0].float()
        if self._half is not None:
            for value in shown.values():
                if isinstance(value, torch.Tensor):
                    value.float()
        return loss

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._half is None:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=self._half)

    # ------------------------------------------------------------------- beside training

    def _evaluate(self) -> None:
        """The largest part of an evaluation batch."""
        task = self._task
        count = int(task.args.per_device_eval_batch_size)
        lengths = sorted(task.lengths, reverse=True)
        longest = max(self._rows.lengths)
        rows = tuple(min(length, longest) for length in (lengths * count)[:count])
        with self._tracker.on_host():
            part = self._executor.split(self._inputs(rows))[0]
        self._without_gradients(part.inputs)

    def _encode(self) -> None:
        """As many tokens as go through the frozen encoder at once."""
        features = find(self._strategies, FrozenFeatures)
        assert features is not None
        longest = max(self._rows.lengths)
        rows = (longest,) * rows_at_once(features.max_tokens, longest, len(self._task.lengths))
        self._without_gradients(make_batch(self._task, self._config, rows))

    def _without_gradients(self, inputs: Batch) -> None:
        model = self.setup.model
        model.eval()
        with torch.no_grad():
            self._loss(model, self._moved(inputs), 1.0)
        model.train()
