"""Where gradients go between backward and the low-bit optimizer; sinks that keep them all.

    sink    bytes a parameter
    kept    2
    kept8   1.02
    host    0 (2 on the host)

Every sink runs the same loop, and none ever waits for the host:

    sink.begin(micro_batches)
    for index in range(micro_batches):
        sink.arm(index)
        loss.backward()
        sink.end_backward()
    sink.measure()              # the global norm; no large weight has moved for it
    sink.finish()               # or optimizer.step(): the updates

On several ranks DDP sums gradients in `.grad`, so that only `kept` works; to it, the whole step is
one micro-batch.

A plain loop (backward, step) works too: what is not called is inferred. For a captured
graph: `begin`, `arm`, `end_backward` and `finish` put only device work into it; before each
replay call `sink.prepare(index)`, which is the host's part. A step whose micro-batches are
replays but whose end is not says `begin(n, replayed=True)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from memfit.engine.step_state import on_gradient
from memfit.strategies.lowbit.lowbit_kernels import (
    Addition,
    CodedGradient,
    flat,
    new_coded,
    pick_kernels,
)
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.step_scalars import GlobalNorm, LossScale
from memfit.strategies.offload.host_memory import HostMemory


class LowBitSink(ABC):
    """Takes each parameter's gradient as backward produces it, and ends the step.

    Attaching one replaces the optimizer's former sink; `.step()` then ends the step.
    """

    hooked: ClassVar[bool] = True
    """Whether gradients reach it by hooks on the parameters."""
    capturable: ClassVar[bool] = True
    """Whether its work can be captured in a CUDA graph."""

    def __init__(
        self,
        optimizer: LowBitOptimizer,
        *,
        max_grad_norm: float = 0.0,
        loss_scale: LossScale | None = None,
    ) -> None:
        if optimizer.sink is not None:
            optimizer.sink.remove()
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.loss_scale = loss_scale
        self._norm = GlobalNorm(optimizer)
        self._begun, self._armed, self._measured = False, False, False
        self._taken: set[Tensor] = set()
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._counted: Tensor | None = None
        self._rehearsing = False
        optimizer.sink = self
        if self.hooked:
            for p in optimizer.parameters:
                self._watch(p)

    @property
    def norm(self) -> Tensor:
        """The last step's global gradient norm before clipping, a device scalar."""
        return self._norm.total

    # ---------------------------------------------------------------------- the loop

    def begin(self, micro_batches: int = 1, *, replayed: bool = False) -> None:  # noqa: ARG002
        """Start a step. `replayed` says that graphs will run the hooks, not Python."""
        self._begun, self._armed, self._measured = True, replayed, False
        self._taken.clear()
        self.prepare(0)
        # A capture counts nothing, so there is nothing to take back.
        self._counted = None if self.capturing else self.optimizer.clock.counters.clone()
        self._norm.begin()
        if replayed:
            for arena in self.optimizer.small:
                arena.expect_all()

    def prepare(self, index: int) -> None:
        """The host's part before micro-batch `index`: once before each replay of a graph."""
        if not self.capturing:
            self.optimizer.prepare_step(first=index == 0)

    def arm(self, index: int) -> None:
        """Before the backward of micro-batch `index`: count, and draw fresh noise."""
        if not self._begun:
            self.begin()
        self._armed = True
        self._taken.clear()
        self.prepare(index)
        self.optimizer.begin_step()

    def end_backward(self) -> None:
        """After a backward: gather the small gradients, and large ones that have no hook yet."""
        if self.hooked:
            for p in self.optimizer.parameters:
                if p.grad is not None and p not in self._taken:
                    self._watch(p)
                    self._receive(p)
        for arena in self.optimizer.small:
            arena.gather()

    @torch.no_grad()
    def measure(self) -> Tensor:
        """All gradients are there: decide clipping and skipping, once. Returns the norm."""
        return self._measure()

    def _measure(self) -> Tensor:
        if not self._begun:
            if all(p.grad is None for p in self.optimizer.parameters):
                return self.norm
            self.begin()
        if not self._measured:
            if not self._armed:
                self.arm(0)
            self.end_backward()
            self._norm.measure_small()
            self._decide()
            if self.loss_scale is not None:
                self.loss_scale.judge(self.optimizer.gate)
            self._measured = True
        return self.norm

    @torch.no_grad()
    def finish(self) -> Tensor:
        """End the step: `measure`, the updates still due, loss scale. Returns the norm."""
        self._measure()
        if not self._begun:
            return self.norm
        self._settle()
        for arena in self.optimizer.small:
            arena.update(self.optimizer.scalars())
        if self.loss_scale is not None:
            finite = self.optimizer.gate
            self.optimizer.clock.rewind(~finite)
            self.loss_scale.update(finite)
        self._begun, self._armed, self._measured = False, False, False
        self._taken.clear()
        self.optimizer.stepping = False
        return self.norm

    # --------------------------------------------------- steps that do not come to an end

    def abandon(self) -> None:
        """Back to before `begin`: what was gathered is dropped, the counters are set back."""
        if self._begun and self._counted is not None:
            self.optimizer.clock.counters.copy_(self._counted)
        self._begun, self._armed, self._measured = False, False, False
        self._counted = None
        self._taken.clear()
        self.optimizer.stepping = False
        for arena in self.optimizer.small:
            arena.clear()
        self._drop_gradients()

    def allocate(self) -> None:  # noqa: B027 - most sinks have nothing to make
        """What lives as long as the sink, made before the first step."""

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Gradients of backward passes inside are dropped: nothing moves, nothing is counted."""
        self.optimizer.init_state()
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False
            self._drop_gradients()

    @contextmanager
    def without_effect(self) -> Iterator[None]:
        """Whole steps inside, updates included, leave everything as it was, however they end."""
        self.optimizer.init_state()
        before = self.norm.clone()
        scale = None if self.loss_scale is None else self.loss_scale.copied()
        try:
            with self.optimizer.shut():
                yield
        finally:
            self.abandon()
            self.norm.copy_(before)
            if self.loss_scale is not None and scale is not None:
                self.loss_scale.load_state_dict(scale)

    def _drop_gradients(self) -> None:
        for p in self.optimizer.parameters:
            p.grad = None

    def remove(self) -> None:
        """Take the hooks off; the optimizer goes back to reading `.grad`."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        if self.optimizer.sink is self:
            self.optimizer.sink = None

    # ------------------------------------------------------------- what a sink fills in

    @abstractmethod
    def take(self, p: Tensor, grad: Tensor) -> None:
        """A large parameter's flat gradient is ready; `.grad` is freed right after."""

    @abstractmethod
    def _settle(self) -> None:
        """Make the updates of large parameters that are still due."""

    # -------------------------------------------------------------------- shared parts

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        device = self.optimizer.clock.device
        return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _watch(self, p: Tensor) -> None:
        if p.requires_grad and p not in self._handles:
            self._handles[p] = on_gradient(p, self._receive)

    @torch.no_grad()
    def _receive(self, p: Tensor) -> None:
        if self._rehearsing:
            p.grad = None
            return
        if not self._armed:
            self.arm(0)
        self.optimizer.ensure_state(p)
        if p in self._taken:  # a second time: another micro-batch has begun without `arm`
            self.end_backward()
            self.arm(1)
        self._taken.add(p)
        if not self.optimizer.is_small(p) and p.grad is not None:
            if p.grad.is_sparse:
                raise ValueError("sparse gradients are not supported; use sparse=False embeddings")
            grad = flat(p.grad, "gradient")
            p.grad = None
            self.take(p, grad)

    def _decide(self) -> None:
        """The global norm, then clipping times the inverse loss scale, and the gate."""
        self._norm.sum(self.loss_scale)
        scale = self.optimizer.grad_scale
        if self.max_grad_norm > 0:
            clip = (self.max_grad_norm / (self.norm + 1e-6)).clamp_(max=1.0)
            scale.copy_(torch.where(self.norm > 0, clip, 1.0))
        else:
            scale.fill_(1.0)
        if self.loss_scale is not None:
            scale.div_(self.loss_scale.value)
            torch.logical_and(
                torch.isfinite(self.norm), self.optimizer.open, out=self.optimizer.gate
            )

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs from this one."""
        scale = self.loss_scale
        return {
            "norm": self.norm.cpu(),
            "loss_scale": None if scale is None else scale.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the saved run stopped."""
        self.norm.copy_(state["norm"])
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])


