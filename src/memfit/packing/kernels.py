"""Attention kernels for packed texts: [T, heads, width] and where each text begins.

    flash        CUDA, capability >= 8.0, half precision, sliding windows too
    efficient    CUDA, any card and precision, no sliding window, no dropout
    repadded     any device, the CPU's kernel: texts are padded again for the attention alone

The two CUDA kernels are called below `scaled_dot_product_attention` and `varlen_attn`: the
first takes no packed texts, the second no dropout. Both have their gradient in torch, but the
efficient kernel's forgets its window (and its window is a causal one), hence `repadded`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the texts lie in [T, heads, width], and what their attention does to the scores."""

    cu_seqlens: Tensor
    """Where each begins, and the end of the last."""
    longest: int
    dropout: float = 0.0
    scaling: float | None = None
    """Of the scores; 1 / sqrt(width) where none is given."""
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
