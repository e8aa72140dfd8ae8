"""Attention over packed texts: each text attends to itself, on whatever kernel there is.

    flash        CUDA, capability >= 8.0, half precision, sliding windows too
    efficient    CUDA, any card and precision, no sliding window, no dropout
    repadded     any device, the CPU's kernel: texts are padded again for the attention alone

The two CUDA kernels are called below `scaled_dot_product_attention` and `varlen_attn`: the
first takes no packed texts, the second no dropout. Both have their gradient in torch, but the
efficient kernel's forgets its window (and its window is a causal one), hence `repadded`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memfit.memory import device
from memfit.memory.tracing import traced_device


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the texts lie in [T, heads, width], and what their attention does to the scores."""

    cu_seqlens: Tensor
    """Where each begins, and the end of the last."""
    longest: int
    dropout: float = 0.0
    scaling: float | None = None
    """Factor of the scores; 1 / sqrt(width) if none is given."""
    reach: int | None = None
    """Tokens to either side that one sees: all of its text where none is given."""


def flash(q: Tensor, k: Tensor, v: Tensor, over: Packed) -> Tensor:
    """Variable-length flash attention, with the dropout `varlen_attn` lacks."""
    window = -1 if over.reach is None else over.reach
    output: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        over.cu_seqlens,
        over.cu_seqlens,
        over.longest,
        over.longest,
        over.dropout,
        False,
        False,
        scale=over.scaling,
        window_size_left=window,
        window_size_right=window,
    )[0]
    return output


def efficient(q: Tensor, k: Tensor, v: Tensor, over: Packed) -> Tensor:
    """The memory-efficient kernel: any precision, cards from capability 5.0 on."""
    if over.reach is not None:
        raise ValueError("the memory-efficient kernel has no two-sided window")
    if over.dropout:
        raise ValueError("the memory-efficient kernel's backward loses its dropout mask")
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    output: Tensor = torch.ops.aten._efficient_attention_forward(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        None,
        over.cu_seqlens,
        over.cu_seqlens,
        over.longest,
        over.longest,
        over.dropout,
        0,
        needs_gradient,
        scale=over.scaling,
    )[0]
    return output.squeeze(0)


def repadded(q: Tensor, k: Tensor, v: Tensor, over: Packed) -> Tensor:
    """[segments, longest] for the attention alone; shapes depend on no tensor's content.

    A call a text, or a group of similar texts, computes less, but a CPU pays for every call
    with parallel regions: on two busy cores a call a text was slower than the padded model.
    """
    cu_seqlens, longest = over.cu_seqlens, over.longest
    total, segments = q.shape[0], cu_seqlens.shape[0] - 1
    token = torch.arange(total, device=q.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens[1:], token, right=True)
    cell = segment * longest + (token - cu_seqlens[segment])
    column = torch.arange(longest, device=q.device)
    # An empty segment keeps one (zero) key: a softmax over nothing would be NaN.
    inside = column < cu_seqlens.diff().clamp(min=1).unsqueeze(1)
    mask = inside[:, None, None, :]
    if over.reach is not None:
        mask = mask & ((column[:, None] - column).abs() <= over.reach)

    def spread(x: Tensor) -> Tensor:
        cells = x.new_zeros(segments * longest, *x.shape[1:]).index_copy(0, cell, x)
        return cells.view(segments, longest, *x.shape[1:]).transpose(1, 2)

    output = F.scaled_dot_product_attention(
        spread(q),
        spread(k),
        spread(v),
        attn_mask=mask,
        dropout_p=over.dropout,
        scale=over.scaling,
    )
    return output.transpose(1, 2).reshape(segments * longest, *v.shape[1:]).index_select(0, cell)


IMPLEMENTATION = "memfit_packed"

STOCK_ATTRIBUTE = "_memfit_stock_attention"
"""On an attention module: the implementation its model had, used for batches that are padded."""

_calls: ContextVar[list[int] | None] = ContextVar("packed_attention_calls", default=None)


@contextmanager
def count_packed_calls() -> Iterator[list[int]]:
    """Counts, in the list's one entry, the attention calls that got segment boundaries."""
    count = [0]
    token = _calls.set(count)
    try:
        yield count
    finally:
        _calls.reset(token)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention within each text of a packed [1, heads, T, width]; stock attention otherwise."""
    if cu_seq_lens_q is None:
        if sliding_window is not None:
            kwargs["sliding_window"] = sliding_window
        stock = _stock_attention(module)
        return stock(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if (count := _calls.get()) is not None:
        count[0] += 1
    # [1, heads, T, width] -> [T, heads, width]; a view, since transformers transposed the same.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    q, k = q.to(v.dtype), k.to(v.dtype)
    if max_length_q is None:
        max_length_q = int(cu_seq_lens_q.diff().max())
    longest = min(max_length_q, q.shape[0])
    # transformers hands down window + 1; a window no text reaches is no window.
    reach = None if sliding_window is None else sliding_window - 1
    if reach is not None and reach >= longest - 1:
        reach = None
    kernel = choose_kernel(q, reach, dropout)
    output = kernel(q, k, v, Packed(cu_seq_lens_q, longest, dropout, scaling, reach))
    return output.unsqueeze(0), None


Kernel = Callable[[Tensor, Tensor, Tensor, Packed], Tensor]


def choose_kernel(query: Tensor, reach: int | None, dropout: float = 0.0) -> Kernel:
    """The fastest kernel for these tensors; torch's own switches for sdpa kernels are heeded."""
    on_trace = traced_device.device()
    if not (device.is_cuda(query.device) if on_trace is None else on_trace.cuda):
        return repadded
    width = query.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    if (
        half
        and width % 8 == 0
        and width <= 256
        and (_has_flash(query) if on_trace is None else on_trace.capability >= (8, 0))
        and torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    ):
        return flash
    aligned = width % (8 if half else 4) == 0
    switched_on = torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
    # With packed texts the efficient kernel's backward drops other scores than its forward did
    # (seen on an H200 with torch 2.11): with dropout it is not used.
    if reach is None and aligned and switched_on and dropout == 0:
        return efficient
    return repadded


def _stock_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """What this module's model used before; 'eager' lives in its own modeling file."""
    name = getattr(module, STOCK_ATTRIBUTE, "sdpa")
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Callable[..., tuple[Tensor, Tensor | None]] | None = ALL_ATTENTION_FUNCTIONS.get(
        name, eager
    )
    if found is None:
        raise ValueError(f"{type(module).__name__} has no attention implementation {name!r}")
    return found


def _has_flash(query: Tensor) -> bool:
    available: bool = torch.backends.cuda.is_flash_attention_available()
    return available and _capability(query.device) >= (8, 0)


_capability = lru_cache(device.capability)


AttentionInterface.register(IMPLEMENTATION, packed_attention)

# A padded batch under this name gets sdpa's mask; with none it would attend to its padding.
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
