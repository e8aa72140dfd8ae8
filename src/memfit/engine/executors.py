"""Runs one effective batch: plain micro-batches, into a gradient sink, or as CUDA graphs.

split  ->  prepare (move to the device)  ->  loss  ->  scaled backward

This is the one place that decides how an effective batch is run; strategies hook in here.

SinkExecutor      any model, any loss: the sink is told of every micro-batch
GraphedExecutor   packed batches and the model's own loss: the whole step as a CUDA graph
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memfit.engine.graph_cache import GraphCache, GraphMemory, TokenBuckets
from memfit.engine.micro_batches import Batch, MicroBatch, MicroBatching, Trim, rows_of, split
from memfit.engine.packed_batch import (
    PackedBatch,
    PacksBatches,
    padded_on_the_right,
    text_lengths,
    weighted_loss,
)
from memfit.engine.ranks import Ranks
from memfit.errors import DataError
from memfit.memory.device import is_cuda


class GradientSink(Protocol):
    """Takes each parameter's gradient as backward produces it, and ends the step.

    The sinks themselves are in strategies/lowbit.
    """

    @property
    def hooked(self) -> bool:
        """Whether gradients reach it by hooks on the parameters."""

    @property
    def capturable(self) -> bool:
        """Whether its work can be captured in a CUDA graph."""

    @property
    def loss_scale(self) -> Any:
        """The fp16 loss scale; None without one."""

    def begin(self, micro_batches: int = 1, *, replayed: bool = False) -> None:
        """Starts a step of this many micro-batches."""

    def prepare(self, index: int) -> None:
        """Does the host's part before a micro-batch."""

    def arm(self, index: int) -> None:
        """Expects the gradients of a micro-batch."""

    def end_backward(self) -> None:
        """Ends one backward pass."""

    def finish(self) -> Tensor:
        """Makes the updates; returns the global gradient norm."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """Drops the gradients of backward passes inside."""

    def without_effect(self) -> AbstractContextManager[None]:
        """Leaves everything as it was after whole steps inside."""


def _counted_row(
    weights: Sequence[tuple[MicroBatch, float]], weigh: Callable[[Batch], float]
) -> MicroBatch | None:
    """A single row whose loss is a number; NaN stays NaN even with a weight of 0."""
    for part, _ in weights:
        for row in range(len(part.rows)):
            inputs = rows_of(part.inputs, [row])
            if weigh(inputs) > 0:
                return MicroBatch((part.rows[row],), inputs)
    return None


@dataclass(frozen=True, slots=True)
class Share:
    """The weight of a micro-batch's mean loss, and that of the whole batch's."""

    weight: float
    total: float


@dataclass(frozen=True)
class StepExecutor:
    """Runs effective batches so that their gradient is the one of the whole batch at once.

    `weigh` says what a micro-batch's mean loss is a mean of (engine/loss.py); `loss` gets the
    prepared inputs and that weight. Each of `around` is entered around the loss and the backward of
    every micro-batch. Where several `ranks` train, each runs its share of the rows, which may be
    nothing, and DDP around the model leaves the gradient of the whole batch.
    """

    micro_batching: MicroBatching
    trim: Trim
    weigh: Callable[[Batch], float]
    prepare: Callable[[Batch], Batch]
    loss: Callable[[nn.Module, Batch, float], torch.Tensor]
    backward: Callable[[torch.Tensor], None]
    ranks: Ranks = field(default_factory=Ranks)
    in_step: bool = False
    """Whether ranks meet in every layer (FSDP2): all run as many micro-batches as the one with the
    most, and none runs, tries or predicts rows without the others."""
    around: Sequence[Callable[[], AbstractContextManager[Any]]] = ()
    packed: bool = False
    may_cut: Callable[[Sequence[Batch]], bool] = lambda _: True
    """Whether one weight for each of these micro-batches gives the loss of the whole batch."""

    def run(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Leave the batch's gradient in the parameters; return its mean loss, detached."""
        loss = self.run_parts(model, self.split(batch))
        return self._meets(model).averaged(loss)

    def run_parts(self, model: nn.Module, parts: Sequence[MicroBatch]) -> torch.Tensor:
        """Runs the micro-batches that an effective batch was cut into."""
        return self._summed(model, self.weighted(model, parts))

    def _summed(self, model: nn.Module, weighted: list[tuple[MicroBatch, Share]]) -> torch.Tensor:
        """Runs them one after the other; DDP sums the gradients over the ranks with the last."""
        losses = []
        for index, (part, share) in enumerate(weighted):
            is_last = index == len(weighted) - 1
            with nullcontext() if is_last else getattr(model, "no_sync", nullcontext)():
                losses.append(self.micro_step(model, part, share))
        return torch.stack(losses).sum()

    def _meets(self, model: nn.Module) -> Ranks:
        """The ranks that run a step of this model together: without DDP around it, none."""
        return self.ranks if self.in_step or hasattr(model, "no_sync") else Ranks()

    def weighted(
        self, model: nn.Module, parts: Sequence[MicroBatch]
    ) -> list[tuple[MicroBatch, Share]]:
        """The micro-batches that count, each with its share in the batch's mean.

        DDP and FSDP2 average over the ranks, so a share is that of an average rank's weight. A rank
        that would run too few adds a row whose loss counts nothing: the others wait for it.
        """
        weights = [(part, self.weigh(part.inputs)) for part in parts]
        # A micro-batch of ignored labels only has no mean, and no share in the whole one.
        weights = [(part, weight) for part, weight in weights if weight > 0]
        ranks = self._meets(model)
        told = ranks.numbers(sum(weight for _, weight in weights), len(weights))
        total = sum(weight for weight, _ in told) / ranks.count
        if not total:
            raise DataError(
                "a training batch has no label that counts: all are -100 or of weight zero"
            )
        own = [(part, Share(weight, total)) for part, weight in weights]
        counts = [int(count) for _, count in told]
        lacking = (max(counts) if self.in_step else 1) - len(own)
        row = _counted_row(weights, self.weigh) if lacking > 0 or 0 in counts else None
        if 0 in counts:  # fewer rows than ranks, as at the end of an epoch
            row = next(one for one in ranks.gathered(row) if one is not None)
        return own if row is None else own + [(row, Share(0.0, total))] * lacking

    def micro_step(self, model: nn.Module, part: MicroBatch, share: Share) -> torch.Tensor:
        """Forward and backward of one micro-batch; its part of the mean loss, detached."""
        with self.contexts():
            loss = self.forward(model, part, share)
            self.backward(loss)
        return loss.detach()

    def forward(self, model: nn.Module, part: MicroBatch, share: Share) -> torch.Tensor:
        """A micro-batch's part of the mean loss."""
        mean = self.loss(model, self.prepare(part.inputs), share.weight)
        return mean * (share.weight / share.total)

    @contextmanager
    def contexts(self) -> Iterator[None]:
        """What is around the loss and the backward of a micro-batch."""
        with ExitStack() as entered:
            for context in self.around:
                entered.enter_context(context())
            yield

    def rehearse(self, model: nn.Module, batch: Batch) -> None:
        """Forward and backward as in `run`; the gradients are the caller's to drop."""
        self.run(model, batch)

    def dress(self, model: nn.Module, batch: Batch, steps: int = 1) -> None:
        """Whole steps that change nothing, as far as that can be had; gradients as in `rehearse`.

        Without a sink the update is left out: it would move the optimizer's state.
        """
        for _ in range(steps):
            model.zero_grad()
            self.rehearse(model, batch)

    def on_stream(self) -> AbstractContextManager[None]:
        """Inside, kernels are launched on the stream of the steps."""
        return nullcontext()

    @property
    def captured_graphs(self) -> int:
        """CUDA graphs that are held now."""
        return 0

    def drop(self) -> None:
        """Gives back memory that is only held to save time."""

    def split(self, batch: Batch) -> list[MicroBatch]:
        """How this batch will be run."""
        parts = split(batch, self.micro_batching, self.trim, packed=self.packed)
        if len(parts) > 1 and not self.may_cut([part.inputs for part in parts]):
            return split(batch, MicroBatching(), self.trim, packed=self.packed)
        return parts


