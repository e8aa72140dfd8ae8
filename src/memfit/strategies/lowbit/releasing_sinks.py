"""The step inside backward: a large gradient moves its weights once it exists, and is freed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memfit.engine.exchange import Peers
from memfit.strategies.lowbit.gradient_sinks import LowBitSink
from memfit.strategies.lowbit.lowbit_kernels import CodedGradient
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.step_scalars import LossScale, NormPrediction

FLUSH_BYTES = 4 * 2**20
"""Gradients gathered before one launch updates them all: two launches a layer of BERT-Large."""


class ReleasedGradients(LowBitSink):
    """No gradient is kept, so clipping cannot know the norm, and micro-batches cannot add up.

    What can be done is named, and is another update rule: `clip="predicted"` clips by the
    norm expected from the gradients seen so far (step_scalars.py); several micro-batches add to the
    moments, m exactly, v as a sum of squares instead of a square of sums (AdamA, arXiv
    2305.19982), are not clipped, and move the weights with the last one. With fp16 an overflow
    stops all updates after it: those before it have been made, from finite gradients.
    """

    name = "release"
    updates_in_backward = True

    def __init__(
        self,
        optimizer: LowBitOptimizer,
        *,
        max_grad_norm: float = 0.0,
        loss_scale: LossScale | None = None,
        clip: str = "predicted",
        flush_bytes: int = FLUSH_BYTES,
        ranks: Peers | None = None,
    ) -> None:
        if clip not in ("predicted", "none"):
            raise ValueError(f"clip is 'predicted' or 'none', not {clip!r}")
        super().__init__(optimizer, max_grad_norm=max_grad_norm, loss_scale=loss_scale, ranks=ranks)
        self.clip = clip
        self._flush_bytes = flush_bytes
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._pending_bytes = 0
        self._prediction: NormPrediction | None = None
        self._learned = False
        self._settled: set[Tensor] = set()
        self.by_layers = False
        """Whether updates wait for `pass_boundary`, so that a failed backward can go on there."""

    @classmethod
    def fidelity(cls, *, max_grad_norm: float, micro_batches: int) -> str:
        """The same algorithm only where nothing is clipped and nothing is accumulated."""
        return "rounding" if max_grad_norm == 0 and micro_batches == 1 else "optimizer"

    @property
    def measures(self) -> bool:
        """Micro-batches that are never added up have no common norm."""
        return self._count == 1

    @property
    def launches_first(self) -> bool:
        """A guessed norm is made up for after the first step, which no graph does."""
        return self.max_grad_norm > 0 and self.clip == "predicted" and not self._learned

    @contextmanager
    def without_effect(self) -> Iterator[None]:
        """As in the base; what norms are usual is not learnt."""
        learned = self._learned
        try:
            with super().without_effect():
                yield
        finally:
            self._learned = learned

    @property
    def _moves(self) -> bool:
        """Whether an update made now changes weights."""
        return not (self.capturing or self.optimizer.is_shut)

    @property
    def _predicts(self) -> bool:
        return self._count == 1 and self.max_grad_norm > 0 and self.clip == "predicted"

    @property
    def prediction(self) -> NormPrediction:
        """What norms are usual."""
        if self._prediction is None:
            self._prediction = NormPrediction(self.optimizer.clock.device)
        return self._prediction

    def begin(self, micro_batches: int = 1, *, replayed: bool = False) -> None:
        """Until gradients arrive nothing is clipped and nothing has overflowed."""
        super().begin(micro_batches, replayed=replayed)
        self._set_scale(torch.zeros_like(self.norm))
        self.optimizer.gate.copy_(self.optimizer.open)

    def take(self, p: Tensor, grad: Tensor) -> None:
        """Update with the next few: one launch for all of them."""
        self._pending.append((p, grad))
        self._pending_bytes += grad.numel() * grad.element_size()
        # Between ranks all must make the same updates together, wherever their layers end.
        waits = self.by_layers and not self.capturing and not self.is_together
        if self._pending_bytes >= self._flush_bytes and not waits:
            self._flush()

    def arm(self, index: int, phase: str = "apply") -> None:
        """A micro-batch begins with nothing received."""
        super().arm(index, phase)
        self._settled.clear()

    @torch.no_grad()
    def pass_boundary(self) -> None:
        """Backward is through with some layers: make their updates."""
        if self.is_together:
            assert self._exchange is not None
            self._take_sums(self._exchange.landed(most_bytes=-1))
        else:
            self._flush()
        self._settled = set(self._taken)

    def has_settled(self, p: Tensor) -> bool:
        """Whether this parameter's gradient is one that backward will not be asked for again."""
        return p in self._settled

    def drop_unsettled(self) -> None:
        """Forget the gradients received since the last boundary; backward will go on from it."""
        if not self.is_together:  # what has come from the other ranks is whole
            self._pending, self._pending_bytes = [], 0
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p not in self._settled:
                    p.grad = None
        self._taken = set(self._settled)

    def abandon(self) -> None:
        """As in the base; allowed as long as no update was made."""
        super().abandon()
        self._pending, self._pending_bytes = [], 0
        self._settled.clear()

    def _flush(self) -> None:
        params = [p for p, _ in self._pending]
        grads = [grad for _, grad in self._pending]
        self._pending, self._pending_bytes = [], 0
        self.touched = self.touched or (bool(params) and self._moves)
        if self.measures or self.loss_scale is not None:
            self._norm.measure_many(params, grads)
        if self.loss_scale is not None:
            self.optimizer.gate.logical_and_(torch.isfinite(self._norm.slots.sum()))
        if self._predicts and params:
            self._set_scale(self.prediction.guess(self._true_norms()))
        self.optimizer.update_many(list(zip(params, grads, strict=True)), part=True)

    def _true_norms(self) -> Tensor:
        slots = self._norm.slots
        return slots if self.loss_scale is None else slots / self.loss_scale.value

    def _next_micro_batch(self) -> None:
        raise RuntimeError(
            "a second backward in one step, while its gradients move the weights at once: "
            "say begin(micro_batches=n) and arm(index), or use the sink kept8, host or kept"
        )

    def end_backward(self) -> None:
        """Gradients still waiting belong to this micro-batch's coefficients."""
        super().end_backward()
        self._flush()

    def _decide(self) -> None:
        """Small parameters, which have not moved yet, are clipped by the true norm."""
        gate = self.optimizer.gate
        if self.loss_scale is not None:
            gate.logical_and_(torch.isfinite(self._norm.slots.sum()))
        if not self.measures:
            return
        self._norm.sum(self.loss_scale)
        if self._predicts:
            self._set_scale(self.norm)
            if not self._learned and not self.capturing:
                self._clip_first_step()
            self.prediction.learn(self._true_norms(), self.norm, gate)
            self._learned = True

    def _settle(self) -> None:
        """Backward has made all updates of large parameters."""

    def _clip_first_step(self) -> None:
        """With moments that began at zero, clipping afterwards is scaling them: exact.

        Adam's first update does not depend on the gradient's scale, but an unclipped
        first v would outweigh the clipped steps after it for a thousand steps.
        """
        optimizer = self.optimizer
        clip = (self.max_grad_norm / (self.norm + 1e-6)).clamp_(max=1.0)
        factor = torch.where((optimizer.clock.counters[0] == 1) & optimizer.gate, clip, 1.0)
        states = [optimizer.lowbit_state(p) for p in optimizer.large if optimizer.keeps(p)]
        for scales in ([s.scale1 for s in states], [s.scale2 for s in states]):
            if scales:
                torch._foreach_mul_(scales, factor)

    def state_dict(self) -> dict[str, Any]:
        """The state, with the norms that are usual."""
        usual = self.prediction
        own = {"usual": usual.usual.cpu(), "usual_total": usual.usual_total.cpu()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the saved run stopped."""
        super().load_state_dict(state)
        if "usual" in state:
            device = self.optimizer.clock.device
            self.prediction.usual = state["usual"].to(device)
            self.prediction.usual_total.copy_(state["usual_total"])
            self._learned = bool(state["usual"].numel())


class TwoPassRelease(ReleasedGradients):
    """The norm from a first backward that keeps nothing, the step from a second: exact clipping.

    The caller runs forward and backward twice on the same rows with the same dropout. An fp16
    overflow is seen in the first pass, so a step is made or skipped as a whole.
    """

    name = "two_pass"
    phases = ("measure", "apply")
    micro_batches = False

    @classmethod
    def fidelity(cls, *, max_grad_norm: float, micro_batches: int) -> str:  # noqa: ARG003
        """The norm is this step's own."""
        return "rounding"

    @property
    def launches_first(self) -> bool:
        """The norm is measured, never guessed."""
        return False

    @property
    def measures(self) -> bool:
        """Always: the first pass measures the norm."""
        return True

    def begin(self, micro_batches: int = 1, *, replayed: bool = False) -> None:
        """The measuring pass comes first."""
        LowBitSink.begin(self, micro_batches, replayed=replayed)
        self.phase = "measure"

    def arm(self, index: int, phase: str = "measure") -> None:
        """Between the passes the norm decides clipping, or skipping; the step counts once."""
        if phase == "measure":
            super().arm(index, phase)
            return
        if not self._armed:
            raise RuntimeError("two_pass: arm(0, 'measure') and a backward come first")
        self._norm.measure_small()
        LowBitSink._decide(self)
        for arena in self.optimizer.small:
            arena.clear()
        self.phase = phase
        self._taken.clear()
        self._settled.clear()

    def take(self, p: Tensor, grad: Tensor) -> None:
        """Measure and drop, or update."""
        if self.phase == "measure":
            self._norm.measure(p, grad)
        else:
            super().take(p, grad)

    def _flush(self) -> None:
        work: list[tuple[Tensor, Tensor | CodedGradient]] = [*self._pending]
        self._pending, self._pending_bytes = [], 0
        self.touched = self.touched or (bool(work) and self._moves)
        self.optimizer.update_many(work)

    def _decide(self) -> None:
        if self.phase == "measure":
            raise RuntimeError(
                "two_pass: the step ended after the measuring pass; call arm(0, 'apply') "
                "and run backward again"
            )
