"""A backward pass that moves weights, taken up again where it failed.

Where gradients are released, the upper layers' weights have moved before backward reaches the
lower ones: a step that then runs out of memory can neither be run again nor taken back. But it
can be finished, for what is left of it needs only the layers that have not moved:

    the gradient of layer i's input is kept until that of layer i - 1's is there
    updates wait until backward has passed the layer they belong to
    failed: forward again through the layers below i, with the same dropout, and backward from i

That costs one layer's gradients and one hidden state, and no time.

What several layers share is complete only when backward has passed all of them:

    tensors handed to every layer (DeBERTa's and MPNet's positions), tables that the head uses too
        each layer reads an alias, so that its part is seen; the sum so far is kept beside the
        hidden state's gradient, and backward goes on with both
    layers that are all one (ALBERT)
        no weight moves before backward has passed the lowest: until then the step is run again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.engine.step_state import Buffers, RandomState
from memfit.errors import RunStoppedError
from memfit.i18n import t
from memfit.memory.out_of_memory import is_out_of_memory, let_go, retrying
from memfit.models.layer_stack import Args, Kwargs, keeps_activations, stack_of, wrap

if TYPE_CHECKING:
    from memfit.engine.executors import LayerwiseSink

TRIES = 4
"""How often backward is taken up from one boundary before the run is given up."""


class HalfDoneError(RunStoppedError):
    """A step failed after some weights had moved, and could not be finished."""


class _Reached(Exception):  # noqa: N818 - not an error: how a forward pass ends early
    def __init__(self, hidden: Tensor, others: dict[_Name, Tensor]) -> None:
        super().__init__()
        self.hidden = hidden
        self.others = others


_Name = int | str
"""An argument of a layer: its position, or its keyword."""


@dataclass(frozen=True, slots=True)
class _Boundary:
    """How far backward has come: all that the layers below this call still wait for."""

    index: int
    gradient: Tensor
    others: dict[_Name, Tensor]
    """What the layers from here on contribute to the other tensors they are handed."""
    tied: dict[Tensor, Tensor]
    """What was contributed so far to parameters of several modules."""


def _others(args: Args, kwargs: Kwargs) -> dict[_Name, Tensor]:
    """The tensors a layer is handed beside its hidden states, through which gradients flow."""
    named: list[tuple[_Name, Any]] = [*enumerate(args), *kwargs.items()]
    skipped: _Name = 0 if args else "hidden_states"
    return {
        name: value
        for name, value in named
        if name != skipped and isinstance(value, Tensor) and value.requires_grad
    }


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


class LayerBoundaries:
    """Notes where backward has come to; runs what is left of it if it fails there."""

    def __init__(
        self,
        model: nn.Module,
        sink: LayerwiseSink,
        device: torch.device,
        make_room: Callable[[int], None],
    ) -> None:
        self._sink = sink
        self._device = device
        self._make_room = make_room
        self._calls = 0
        self._stop_at: int | None = None
        self._boundary: _Boundary | None = None
        self._numbers: Any = WeakTensorKeyDictionary()
        self._fresh_number = count()
        self._sums: dict[int, Tensor] = {}
        self._tied_sums: dict[Tensor, Tensor] = {}
        self._buffers = Buffers()
        self._model = model
        self.resumed = 0
        """How often a backward pass was taken up again."""
        stack = stack_of(model)
        self._is_one_layer = stack.depth > len(stack.layers)
        self._undo = [stack.base.register_forward_pre_hook(self._restart).remove]
        self._undo += [wrap(layer, self._around) for layer in stack.layers]
        for module, names in _tied_parameters(model):
            self._undo.append(wrap(module, partial(self._around_tied, names)))
        sink.by_layers = True

    def remove(self) -> None:
        """Give the model back as it was."""
        self._sink.by_layers = False
        while self._undo:
            self._undo.pop()()

    def run(
        self,
        forward: Callable[[], Tensor],
        backward: Callable[[Tensor], None],
        contexts: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        """Forward and backward of one micro-batch; its loss, detached."""
        start = after = RandomState.now(self._device)
        buffers = buffers_after = self._buffers.now(self._model)
        self._forget()
        loss: Tensor | None = None
        failed = ""

        def begin() -> None:
            # In a frame of its own, which `let_go` clears: here it would keep all activations.
            nonlocal loss, after, buffers_after
            whole = forward()
            loss, after = whole.detach(), RandomState.now(self._device)
            self._buffers.learn(buffers)
            buffers_after = self._buffers.now(self._model)
            backward(whole)

        for tries in range(TRIES + 1):
            try:
                with contexts():
                    if self._boundary is None:
                        begin()
                    else:
                        self._go_on(forward)
            except Exception as error:
                # Nothing has moved yet: the step as a whole is run again, in smaller pieces.
                if not (self._sink.touched and is_out_of_memory(error)):
                    raise
                failed = let_go(error)
            else:
                self._forget()
                if tries:
                    after.restore(self._device)
                    buffers_after.restore()
                assert loss is not None
                return loss
            self.resumed += 1
            self._sink.drop_unsettled()
            self._make_room(tries)
            start.restore(self._device)
            buffers.restore()
        raise HalfDoneError(
            t(
                "out of memory in the middle of an update that had begun ({failed}): the weights "
                "here are half those of the next step and were not saved; go on with a larger "
                "--budget",
                failed=failed,
            )
        )

    def _forget(self) -> None:
        self._boundary = None
        self._sums, self._tied_sums = {}, {}

    def _go_on(self, forward: Callable[[], Tensor]) -> None:
        """Runs the layers below the boundary again, and backward from the boundary."""
        boundary = self._boundary
        assert boundary is not None
        reached = self._forward_to(boundary.index, forward)
        roots, gradients = [reached.hidden], [boundary.gradient]
        # Named first, so that the parts of lower layers are added to them, in the same order.
        for name, gradient in boundary.others.items():
            shared = reached.others[name]
            if not self._sink.has_settled(shared):
                roots.append(shared)
                gradients.append(gradient)
        for p, gradient in boundary.tied.items():
            if not self._sink.has_settled(p):
                roots.append(p)
                gradients.append(gradient)
        self._sums = {
            self._number_of(reached.others[name]): gradient
            for name, gradient in boundary.others.items()
        }
        self._tied_sums = dict(boundary.tied)
        torch.autograd.backward(roots, gradients)

    def _forward_to(self, boundary: int, forward: Callable[[], Tensor]) -> _Reached:
        self._stop_at = boundary
        try:
            forward()
        except _Reached as reached:
            return reached
        finally:
            self._stop_at = None
        raise AssertionError(f"the forward pass did not come to layer {boundary}")

    # ---- what the layers' calls do ----

    def _restart(self, *_: Any) -> None:
        self._calls = 0

    def _around(
        self, call: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs
    ) -> Any:
        if _in_backward():  # a layer that is recomputed is not a layer that follows
            return call(*args, **kwargs)
        index, self._calls = self._calls, self._calls + 1
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, Tensor) and keeps_activations(module, args, kwargs):
            others = _others(args, kwargs)
            if index == self._stop_at:
                raise _Reached(hidden, others)
            if hidden.requires_grad and not self._sink.capturing and self._is_boundary(index):
                numbers = {name: self._number_of(tensor) for name, tensor in others.items()}
                hidden.register_hook(partial(self._passed, index, numbers))  # type: ignore[no-untyped-call]
                args, kwargs = self._with_aliases(args, kwargs, others)
        return call(*args, **kwargs)

    def _is_boundary(self, index: int) -> bool:
        return index == 0 or not self._is_one_layer

    def _with_aliases(
        self, args: Args, kwargs: Kwargs, others: dict[_Name, Tensor]
    ) -> tuple[Args, Kwargs]:
        """The layer's arguments, with an alias where its part of a gradient must be seen."""
        aliases: dict[_Name, Any] = {}
        for name, tensor in others.items():
            number, shared = self._number_of(tensor), cast(Any, tensor)
            aliases[name] = tensor.view_as(tensor)
            aliases[name].register_hook(partial(self._contributed, number))
            if not tensor.is_leaf:
                shared.register_hook(partial(self._completed, number))
        args = [aliases.get(position, value) for position, value in enumerate(args)]
        return args, {name: aliases.get(name, value) for name, value in kwargs.items()}

    def _number_of(self, tensor: Tensor) -> int:
        """The number of a tensor that layers share; a hook that held the tensor would never go."""
        if tensor not in self._numbers:
            self._numbers[tensor] = next(self._fresh_number)
        return int(self._numbers[tensor])

    def _around_tied(
        self,
        names: tuple[str, ...],
        call: Callable[..., Any],
        module: nn.Module,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        if _in_backward() or self._sink.capturing or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        with _aliased(module, names, self._contributed_to_tied):
            return call(*args, **kwargs)

    # ---- what backward's passing does ----

    def _contributed(self, number: int, gradient: Tensor) -> None:
        """A layer's part of a shared tensor's gradient; never in place, for a boundary holds it."""
        before = self._sums.get(number)
        self._sums[number] = gradient.detach() if before is None else before + gradient

    def _completed(self, number: int, _: Tensor) -> None:
        """Backward goes on below a shared tensor: nothing of it is left to take up."""
        self._sums.pop(number, None)

    def _contributed_to_tied(self, p: Tensor, gradient: Tensor) -> None:
        before = self._tied_sums.get(p)
        self._tied_sums[p] = gradient.detach() if before is None else before + gradient

    def _passed(self, index: int, numbers: dict[_Name, int], gradient: Tensor) -> None:
        """Called when all layers from this one on have their gradients."""
        with retrying(self._device):
            self._sink.pass_boundary()
        others = {name: self._sums[n] for name, n in numbers.items() if n in self._sums}
        self._boundary = _Boundary(index, gradient.detach(), others, dict(self._tied_sums))


def _tied_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Modules with parameters that another module has as well, and what these are called."""
    owners = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    for module in model.modules():
        own = module.named_parameters(recurse=False)
        names = tuple(name for name, p in own if owners[p] > 1 and p.requires_grad)
        if names:
            yield module, names


@contextmanager
def _aliased(
    module: nn.Module, names: tuple[str, ...], contributed: Callable[[Tensor, Tensor], None]
) -> Iterator[None]:
    """Inside, the module reads aliases of its parameters, whose gradients are its own part."""
    parameters: dict[str, Any] = module._parameters
    kept = {name: parameters[name] for name in names}
    for name, p in kept.items():
        parameters[name] = alias = p.view_as(p)
        alias.register_hook(partial(contributed, p))
    try:
        yield
    finally:
        parameters.update(kept)
