"""The optimizers the stock Trainer offers, on tensors of any kind.

Where the real one runs on fake tensors it is used. Those of bitsandbytes, torchao and
flashoptim need their CUDA kernels to step; for them the state they keep is laid out here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memfit.memory.spec import StepSpec

# transformers.Trainer.get_decay_parameter_names: biases and norms do not decay. Each of the
# two groups is stepped by itself, so the foreach temporaries of one are gone before the other.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)


def make_optimizer(spec: StepSpec, model: torch.nn.Module, *, cuda: bool) -> torch.optim.Optimizer:
    """The optimizer the Trainer would make for these arguments."""
    groups = parameter_groups(model)
    if spec.optim == "adafactor":
        from transformers.optimization import Adafactor

        make: Callable[..., torch.optim.Optimizer] = Adafactor
        return make(groups, lr=5e-5, scale_parameter=False, relative_step=False)
    if spec.optim == "sgd":
        return torch.optim.SGD(groups, lr=5e-5, foreach=cuda)
    if spec.optim in _LAYOUTS:
        return StateOnly(groups, _LAYOUTS[spec.optim], embeddings=_embeddings(model))
    fused = spec.optim == "adamw_torch_fused"
    return torch.optim.AdamW(groups, lr=5e-5, fused=fused, foreach=cuda and not fused)


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """What learns, in the Trainer's two groups: with and without weight decay."""
    norms = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, torch.nn.LayerNorm)
        for name, _ in module.named_parameters()
    }
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            chosen = plain if name in norms or _NO_DECAY.search(name) else decayed
            chosen.append(parameter)
    return [{"params": decayed, "weight_decay": 0.0}, {"params": plain, "weight_decay": 0.0}]


def state_tensors(optimizer: torch.optim.Optimizer, *, host: bool) -> Iterator[torch.Tensor]:
    """The optimizer's state; with `host`, the step counters that lie on the CPU instead."""
    on_device = any(group.get("fused") for group in optimizer.param_groups)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and host == (key == "step" and not on_device):
                yield value


Layout = Callable[[torch.Tensor, bool], list[torch.Tensor]]


class StateOnly(torch.optim.Optimizer):
    """Keeps the state of an optimizer whose kernels need a GPU; its step updates nothing."""

    def __init__(
        self, params: Any, layout: tuple[Layout, int], *, embeddings: set[torch.Tensor]
    ) -> None:
        self._layout, self._temporaries = layout
        self._embeddings = embeddings
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the state where it is missing, and take the kernel's temporaries once."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    parts = self._layout(parameter, parameter in self._embeddings)
                    self.state[parameter] = dict(enumerate(parts))
                if self._temporaries:
                    size = (self._temporaries, *parameter.shape)
                    torch.empty(size, dtype=torch.float32, device=parameter.device)


def _blockwise(parameter: torch.Tensor, *, scale_bytes: int, block: int) -> list[torch.Tensor]:
    count, device = parameter.numel(), parameter.device
    scale = torch.float32 if scale_bytes == 4 else torch.float16
    parts = []
    for _ in range(2):
        parts.append(torch.empty(count, dtype=torch.uint8, device=device))
        parts.append(torch.empty(-(-count // block), dtype=scale, device=device))
    return parts


def _full(parameter: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(parameter), torch.empty_like(parameter)]


def _torchao(parameter: torch.Tensor, _embedding: bool) -> list[torch.Tensor]:
    """`torchao.optim.AdamW8bit`: codes, a scale for every 256, a table of 256 values."""
    if parameter.numel() < 4096 or parameter.numel() % 256:
        return _full(parameter)
    tables = [torch.empty(256, dtype=torch.float32, device=parameter.device) for _ in range(2)]
    return _blockwise(parameter, scale_bytes=4, block=256) + tables


def _bitsandbytes(parameter: torch.Tensor, embedding: bool) -> list[torch.Tensor]:
    """`bitsandbytes` AdamW: the Trainer keeps the state of embeddings in 32 bits."""
    if parameter.numel() < 4096 or embedding:
        return [torch.empty_like(parameter, dtype=torch.float32) for _ in range(2)]
    tables = [torch.empty(256, dtype=torch.float32, device=parameter.device) for _ in range(2)]
    return _blockwise(parameter, scale_bytes=4, block=256) + tables


def _flash(parameter: torch.Tensor, _embedding: bool) -> list[torch.Tensor]:
    """`flashoptim.FlashAdamW`: 8-bit moments, an fp16 scale for every 32, 8 more weight bits."""
    parts = _blockwise(parameter, scale_bytes=2, block=32)
    if parameter.dtype is not torch.float32:
        parts.append(torch.empty_like(parameter, dtype=torch.int8))
    return parts


def _embeddings(model: torch.nn.Module) -> set[torch.Tensor]:
    return {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}


# The state's layout, and how many fp32 copies of a parameter the step makes while it runs.
_LAYOUTS: dict[str, tuple[Layout, int]] = {
    "adamw_torch_8bit": (_torchao, 2),
    "adamw_bnb_8bit": (_bitsandbytes, 0),
    "flash_adamw": (_flash, 0),
}
