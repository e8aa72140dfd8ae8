"""Which kernel CUDA runs an attention on, and what that kernel keeps and takes.

`scaled_dot_product_attention` chooses among four kernels by type, mask, dropout and
compute capability (`sdp_utils.cpp` in PyTorch). Each is an operator of its own whose
shapes are known without a GPU, so the trace calls the one a GPU would have chosen.

transformers' `flash_attention_2` takes the padding out before the kernel and puts it back
after; the kernel keeps query, key, value, output and log-sum-exp. PyTorch has an operator
of the same kernel, whose shapes are known without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.errors import ModelError

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def attend(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What `scaled_dot_product_attention` does with CUDA tensors."""
    kernel = choose_kernel(capability, query, key, value, attn_mask, dropout_p)
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        # It becomes one of zeros and minus infinities, in every layer anew.
        hidden = mask.logical_not()
        mask = torch.empty(hidden.shape, dtype=query.dtype, device=mask.device)
    keeps = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    out: torch.Tensor
    if kernel == "cudnn":
        out = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, keeps, dropout_p, is_causal, False, scale=scale
        )[0]
    elif kernel == "flash":
        width = query.shape[-1]
        scale = 1 / math.sqrt(width) if scale is None else scale
        padded = [
            torch.nn.functional.pad(t, (0, -t.shape[-1] % 8)) if t.shape[-1] % 8 else t
            for t in (query, key, value)
        ]
        out = _aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale
        )[0]
        out = out if out.shape[-1] == width else out[..., :width]
    elif kernel == "efficient":
        if mask is not None:
            # The kernel reads eight elements at once: rows are padded to a multiple of eight.
            if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
                width = mask.shape[-1]
                mask = torch.nn.functional.pad(mask, (0, 8 - width % 8))[..., :width]
            mask = mask.expand(*query.shape[:3], key.shape[2])
        out = _aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, keeps, dropout_p, is_causal, scale=scale
        )[0]
    else:
        out = _aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    return out


def choose_kernel(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
) -> str:
    """`cudnn`, `flash`, `efficient` or `math`, by PyTorch's own order and conditions."""
    if query.dim() != 4:
        return "math"
    half = query.dtype in _HALF
    low_precision = query.dtype is torch.float16 or (half and capability >= (8, 0))
    width, value_width = query.shape[-1], value.shape[-1]
    same_width = width == key.shape[-1] == value_width
    grouped = query.shape[1] != key.shape[1]

    # cuDNN is preferred on Hopper and data-centre Blackwell; its dropout knows sixteenths.
    if (
        capability[0] in (9, 10)
        and low_precision
        and max(width, value_width) <= 128
        and width % 8 == 0
        and value_width % 8 == 0
        and float(dropout_p * 16).is_integer()
        and key.shape[2] > 1
        and not (mask is not None and mask.requires_grad)
    ):
        return "cudnn"
    if capability >= (8, 0) and low_precision and same_width and width <= 256 and mask is None:
        return "flash"
    alignment = 8 if half and capability >= (7, 0) else 4 if capability >= (8, 0) else 1
    if (
        (low_precision or query.dtype is torch.float32)
        and width == key.shape[-1]
        and width % alignment == 0
        and value_width % alignment == 0
        and not grouped
    ):
        return "efficient"
    return "math"


ATTENTION_BACKWARD = frozenset(
    (
        _aten._scaled_dot_product_efficient_attention_backward.default,
        _aten._efficient_attention_backward.default,
        _aten._scaled_dot_product_flash_attention_backward.default,
        _aten._flash_attention_backward.default,
        _aten._scaled_dot_product_cudnn_attention_backward.default,
    )
)


def attention_temporaries(func: Any, args: tuple[Any, ...]) -> Iterator[int]:
    """Bytes the backward kernels take beside their results."""
    if func is _aten._scaled_dot_product_efficient_attention_backward.default:
        batch, heads, length, width = args[1].shape
        yield from _efficient_buffers(args[1], batch, heads, length, width)
    elif func is _aten._efficient_attention_backward.default:
        # Packed: all texts in one row, in tiles as if each were as long as the longest.
        *_, heads, width = args[1].shape
        yield from _efficient_buffers(args[1], args[6].numel() - 1, heads, int(args[8]), width)
    elif func is _aten._scaled_dot_product_flash_attention_backward.default:
        batch, heads, length, width = args[1].shape
        yield _flash_buffers(
            batch * -(-length // 128) * 128, heads, width, args[2], args[2].shape[1]
        )
    elif func is _aten._flash_attention_backward.default:
        *rows, heads, width = args[1].shape
        tokens = math.prod(rows) if len(rows) == 2 else rows[0] + 128 * args[6].numel()
        yield _flash_buffers(tokens, heads, width, args[2], args[2].shape[-2])
    elif func is _aten._scaled_dot_product_cudnn_attention_backward.default:
        batch, heads, length, width = args[1].shape
        yield batch * heads * length * (width + 1) * 4


def _efficient_buffers(
    query: torch.Tensor, texts: int, heads: int, longest: int, width: int
) -> Iterator[int]:
    if query.dtype not in _HALF:
        # grad * out is made in full, then summed over the head.
        yield query.numel() * 4
    # The query gradient is summed up in fp32, in tiles of 64 by 64.
    tiles = -(-longest // 64) * -(-width // 64)
    yield texts * heads * (tiles * (64 * 64 * 4 + 16) + longest * 4)


def _flash_buffers(tokens: int, heads: int, width: int, key: torch.Tensor, key_heads: int) -> int:
    """The query gradient in fp32; key and value gradients of grouped heads, before their sum."""
    wide = -(-width // 32) * 32
    expanded = 2 * key.numel() // key_heads * heads * key.element_size()
    return tokens * heads * (wide + 1) * 4 + (expanded if key_heads != heads else 0)


# Without "flash" in it: transformers would look for the package by that.
FLASH_NAME = "memfit_unpadded"


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
            "{model} does not support flash attention; try sdpa", model=type(model).__name__
        )
    if dtype == "float32" and not autocast:
        raise ModelError("flash attention computes in half precision only; add bf16 or fp16")


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
