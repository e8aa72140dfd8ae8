"""The attention function: each text attends to itself alone, whatever the kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memfit.strategies.packing.packed_attention import (
    Packed,
    choose_kernel,
    count_packed_calls,
    packed_attention,
    repadded,
)

LENGTHS = (4, 0, 9, 1, 6)
CU_SEQLENS = torch.tensor([0, 4, 4, 13, 14, 20], dtype=torch.int32)
HEADS, WIDTH = 2, 8


def qkv(seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(sum(LENGTHS), HEADS, WIDTH, requires_grad=True) for _ in range(3)]


def reference(q: Tensor, k: Tensor, v: Tensor, scaling: float, reach: int | None) -> Tensor:
    """Softmax attention over the whole batch, under a mask of blocks and bands."""
    text = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    allowed = text[:, None] == text
    if reach is not None:
        token = torch.arange(len(text))
        allowed = allowed & ((token[:, None] - token).abs() <= reach)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("reach", [None, 0, 2, 5])
def test_texts_attend_to_themselves_within_the_window(reach: int | None) -> None:
    q, k, v = qkv()
    expected = reference(q, k, v, 0.3, reach)
    output = repadded(q, k, v, Packed(CU_SEQLENS, 9, 0.0, 0.3, reach))
    assert torch.allclose(output, expected, atol=1e-6)
    direction = torch.randn_like(output)
    gradients = torch.autograd.grad(output, (q, k, v), direction)
    for ours, theirs in zip(
        gradients, torch.autograd.grad(expected, (q, k, v), direction), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    """With one-hot values the output is the weights themselves."""
    length, p = 64, 0.25
    torch.manual_seed(0)
    q, k = torch.randn(2, length, 8, length)
    v = torch.eye(length)[:, None, :].expand(length, 8, length)
    cu = torch.tensor([0, length], dtype=torch.int32)

    def weights(dropout: float) -> Tensor:
        return repadded(q, k, v, Packed(cu, length, dropout, 0.05))

    kept, exact = weights(p), weights(0.0)
    draws = exact.numel()
    spread = (p * (1 - p) / draws) ** 0.5
    assert abs(float((kept == 0).float().mean()) - p) < 5 * spread
    survivors = kept != 0
    assert torch.allclose(kept[survivors], exact[survivors] / (1 - p), rtol=1e-4)


def test_dropout_is_the_seeds_and_its_gradient_is_of_the_same_draw() -> None:
    q, k, v = qkv()

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return repadded(q, k, v, Packed(CU_SEQLENS, 9, 0.4, 0.3))

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))
    # Attention is linear in v: with the draw held, <grad, v> is the output's own sum.
    output = draw(3)
    (gradient,) = torch.autograd.grad(output.sum(), v)
    assert torch.allclose((gradient * v).sum(), output.sum(), rtol=1e-4)


def test_transformers_window_plus_one_is_read_as_such() -> None:
    q, k, v = qkv()
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    output, weights = packed_attention(
        nn.Identity(),
        *heads_first,
        None,
        scaling=0.3,
        sliding_window=3,
        cu_seq_lens_q=CU_SEQLENS,
        max_length_q=9,
    )
    assert weights is None
    assert output.shape == (1, sum(LENGTHS), HEADS, WIDTH)
    assert torch.allclose(output[0], reference(q, k, v, 0.3, 2), atol=1e-6)
    assert not torch.allclose(output[0], reference(q, k, v, 0.3, 3), atol=1e-3)


def test_lengths_and_the_longest_are_found_when_not_given() -> None:
    q, k, v = qkv()
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    output, _ = packed_attention(
        nn.Identity(), *heads_first, None, scaling=0.3, cu_seq_lens_q=CU_SEQLENS
    )
    assert torch.allclose(output[0], reference(q, k, v, 0.3, None), atol=1e-6)


def test_without_boundaries_the_stock_attention_gets_its_mask() -> None:
    q, k, v = (torch.randn(2, HEADS, 5, WIDTH) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()[:, None, None, :]
    module = nn.Identity()
    with count_packed_calls() as calls:
        output, _ = packed_attention(module, q, k, v, mask, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3)
    assert torch.equal(output, expected.transpose(1, 2))
    assert calls == [0]


def test_an_unknown_stock_attention_is_an_error() -> None:
    module = nn.Identity()
    module._memfit_stock_attention = "none such"  # type: ignore[assignment]
    q = torch.randn(1, HEADS, 5, WIDTH)
    with pytest.raises(ValueError, match="no attention implementation 'none such'"):
        packed_attention(module, q, q, q, None)


def test_other_devices_get_the_kernel_that_needs_nothing() -> None:
    assert choose_kernel(torch.empty(4, 2, 8, device="meta"), None) is repadded