@dataclass(frozen=True, kw_only=True)
class SinkExecutor(StepExecutor):
    """A StepExecutor that tells the sink where in the step it is."""

    sink: Callable[[], GradientSink]
    """Gives the sink once the optimizer is made."""

    def run_parts(self, model: nn.Module, parts: Sequence[MicroBatch]) -> torch.Tensor:
        """Backward into the sink; the optimizer's step then ends what is begun here."""
        weighted = self.weighted(model, parts)
        sink = self.sink()
        if not self._meets(model).is_alone:  # what is in `.grad` is summed, then looked at
            sink.begin(1)
            sink.arm(0)
            loss = self._summed(model, weighted)
            sink.end_backward()
            return loss
        sink.begin(len(weighted))
        losses = []
        for index, (part, share) in enumerate(weighted):
            sink.arm(index)
            losses.append(self.micro_step(model, part, share))
            sink.end_backward()
        return torch.stack(losses).sum()

    def rehearse(self, model: nn.Module, batch: Batch) -> None:
        """Every gradient is dropped where a sink would take it."""
        with self.sink().rehearsal():
            for part, share in self.weighted(model, self.split(batch)):
                self.micro_step(model, part, share)

    def dress(self, model: nn.Module, batch: Batch, steps: int = 1) -> None:
        """Runs the update too, with its gate shut."""
        sink = self.sink()
        with sink.without_effect():
            for _ in range(steps):
                self.run(model, batch)
                sink.finish()
                model.zero_grad()


