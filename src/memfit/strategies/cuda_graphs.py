"""The whole step as CUDA graphs: thousands of kernels replayed instead of launched from Python.

A small card's kernels take long enough to hide Python; on a fast one the step waits for it, and
replaying makes it several times as fast. It costs the padding up to a token bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memfit.i18n import N_, Message
from memfit.memory.allocator import use_expandable_segments
from memfit.strategies.base import Fidelity, PlanFigures, Setup, Strategy
from memfit.units import step_time


@dataclass(frozen=True, slots=True)
class CudaGraphs(Strategy):
    """Micro-steps captured once a token bucket, sharing one memory pool."""

    name = "cuda_graphs"
    title = N_("CUDA graphs")
    reason = "the step is replayed by the GPU itself instead of launched piece by piece"
    shrinks = ("time",)
    conflicts = frozenset({"activation_offload", "optimizer_offload"})

    bucket_tokens: int = 256

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def explain(self, plan: PlanFigures) -> str:
        return Message(
            "the step is replayed as CUDA graphs: about {launches} kernels start "
            "without Python, which saves {saved_time} of a step",
            launches=f"{plan.kernels:,.0f}",
            saved_time=step_time(max(plan.seconds_saved(self), 0.0)),
        )

    def unavailable(self, setup: Setup) -> str:
        if setup.device_type != "cuda":
            return Message("a {device} has no CUDA graphs", device=setup.device_type)
        if setup.packing is None or setup.make_optimizer is None:
            return Message("it captures packed batches and the low-bit optimizer; use both")
        if not setup.stock_loss:
            return Message("a loss that is not the model's own cannot be captured unseen")
        if setup.ranks > 1:
            return Message("gradients of several processes are not summed inside a graph")
        if setup.args.torch_compile:
            return Message("torch_compile is on")
        if setup.args.neftune_noise_alpha is not None:
            return Message(
                "neftune_noise_alpha asks for noise by each batch's width, which is captured once"
            )
        return ""

    def change(self, setup: Setup) -> None:
        if setup.card is None:
            use_expandable_segments()  # else graphs of growing size take segments of their own
        setup.wrap_executor.append(lambda executor: self._graphed(executor, setup))

    def _graphed(self, executor: Any, setup: Setup) -> Any:
        from memfit.engine.executors import GraphedExecutor
        from memfit.engine.graph_cache import TokenBuckets
        from memfit.engine.micro_batches import largest_batch

        assert setup.packing is not None
        config: Any = getattr(setup.model, "config", None)
        rows = setup.args.per_device_train_batch_size
        largest = largest_batch(setup.train_dataset, setup.model, rows)
        limit = executor.micro_batching.max_tokens
        return GraphedExecutor(
            **vars(executor),
            packing=setup.packing,
            device=setup.device,
            problem_type=getattr(config, "problem_type", None),
            rows=rows,
            buckets=TokenBuckets(
                self.bucket_tokens, largest if limit is None else min(largest, limit)
            ),
        )
