"""Whole micro-steps as CUDA graphs, one a token bucket, all in one memory pool.

A step of BERT-Large is some 4,000 kernels. Launched one by one from Python they take longer
than they run; replayed as a graph they do not. A graph wants the same shapes every time, so
batches are filled up with dummy tokens to a few bucket sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from memfit.engine.packed_batch import PackedBatch

Body = Callable[[PackedBatch], torch.Tensor]

Key = tuple[int, int, int, Hashable]


@dataclass(frozen=True, slots=True)
class TokenBuckets:
    """The few token counts that batches are filled up to."""

    multiple: int = 256
    largest: int | None = None
    """Tokens of the largest batch there can be; its graph comes first, and the others fit inside
    its memory. Captured in any order they would lie between each other."""

    def fit(self, tokens: int) -> int:
        """The smallest bucket that holds this many tokens."""
        return -(-tokens // self.multiple) * self.multiple

    def choose(self, tokens: int, captured: set[int], seen: Counter[int]) -> int:
        """The bucket to fill up to: a batch of a rare size borrows a larger one's graph.

        Capturing takes as long as several steps, so a size is worth it when it comes again.
        """
        bucket = self.fit(tokens)
        if not captured and self.largest is not None:
            return max(bucket, self.fit(self.largest))
        seen[bucket] += 1
        larger = [size for size in captured if size > bucket]
        if bucket in captured or seen[bucket] > 1 or not larger:
            return bucket
        return min(larger)


class Signatures:
    """Which batches are worth a graph, by their inputs beside the tokens.

    What the training began with is captured at once. Inputs of another shape are launched first:
    where shapes change from batch to batch, capturing each would take longer than the steps.
    """

    def __init__(self) -> None:
        self._met: Counter[Hashable] = Counter()

    def captures(self, batch: PackedBatch) -> bool:
        """Whether this batch is to be run as a graph; each batch is asked for once."""
        signature = batch.signature
        if signature is None:
            return False
        is_first = not self._met
        self._met[signature] += 1
        return is_first or self._met[signature] > 1


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: PackedBatch
    loss: torch.Tensor


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all trainings of a process: cuBLAS keeps a workspace for every stream it has seen."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


class GraphMemory:
    """The pool and the stream that all graphs of a training share.

    Graphs are never replayed at once, so the largest one's memory is enough for all. One stream:
    autograd ties each parameter's accumulation to the stream it first ran on, and a capture must
    not wait for another one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _stream_of(device)
        self.pool: Any = None
        self.is_warm = False
        """Whether a step has been launched: kernels are compiled, products have their algorithms.
        One is enough for all graphs; a second would take its memory beside the pool."""

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """What is launched inside comes before the graphs' next replay, and after all until now."""
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outside.wait_stream(self.stream)

    def drop(self) -> None:
        """Give it back, once no graph is left."""
        torch.cuda.synchronize(self.device)
        self.pool = None
        torch.cuda.empty_cache()


class GraphCache:
    """Runs a micro-step's body: the training's first as it is, then as a graph for each shape.

    The body may change anything that lives on the device (weights, counters, random state):
    capturing executes nothing, so every call of `run` is exactly one step. What the body reads
    from the host is frozen at capture; a batch that a graph cannot be handed is launched.
    """

    def __init__(self, body: Body, memory: GraphMemory) -> None:
        self._body = body
        self._memory = memory
        self._device, self._stream = memory.device, memory.stream
        self._captured: dict[Key, _Captured] = {}
        self._signatures = Signatures()

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def tokens(self) -> set[int]:
        """The token counts there are graphs for."""
        return {key[0] for key in self._captured}

    def run(self, batch: PackedBatch) -> torch.Tensor:
        """One step on a batch from the host; its loss, on the device, yours to keep."""
        key = (batch.total_tokens, batch.rows, batch.max_seqlen, batch.signature)
        captures = self._signatures.captures(batch)
        with self._memory.on_stream():
            if not self._memory.is_warm or not captures:
                loss = self._body(batch.to(self._device, non_blocking=True))
                self._memory.is_warm = True
                return loss
            captured = self._captured.get(key) or self._capture(key, batch)
            captured.batch.copy_from(batch)
            captured.graph.replay()
            return captured.loss.clone()

    def clear(self) -> None:
        """Forget all graphs; they are captured anew when needed."""
        torch.cuda.synchronize(self._device)
        self._captured.clear()

    def _capture(self, key: Key, batch: PackedBatch) -> _Captured:
        static = batch.to(self._device)
        if not self._captured:
            # What the warm-up left in the ordinary pool would lie beside the graphs' own.
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory.pool, stream=self._stream):
                loss = self._body(static)
        except Exception:
            graph.reset()  # nothing was executed; its share of the pool goes back
            raise
        self._memory.pool = self._memory.pool or graph.pool()
        self._captured[key] = _Captured(graph, static, loss)
        return self._captured[key]
