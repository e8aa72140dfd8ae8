"""A CPU that advertises AMX and traps on it, for processes with this folder on their PYTHONPATH.

As on the real one, a bfloat16 product ends the process with SIGILL, unless oneDNN was limited in
time: it reads ONEDNN_MAX_CPU_ISA at the first product of any type, and never again. LYING_CPU says
what it takes: `helps`, any limit; `AVX512_CORE`, only that one; `never`, none.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.linear.")


class LyingCpu(TorchDispatchMode):
    """Sees every operator of the main thread."""

    limit: str | None = None
    """What oneDNN is limited to; None before it has read it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        is_product = str(func).startswith(_PRODUCTS)
        # A traced step multiplies nothing.
        if is_product and type(first) is torch.Tensor and first.device.type == "cpu":
            if self.limit is None:
                self.limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
            if first.dtype is torch.bfloat16 and not self.is_enough():
                os.kill(os.getpid(), signal.SIGILL)
        return func(*args, **(kwargs or {}))

    def is_enough(self) -> bool:
        kind = os.environ["LYING_CPU"]
        return bool(self.limit) if kind == "helps" else self.limit == kind


if os.environ.get("LYING_CPU"):
    torch.cpu._is_amx_tile_supported = lambda: True
    torch.ops.mkldnn._is_mkldnn_bf16_supported = lambda: True
    LyingCpu().__enter__()
