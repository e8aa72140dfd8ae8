"""What `fully_shard` takes of one rank's memory, for traces: the other ranks are not there.

As torch's FSDP2 does it (torch/distributed/fsdp/_fully_shard), for each part of the model:

    forward    one flat buffer receives the parts of all ranks, the weights are copied out of it;
               the buffer stays until the next part's weights are there
    backward   the same, with the buffer of the next part on its way already; gradients are copied
               into another flat buffer, which stays until the next part has its own
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memfit._compat import call_after_backward
from memfit.engine.exchange import Peers
from memfit.memory.tracing import traced_device
from memfit.memory.tracing.tracker import tensors_in
from memfit.models.layer_stack import Args, Kwargs, wrap


class TracedShards:
    """A model of whose weights this rank has a part, and what is gathered meanwhile."""

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[nn.Module],
        ranks: Peers,
        *,
        unread: nn.Module | None,
    ) -> None:
        self.whole = [(p.numel(), p.requires_grad) for p in model.parameters()]
        """Elements of every parameter, and whether it learns."""
        self.gathered: Tensor | None = None
        """The last buffer that weights were copied out of."""
        self.reduced: Tensor | None = None
        """The last buffer that gradients were copied into."""
        self._forwards: list[_Part] = []
        self._ends = False
        seen: set[Tensor] = set()
        self._parts = [
            _Part(self, part, ranks.world_size, seen, read_in_backward=part is not unread)
            for part in (*parts, model)
        ]
        for part in self._parts:
            wrap(part.module, partial(self._around, part), "forward")

    def _around(
        self, part: _Part, call: Callable[..., Any], _: nn.Module, args: Args, kwargs: Kwargs
    ) -> Any:
        if part.in_backward:  # its layers are computed again
            return call(*args, **kwargs)
        part.fetch()
        self.gathered = None
        self.gathered = part.arrive()
        if torch.is_grad_enabled():
            args = tuple(part.noted(value) for value in args)
            kwargs = {name: part.noted(value) for name, value in kwargs.items()}
        output = call(*args, **kwargs)
        part.leave()
        if torch.is_grad_enabled():
            self._forwards.append(part)
            begin = partial(self._before_backward, part, len(self._forwards) - 1)
            for one in _tensors_of(output):
                if one.requires_grad:
                    one.register_hook(begin)  # type: ignore[no-untyped-call]
        if part is self._parts[-1]:
            self.gathered = None
        return output

    def _before_backward(self, part: _Part, place: int, gradient: Tensor) -> None:
        del gradient
        if part.in_backward:
            return
        part.in_backward, part.is_done = True, False
        if not self._ends:
            self._ends = True
            call_after_backward(self._after_all)
        if part.read_in_backward:
            part.fetch()
            part.arrive()
        if place and self._forwards[place - 1].read_in_backward:
            self._forwards[place - 1].fetch()

    def _after_all(self) -> None:
        """Parts whose inputs have no gradient, as embeddings, end with the whole backward."""
        for part in reversed(self._parts):
            if not part.is_done:
                part.reduce()
            part.is_done = False
        self.reduced = None
        self._forwards.clear()
        self._ends = False


class _Part:
    """Weights that are gathered together: those of a module that no part before it has."""

    def __init__(
        self,
        shards: TracedShards,
        module: nn.Module,
        ranks: int,
        seen: set[Tensor],
        *,
        read_in_backward: bool,
    ) -> None:
        self.module = module
        self.read_in_backward = read_in_backward
        self.in_backward = self.is_done = False
        self._shards = shards
        self._flat: Tensor | None = None
        self._weights: list[_Weight] = []
        found: dict[Tensor, _Weight] = {}
        for owner in module.modules():
            for name, p in owner._parameters.items():
                if p is None or p in seen:
                    continue
                if p not in found:
                    found[p] = _Weight(p, ranks)
                    self._weights.append(found[p])
                found[p].places.append((owner, name))
        seen.update(one.part for one in self._weights)
        self.leave()

    def fetch(self) -> None:
        """Begin to gather, unless the weights are here or on their way."""
        if self._flat is None and not self._are_here:
            self._flat = torch.empty(sum(one.padded for one in self._weights))
            traced_device.resized(self._flat)

    def arrive(self) -> Tensor | None:
        """The weights are copied out of the buffer, which is returned."""
        if self._flat is None:
            return None
        for one in self._weights:
            one.fill()
        flat, self._flat = self._flat, None
        return flat

    @property
    def _are_here(self) -> bool:
        return any(one.is_here for one in self._weights)

    def noted(self, value: Any) -> Any:
        """The same input; when its gradient is there, this part's backward is done."""
        learns = isinstance(value, Tensor) and value.requires_grad
        return _AfterBackward.apply(self, value) if learns else value  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """The weights are this rank's parts again."""
        for one in self._weights:
            one.empty()

    def reduce(self) -> None:
        """Gradients become this rank's parts of their sums."""
        self.in_backward, self.is_done = False, True
        learned = [one for one in self._weights if one.gradient is not None]
        gradients = [one.gradient for one in learned]
        for one in learned:
            one.whole.grad = None
        self.leave()
        self._flat = self._shards.reduced = None
        if not learned:
            return
        self._shards.reduced = torch.empty(sum(one.padded for one in learned))
        gradients.clear()
        device = traced_device.device()
        copied = None if device is None or device.cuda else self._shards.reduced.clone()  # by gloo
        sizes = [one.part.numel() for one in learned]
        for one, part in zip(learned, torch.split(torch.empty(sum(sizes)), sizes), strict=True):
            one.take(part)
        del copied


class _Weight:
    """One parameter: the part of it that this rank keeps, and the whole."""

    def __init__(self, p: nn.Parameter, ranks: int) -> None:
        self.places: list[tuple[nn.Module, str]] = []
        self.shape = p.shape
        rows, *rest = p.shape or (1,)
        self.part = nn.Parameter(p.new_empty(math.ceil(rows / ranks), *rest), p.requires_grad)
        self.padded = ranks * self.part.numel()
        self._made: nn.Parameter | None = None
        self.is_here = False

    @property
    def whole(self) -> nn.Parameter:
        assert self._made is not None
        return self._made

    @property
    def gradient(self) -> Tensor | None:
        return None if self._made is None else self._made.grad

    def fill(self) -> None:
        if self._made is None:
            flat = torch.empty(self.padded)
            self._flat = flat
            self._made = nn.Parameter(
                flat[: self.shape.numel()].view(self.shape), self.part.requires_grad
            )
        else:
            self._flat.untyped_storage().resize_(self._flat.nbytes)
        traced_device.resized(self._flat)
        self._show(self._made)
        self.is_here = True

    def empty(self) -> None:
        self._show(self.part)
        if self.is_here:
            self._flat.untyped_storage().resize_(0)
            traced_device.resized(self._flat)
        self.is_here = False

    def take(self, gradient: Tensor) -> None:
        gradient = gradient.view(self.part.shape)
        if self.part.grad is None:
            self.part.grad = gradient
        else:
            self.part.grad += gradient

    def _show(self, parameter: nn.Parameter) -> None:
        for module, name in self.places:
            module._parameters[name] = parameter


class _AfterBackward(torch.autograd.Function):
    """An input of a part: its gradient is there when the part's backward is done."""

    @staticmethod
    def forward(ctx: Any, part: _Part, x: Tensor) -> Tensor:
        ctx.part = part
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        if not ctx.part.is_done:
            ctx.part.reduce()
        return None, gradient


def _tensors_of(output: Any) -> Iterable[Tensor]:
    return tensors_in(tuple(output.values()) if isinstance(output, dict) else output)