_KEPT_STREAMS = 1 << 20
"""Noise of kept gradients is numbered after that of any model's parameters."""


class KeptGradients(LowBitSink):
    """Gradients stay in `.grad` until the step, as in any training loop: 2 bytes a parameter.

    Micro-batches add up in the gradient's own dtype. The step frees them.
    """

    hooked = False

    @torch.no_grad()
    def measure(self) -> Tensor:
        """As in the base; all gradients are in `.grad` then, where callbacks look for them."""
        is_first = not self._measured
        norm = self._measure()
        if is_first and self._measured and not self.capturing:
            for arena in self.optimizer.small:
                arena.show()
        return norm

    def take(self, p: Tensor, grad: Tensor) -> None:
        """Never called, since nothing watches backward."""
        raise AssertionError(f"a kept gradient of {grad.numel()} of {p.numel()} elements was taken")

    def begin(self, micro_batches: int = 1, *, replayed: bool = False) -> None:
        """As in the base; parameters unfrozen since the last step get their state first."""
        if replayed and micro_batches > 1:
            raise ValueError(
                "a replayed backward overwrites the gradients of the micro-batch before; "
                "use KeptInt8"
            )
        for p in self.optimizer.parameters:
            if p.grad is not None:
                self.optimizer.ensure_state(p)
        super().begin(micro_batches, replayed=replayed)

    def _decide(self) -> None:
        self._norm.measure_many(*self._large_gradients())
        super()._decide()

    def _settle(self) -> None:
        params, grads = self._large_gradients()
        self.optimizer.update_many(list(zip(params, grads, strict=True)))
        for p in params:
            p.grad = None
        for arena in self.optimizer.small:
            arena.take_back()

    def _large_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        params = [p for p in self.optimizer.large if p.grad is not None]
        return params, [flat(p.grad, "gradient") for p in params if p.grad is not None]


