"""The budget on a CPU: bytes of live tensors, counted while a step runs.

A dispatch mode sees every operator's result and every storage's death. It costs some 5
microseconds an operator (benchmarks say 1 to 3 % of a step of a small encoder), so guard.py counts
only steps that may need more than any counted before, and a few others.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.memory.trace import tensors_in
from memfit.runtime.out_of_memory import BudgetExceeded
from memfit.units import format_both

_DEVICE = torch.ops.prim.device.default


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors from birth to death; one that goes beyond the limit is not handed out."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are there now."""
        for tensor in tensors:
            self._born(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not _DEVICE:
            self.adopt(tensors_in(out))
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            size_bytes = self.live_bytes
            del out
            raise BudgetExceeded(
                f"out of memory: {format_both(size_bytes)} of tensors, and the budget is "
                f"{format_both(self.limit_bytes)}"
            )
        return out

    def _born(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        nbytes = storage.nbytes()
        if nbytes:
            self._live[key] = (nbytes, weakref.ref(storage, lambda _: self._died(key)))
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _died(self, key: int) -> None:
        nbytes, _ = self._live.pop(key)
        self.live_bytes -= nbytes
