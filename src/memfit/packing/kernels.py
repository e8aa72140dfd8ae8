"""Attention kernels for packed texts: [T, heads, width] and where each text begins.

    flash        CUDA, capability >= 8.0, half precision, sliding windows too
    efficient    CUDA, any card and precision, no sliding window, no dropout
    repadded     any device, the CPU's kernel: texts are padded again for the attention alone

The two CUDA kernels are called below `scaled_dot_product_attention` and `varlen_attn`: the
first takes no packed texts, the second no dropout. Both have their gradient in torch, but the
efficient kernel's forgets its window (and its window is a causal one), hence `repadded`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    dropout: float,
    scaling: float | None,
    reach: int | None,
) -> Tensor:
    """Variable-length flash attention, with the dropout `varlen_attn` lacks."""
    window = -1 if reach is None else reach
    output: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        dropout,
        False,
        False,
        scale=scaling,
        window_size_left=window,
        window_size_right=window,
    )[0]
    return output


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    dropout: float,
    scaling: float | None,
    reach: int | None,
) -> Tensor:
    """The memory-efficient kernel: any precision, cards from capability 5.0 on."""
    if reach is not None:
        raise ValueError("the memory-efficient kernel has no two-sided window")
    if dropout:
        raise ValueError("the memory-efficient kernel's backward loses its dropout mask")
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    output: Tensor = torch.ops.aten._efficient_attention_forward(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        None,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        dropout,
        0,
        needs_gradient,
        scale=scaling,
    )[0]
    return output.squeeze(0)


def repadded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    dropout: float,
    scaling: float | None,
    reach: int | None,
) -> Tensor:
    """[segments, longest] for the attention alone; shapes depend on no tensor's content.

    A call a text, or a group of similar texts, computes less, but a CPU pays for every call
    with parallel regions: on two busy cores a call a text was slower than the padded model.
    """
    total, segments = q.shape[0], cu_seqlens.shape[0] - 1
    token = torch.arange(total, device=q.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens[1:], token, right=True)
    cell = segment * longest + (token - cu_seqlens[segment])
    column = torch.arange(longest, device=q.device)
    # An empty segment keeps one (zero) key: a softmax over nothing would be NaN.
    inside = column < cu_seqlens.diff().clamp(min=1).unsqueeze(1)
    mask = inside[:, None, None, :]
    if reach is not None:
        mask = mask & ((column[:, None] - column).abs() <= reach)

    def spread(x: Tensor) -> Tensor:
        cells = x.new_zeros(segments * longest, *x.shape[1:]).index_copy(0, cell, x)
        return cells.view(segments, longest, *x.shape[1:]).transpose(1, 2)

    output = F.scaled_dot_product_attention(
        spread(q), spread(k), spread(v), attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return output.transpose(1, 2).reshape(segments * longest, *v.shape[1:]).index_select(0, cell)
