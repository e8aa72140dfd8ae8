"""Flash attention where its package is not: what transformers does around it, on any tensor.

transformers' `flash_attention_2` takes the padding out before the kernel and puts it back
after; the kernel keeps query, key, value, output and log-sum-exp. PyTorch has an operator
of the same kernel, whose shapes are known without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.errors import ModelError
from memfit.messages import t

# Without "flash" in it: transformers would look for the package by that.
FLASH_NAME = "memfit_unpadded"
_aten = torch.ops.aten


def is_flash(implementation: str | None) -> bool:
    """Whether a flash attention package is asked for."""
    return implementation is not None and implementation.startswith("flash_attention")


@contextmanager
def flash_attention() -> Iterator[None]:
    """Make the attention known to transformers under `FLASH_NAME`, for the time of a trace."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    registries: list[Any] = [AttentionInterface, AttentionMaskInterface]
    for registry, function in zip(registries, (_forward, flash_attention_mask), strict=True):
        registry.register(FLASH_NAME, function)
    try:
        yield
    finally:
        for registry in registries:
            registry._global_mapping.pop(FLASH_NAME, None)


def check_flash(model: Any, dtype: str, *, autocast: bool) -> None:
    """What transformers checks before it uses the package."""
    if not getattr(model, "_supports_flash_attn", False):
        raise ModelError(
            t("{model} does not support flash attention; try sdpa", model=type(model).__name__)
        )
    if dtype == "float32" and not autocast:
        raise ModelError(t("flash attention computes in half precision only; add bf16 or fp16"))


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    parts = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    if query.dtype is torch.float32:
        parts = [tensor.to(torch.get_autocast_dtype("cpu")) for tensor in parts]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is None:
        return _kernel(parts, None, query.shape[2], dropout, causal, scaling), None
    rows, length = attention_mask.shape
    places = attention_mask.flatten().nonzero().flatten()
    ends = attention_mask.sum(-1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    offsets = torch.nn.functional.pad(ends, (1, 0))
    packed = [tensor.reshape(rows * length, *tensor.shape[2:])[places] for tensor in parts]
    out = _kernel(packed, offsets, length, dropout, causal, scaling)
    padded = out.new_zeros((rows * length, *out.shape[1:])).index_copy(0, places, out)
    return padded.view(rows, length, *out.shape[1:]), None


def _kernel(
    parts: list[torch.Tensor],
    offsets: torch.Tensor | None,
    length: int,
    dropout: float,
    causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    out: torch.Tensor = _aten._flash_attention_forward(
        *parts, offsets, offsets, length, length, dropout, causal, False, scale=scaling
    )[0]
    return out
