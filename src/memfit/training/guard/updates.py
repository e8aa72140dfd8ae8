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
from torch import Tensor
from torch.optim import Optimizer
from transformers.optimization import Adafactor

from memfit.memory.out_of_memory import retrying
from memfit.strategies.fully_sharded import is_divided, with_part
from memfit.training.parts import unwrapped

_MARK = "_memfit_careful"

_TEMPORARIES = 2
"""An update makes at most so many tensors as large as the gradients (torch's own: one)."""


def allocate_state(optimizer: Optimizer) -> bool:
    """Makes the state that the first step would make. Returns whether this optimizer can."""
    if callable(own := getattr(optimizer, "init_state", None)) and _takes_nothing(own):
        own()
        if (sink := getattr(optimizer, "sink", None)) is not None:
            sink.allocate()
        return True
    initialise = getattr(optimizer, "_init_group", None)
    if initialise is None or type(optimizer).__module__.split(".")[0] != "torch":
        return False
    lists = len(inspect.signature(initialise).parameters) - 1
    for group in optimizer.param_groups:
        with _gradients_of_nothing(group["params"]):
            initialise(group, *([] for _ in range(lists)))
    return True


def _takes_nothing(method: Callable[..., Any]) -> bool:
    return not inspect.signature(method).parameters


@contextlib.contextmanager
def _gradients_of_nothing(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Zero gradients that all share one element, for parameters that learn and have none."""
    given = [p for p in parameters if p.requires_grad and p.grad is None]
    for p in given:
        p.grad = _nothing_like(p)
    try:
        yield
    finally:
        for p in given:
            p.grad = None


def _nothing_like(p: Any) -> Tensor:
    zero = torch.zeros((), dtype=p.dtype, device=p.device)
    return with_part(p, zero.expand(p.to_local().shape)) if is_divided(p) else zero.expand(p.shape)


def careful(
    optimizer: Optimizer,
    device: torch.device,
    room_bytes: Callable[[], int | None],
    last_resort: Callable[[], None] | None = None,
) -> None:
    """Makes the optimizer finish every step that it begins; `room_bytes` is the memory for it.

    `last_resort` gives back memory that is only held to save time (out_of_memory.retrying).
    """
    optimizer = unwrapped(optimizer)  # a trainer that trains once more has the wrapped one
    if hasattr(optimizer, _MARK):
        return
    # A bound method, as the learning rate's schedule wants to find it.
    plain = optimizer.step

    @functools.wraps(plain)
    def step(self: Optimizer, closure: Any = None, **named: Any) -> Any:
        # A closure wants all gradients at once. A fused kernel needs nothing for itself.
        whole = closure is not None or self.defaults.get("fused") or not _splits(self)
        with retrying(device, last_resort=last_resort):
            parts = [] if whole else list(_parts(self, room_bytes()))
            if len(parts) <= 1:
                return plain(closure, **named) if closure is not None else plain(**named)
            for shown in parts:
                with _only(shown, parts):
                    plain(**named)
            return None

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    setattr(optimizer, _MARK, True)


def _splits(optimizer: Optimizer) -> bool:
    """Whether several calls of its step, each on some parameters, make the same update as one."""
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim.") or kind is Adafactor
    heard = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return known and not heard


def _parts(optimizer: Optimizer, room_bytes: int | None) -> Iterator[list[Tensor]]:
    """Groups of parameters to update together, each small enough for the free memory."""
    ready = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if room_bytes is None:
        yield ready
        return
    part: list[Tensor] = []
    size_bytes = 0
    for p in ready:
        needs = _TEMPORARIES * p.numel() * max(p.element_size(), 4)
        if part and size_bytes + needs > room_bytes:
            yield part
            part, size_bytes = [], 0
        part.append(p)
        size_bytes += needs
    yield part


@contextlib.contextmanager
def _only(shown: list[Tensor], parts: list[list[Tensor]]) -> Iterator[None]:
    """Hides the gradients of all other parts: an optimizer leaves parameters without one alone."""
    hidden = [(p, p.grad) for part in parts if part is not shown for p in part]
    for p, _ in hidden:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in hidden:
            p.grad = gradient
