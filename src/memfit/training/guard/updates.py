"""Makes the optimizer's state before the first step, and finishes every update once it has begun.

State. torch's own optimizers make it in `_init_group` when they first see a gradient; here they see
one that takes no memory, so it is the same state, made by the same code, only earlier.

Update. An operator that finds no memory has written nothing, so it is run again after memory was
given back (out_of_memory.retrying), and no update stays half done. An update needs as much memory
as the gradients it gets at once; if that is not free, it gets fewer at a time. Each parameter is
updated by itself, so the numbers are the same. That holds for torch's own optimizers. Others may
count steps or have hooks on them, so they get all gradients at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.optimization import Adafactor

from memfit.memory.out_of_memory import retrying
from memfit.strategies.fully_sharded import is_divided

_MARK = "_memfit_careful"

_TEMPORARIES = 2
"""An update makes at most so many tensors as large as the gradients (torch's own: one)."""


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer itself; accelerate wraps it for the training."""
    return getattr(optimizer, "optimizer", optimizer)


def steps_in_backward(model: nn.Module, optimizer: Any) -> bool:
    """Whether hooks on gradients update weights that the optimizer itself does not hold.

    So work transformers' layerwise optimizers, whose own step does nothing.
    """
    groups = getattr(unwrapped(optimizer), "param_groups", [])
    held = {id(p) for group in groups for p in group["params"]}
    learning = (p for p in model.parameters() if p.requires_grad and id(p) not in held)
    return any(p._post_accumulate_grad_hooks or p._backward_hooks for p in learning)


def allocate_state(optimizer: Optimizer) -> bool:
    """Makes the state that the first step would make. Returns whether this optimizer can."""
    own = getattr(optimizer, "init_state", None)
    if callable(own) and not inspect.signature(own).parameters:
        own()
        if (sink := getattr(optimizer, "sink", None)) is not None:
            sink.allocate()
        return True
    initialise = getattr(optimizer, "_init_group", None)
    if initialise is None or type(optimizer).__module__.split(".")[0] != "torch":
        return False
    lists = len(inspect.signature(initialise).parameters) - 1
    for group in optimizer.param_groups:
        given = [p for p in group["params"] if p.requires_grad and p.grad is None]
        with _gradients([(p, _nothing_like(p)) for p in given]):
            initialise(group, *([] for _ in range(lists)))
    return True


def _nothing_like(p: Any) -> Tensor:
    """Returns a zero gradient whose elements are all the same number in memory."""
    zero = torch.zeros((), dtype=p.dtype, device=p.device)
    return torch.zeros_like(p) if is_divided(p) else zero.expand(p.shape)


@contextlib.contextmanager
def _gradients(given: Sequence[tuple[Tensor, Tensor | None]]) -> Iterator[None]:
    """Inside, these parameters have these gradients; an optimizer skips those without any."""
    before = [(p, p.grad) for p, _ in given]
    for p, gradient in given:
        p.grad = gradient
    try:
        yield
    finally:
        for p, gradient in before:
            p.grad = gradient


def careful(
    optimizer: Optimizer,
    device: torch.device,
    room_bytes: Callable[[], int | None],
    last_resort: Callable[[], None] | None = None,
) -> None:
    """Makes the optimizer finish every step that it begins; `room_bytes` is the memory for it.

    `last_resort` frees memory that is only held to save time (out_of_memory.retrying).
    """
    optimizer = unwrapped(optimizer)  # a trainer that trains once more has the wrapped one
    if hasattr(optimizer, _MARK):
        return
    # A bound method, as the learning rate's schedule wants to find it.
    plain = optimizer.step

    @functools.wraps(plain)
    def step(self: Optimizer, closure: Any = None, **named: Any) -> Any:
        with retrying(device, last_resort=last_resort):
            # A closure wants all gradients at once. A fused kernel needs nothing for itself.
            whole = closure is not None or self.defaults.get("fused")
            parts = [] if whole else _parts(self, room_bytes())
            if len(parts) <= 1:
                return plain(closure, **named) if closure is not None else plain(**named)
            for shown in parts:
                with _gradients([(p, None) for part in parts if part is not shown for p in part]):
                    plain(**named)
            return None

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    setattr(optimizer, _MARK, True)


def _parts(optimizer: Optimizer, room_bytes: int | None) -> list[list[Tensor]]:
    """Returns groups of parameters to update together, each small enough for the free memory.

    None, if several calls of the optimizer's step might not make the same update as one call.
    """
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim.") or kind is Adafactor
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if room_bytes is None or hooked or not known:
        return []
    parts: list[list[Tensor]] = [[]]
    size_bytes = 0
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is None:
            continue
        needs_bytes = _TEMPORARIES * p.numel() * max(p.element_size(), 4)
        if parts[-1] and size_bytes + needs_bytes > room_bytes:
            parts.append([])
            size_bytes = 0
        parts[-1].append(p)
        size_bytes += needs_bytes
    return parts