@dataclass(frozen=True, kw_only=True)
class GraphedExecutor(SinkExecutor):
    """Replays the step from CUDA graphs: forward, backward, norm, clipping and update in one."""

    packing: PacksBatches
    device: torch.device
    problem_type: str | None = None
    rows: int = 32
    """Every batch is filled up to this many rows."""
    buckets: TokenBuckets = field(default_factory=TokenBuckets)
    _caches: dict[str, GraphCache] = field(default_factory=dict)
    _memory: list[GraphMemory] = field(default_factory=list)
    """One, made with the first graph; whoever copies the executor shares it."""
    _seen: Counter[int] = field(default_factory=Counter)

    def run_parts(self, model: nn.Module, parts: Sequence[MicroBatch]) -> torch.Tensor:
        """One replay a micro-batch; a batch that is not split ends its step in the graph too."""
        weighted = self.weighted(model, parts)
        sink = self.sink()
        several = len(weighted) > 1
        if not sink.capturable or (several and not sink.hooked):
            # Gradients left in `.grad` would be the graph's own memory, written anew each time.
            return super().run_parts(model, parts)
        if not all(padded_on_the_right(part.inputs) for part, _ in weighted):
            # Such a batch stays padded; graphs are of packed ones.
            return super().run_parts(model, parts)
        packed = [self._packed(part, share) for part, share in weighted]
        if not several:
            sink.prepare(0)
            return self._cache_of("whole", model).run(packed[0])
        micro = self._cache_of("micro", model)
        sink.begin(len(weighted), replayed=True)
        losses = []
        for index, inputs in enumerate(packed):
            sink.prepare(index)
            losses.append(micro.run(inputs))
        return torch.stack(losses).sum()

    def rehearse(self, model: nn.Module, batch: Batch) -> None:
        """Launches on the graphs' stream: autograd remembers the first stream it saw."""
        with self.on_stream():
            super().rehearse(model, batch)

    def dress(self, model: nn.Module, batch: Batch, steps: int = 1) -> None:
        """One step more than asked for until a graph is there: the first is launched."""
        super().dress(model, batch, steps if self._graph_memory().is_warm else steps + 1)

    def on_stream(self) -> AbstractContextManager[None]:
        """The stream of the graphs."""
        return self._graph_memory().on_stream()

    @property
    def captured_graphs(self) -> int:
        """Counts graphs of whole steps and of single micro-batches."""
        return sum(len(cache) for cache in self._caches.values())

    @property
    def captured_tokens(self) -> set[int]:
        """The token counts there are graphs for."""
        return set().union(*(cache.tokens for cache in self._caches.values()))

    def drop(self) -> None:
        """Give the graphs' memory back."""
        for cache in self._caches.values():
            cache.clear()
        if self._memory:
            self._memory[0].drop()

    def _cache_of(self, name: str, model: nn.Module) -> GraphCache:
        """The graphs of whole steps, or those of single micro-batches."""
        if name not in self._caches:
            bodies: dict[str, Callable[[PackedBatch], torch.Tensor]] = {
                "whole": lambda inputs: self._whole_step(model, inputs),
                "micro": lambda inputs: self._micro(model, inputs),
            }
            self._caches[name] = GraphCache(bodies[name], self._graph_memory())
        return self._caches[name]

    def _graph_memory(self) -> GraphMemory:
        if not self._memory:
            self._memory.append(GraphMemory(self.device))
        return self._memory[0]

    def _packed(self, part: MicroBatch, share: Share) -> PackedBatch:
        lengths = text_lengths(part.inputs)
        captured = self.captured_tokens
        tokens, longest = sum(lengths), max(lengths)
        packed = self.packing.pack(
            part.inputs,
            pad_to_tokens=self.buckets.choose(tokens, captured, self._seen),
            pad_to_rows=max(self.rows, len(part.rows)),
            max_seqlen=-(-longest // 64) * 64,
        )
        packed = replace(packed, row_weight=packed.row_weight / share.total)
        return packed.pin_memory() if is_cuda(self.device) else packed

    def _whole_step(self, model: nn.Module, inputs: PackedBatch) -> torch.Tensor:
        """Forward, backward, norm, clipping and update, captured together.

        The update is not left to the optimizer's step: gradients that outlive the replay would be
        a part of the graph's memory that no other graph can use, and the update's kernels would be
        launched from Python.
        """
        sink = self.sink()
        sink.begin(1)
        loss = self._micro(model, inputs)
        sink.finish()
        model.zero_grad()  # gives kept gradients back to the graph's pool
        return loss

    def _micro(self, model: nn.Module, inputs: PackedBatch) -> torch.Tensor:
        sink = self.sink()
        sink.arm(0)
        with self.contexts():
            outputs: Any = model(**inputs.inputs(labels=False))
            assert inputs.labels is not None
            loss = weighted_loss(
                outputs.logits.float(), inputs.labels, inputs.row_weight, self.problem_type
            )
            total: torch.Tensor = loss if sink.loss_scale is None else sink.loss_scale.apply(loss)
            total.backward()  # type: ignore[no-untyped-call]
        sink.end_backward()
        return loss.detach()
