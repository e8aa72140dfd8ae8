"""Attention kernels for packed texts: [T, heads, width] and where each text begins.

    flash        CUDA, capability >= 8.0, half precision, sliding windows too
    efficient    CUDA, any card and precision, no sliding window
    repadded     any device: texts are padded again for the attention alone
    grouped      CPU: the same, within groups of texts of about one length

The two CUDA kernels are called below `scaled_dot_product_attention` and `varlen_attn`: the
first takes no packed texts, the second no dropout. Both have their gradient in torch, but the
efficient kernel's forgets its window (and its window is a causal one), hence `repadded`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP_SPAN = 0.8
"""The shortest text of a group, of its longest. One call a text would compute least, but each
call is many parallel regions: on two busy cores that loop was slower than padding."""


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
    """[segments, longest] for the attention alone; shapes depend on no tensor's content."""
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


def grouped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    dropout: float,
    scaling: float | None,
    reach: int | None,
) -> Tensor:
    """One padded call a group of similar lengths: few calls, and little padding in each."""
    groups, first_cell = group_by_length(lengths)
    total = q.shape[0]
    # Token t of text i lies in cell t + shift_i; the cells of a group are rows of one width.
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    shift = [cell - (end - n) for cell, end, n in zip(first_cell, ends, lengths, strict=True)]
    cell = torch.arange(total) + torch.repeat_interleave(
        torch.tensor(shift), torch.tensor(lengths), output_size=total
    )
    sizes = [len(texts) * lengths[texts[0]] for texts in groups]
    spread = [
        x.new_zeros(sum(sizes), *x.shape[1:]).index_copy(0, cell, x).split(sizes)  # type: ignore[no-untyped-call]
        for x in (q, k, v)
    ]
    outputs = []
    for texts, *cells in zip(groups, *spread, strict=True):
        longest = lengths[texts[0]]
        query, key, value = (
            x.view(len(texts), longest, *x.shape[1:]).transpose(1, 2) for x in cells
        )
        mask = _group_mask([lengths[i] for i in texts], longest, reach)
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
        )
        outputs.append(output.transpose(1, 2).reshape(len(texts) * longest, *v.shape[1:]))
    return torch.cat(outputs).index_select(0, cell)


@lru_cache(maxsize=32)
def group_by_length(
    lengths: tuple[int, ...],
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Texts of similar length, longest first, and each text's first cell once groups are padded.

    Numbers only: a tensor made under a fake mode and kept here would reach the real step.
    """
    groups: list[list[int]] = []
    for text in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        if groups and lengths[text] >= GROUP_SPAN * lengths[groups[-1][0]]:
            groups[-1].append(text)
        else:
            groups.append([text])
    first_cell, cells = [0] * len(lengths), 0
    for texts in groups:
        for text in texts:
            first_cell[text] = cells
            cells += lengths[texts[0]]
    return tuple(map(tuple, groups)), tuple(first_cell)


def _group_mask(lengths: list[int], longest: int, reach: int | None) -> Tensor | None:
    """Keys beyond a text's end, or out of the window's reach; None when there are none."""
    mask = None
    column = torch.arange(longest)
    if min(lengths) < longest:
        mask = (column < torch.tensor(lengths)[:, None])[:, None, None, :]
    if reach is not None and reach < longest - 1:
        band = (column[:, None] - column).abs() <= reach
        # A query in the padding may see no key at all; its own, and it stays a number.
        mask = band if mask is None else (mask & band) | torch.eye(longest, dtype=torch.bool)
    return mask
