"""Hooks on parameters that do not keep alive what they call.

Parameters hold their hooks where Python's garbage collector does not look. An optimizer that a
hook holds, and that holds its parameters, would never be freed, nor the model with it: the next
training in the same notebook finds the memory of the last one taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torch import Tensor
from torch.utils.hooks import RemovableHandle


def on_gradient(p: Tensor, method: Callable[[Tensor], None]) -> RemovableHandle:
    """Call a bound method when the parameter's gradient is complete, while its owner lives."""
    reference: Any = WeakMethod(method)

    def call(parameter: Tensor) -> None:
        if (alive := reference()) is not None:
            alive(parameter)

    handle: RemovableHandle = p.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
    return handle