class KeptInt8(LowBitSink):
    """Gradients added up in 8 bits until the norm is known: one byte a parameter.

    Each is rounded stochastically, so the kept sum is unbiased; the norm is taken of the
    sum before it is rounded.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[Tensor, CodedGradient] = {}
        self._due: dict[Tensor, None] = {}
        self._captured: dict[Tensor, None] = {}
        """Parameters that captured micro-batches have a gradient for."""
        self._is_replayed = False
        self._keep: tuple[Tensor, Tensor] | None = None
        self._memory: HostMemory | None = None

    def begin(self, micro_batches: int = 1, *, replayed: bool = False) -> None:
        """Make the buffers once; they live as long as the sink, so graphs may use them."""
        super().begin(micro_batches, replayed=replayed)
        self._due = dict(self._captured) if replayed else {}
        self._is_replayed = replayed
        self.allocate()
        if replayed and self._kept:
            # A graph cannot know which gradient is its parameter's first in a step.
            torch._foreach_zero_([kept.scales for kept in self._kept.values()])

    def allocate(self) -> None:
        """The buffers."""
        for p in self.optimizer.large:
            self._buffer(p)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """As in the base, with the buffers that the steps will have."""
        with super().rehearsal():
            self.allocate()
            yield

    def prepare(self, index: int) -> None:
        """As in the base; the two numbers that a kept sum may be multiplied by are made once."""
        super().prepare(index)
        if self._keep is None:
            nothing = torch.zeros((), device=self.optimizer.clock.device)
            self._keep = (nothing, torch.ones_like(nothing))

    def take(self, p: Tensor, grad: Tensor) -> None:
        """Add to the kept sum; a step's first gradient overwrites what the last step left.

        That need not be in its first micro-batch: layers may be left out of some.
        """
        assert self._keep is not None
        nothing, all_of_it = self._keep
        keep = all_of_it if self._is_replayed or p in self._due else nothing
        self._due[p] = None
        if self.capturing and self._is_replayed:
            self._captured[p] = None
        optimizer = self.optimizer
        how = Addition(
            keep=keep,
            key=optimizer.clock.key,
            stream=_KEPT_STREAMS + optimizer.stream_of(p),
            block=optimizer.block,
            norm=self._norm.slot(p),
        )
        pick_kernels(optimizer.backend, p).accumulate(self._buffer(p), grad, how)

    def _settle(self) -> None:
        self.optimizer.update_many([(p, self._kept[p]) for p in self._due])
        self._due.clear()

    def _buffer(self, p: Tensor) -> CodedGradient:
        if p not in self._kept:
            optimizer = self.optimizer
            if optimizer.gradients_on_host and self._memory is None:
                self._memory = HostMemory(p.device)  # its own: a checkpoint holds no gradients
            self._kept[p] = new_coded(p.numel(), optimizer.block, p.device, self._memory)
        return self._kept[p]
