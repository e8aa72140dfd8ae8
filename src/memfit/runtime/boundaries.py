"""A backward pass that moves weights, taken up again where it failed.

Where gradients are released, the upper layers' weights have moved before backward reaches the
lower ones: a step that then runs out of memory can neither be run again nor taken back. But it
can be finished, for what is left of it needs only the layers that have not moved:

    the gradient of layer i's input is kept until that of layer i - 1's is there
    updates wait until backward has passed the layer they belong to
    failed: forward again through the layers below i, with the same dropout, and backward from i

That costs one layer's gradients and one hidden state, and no time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memfit.errors import RunStoppedError
from memfit.runtime.out_of_memory import is_out_of_memory, let_go, retrying
from memfit.runtime.random_state import RandomState
from memfit.strategies._layers import Args, Kwargs, keeps_activations, stack_of, wrap

if TYPE_CHECKING:
    from memfit.optim.release import GradientRelease

TRIES = 4
"""How often backward is taken up from one boundary before the run is given up."""


class HalfDoneError(RunStoppedError):
    """A step failed after some weights had moved, and could not be finished."""


class _Reached(Exception):  # noqa: N818 - not an error: how a forward pass ends early
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


class LayerBoundaries:
    """Notes where backward has come to; runs what is left of it if it fails there."""

    def __init__(
        self,
        model: nn.Module,
        sink: GradientRelease,
        device: torch.device,
        make_room: Callable[[int], None],
    ) -> None:
        self._sink = sink
        self._device = device
        self._make_room = make_room
        self._calls = 0
        self._stop_at: int | None = None
        self._from: int | None = None
        self._gradient: Tensor | None = None
        self.resumed = 0
        """How often a backward pass was taken up again."""
        stack = stack_of(model)
        self._undo = [stack.base.register_forward_pre_hook(self._restart).remove]
        self._undo += [wrap(layer, self._around) for layer in stack.layers]
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
        self._forget()
        loss: Tensor | None = None
        failed = ""

        def begin() -> None:
            # In a frame of its own, which `let_go` clears: here it would keep all activations.
            nonlocal loss, after
            whole = forward()
            loss, after = whole.detach(), RandomState.now(self._device)
            backward(whole)

        for tries in range(TRIES + 1):
            try:
                with contexts():
                    if self._from is None:
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
                assert loss is not None
                return loss
            self.resumed += 1
            self._sink.drop_unsettled()
            self._make_room(tries)
            start.restore(self._device)
        raise HalfDoneError(
            f"out of memory in the middle of an update that had begun ({failed}): the weights "
            "here are half those of the next step and were not saved; go on with a larger --budget"
        )

    def _forget(self) -> None:
        self._from = self._gradient = None

    def _go_on(self, forward: Callable[[], Tensor]) -> None:
        """The layers below the boundary once more, and backward from there."""
        boundary, gradient = self._from, self._gradient
        hidden = self._forward_to(boundary, forward)
        torch.autograd.backward([hidden], [gradient])

    def _forward_to(self, boundary: int | None, forward: Callable[[], Tensor]) -> Tensor:
        self._stop_at = boundary
        try:
            forward()
        except _Reached as reached:
            return reached.hidden
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
            if index == self._stop_at:
                raise _Reached(hidden)
            if hidden.requires_grad and not self._sink.capturing:
                hidden.register_hook(partial(self._passed, index))  # type: ignore[no-untyped-call]
        return call(*args, **kwargs)

    def _passed(self, index: int, gradient: Tensor) -> None:
        """All layers from this one on have their gradients."""
        with retrying(self._device):
            self._sink.pass_boundary()
        self._from, self._gradient = index, gradient.detach()
