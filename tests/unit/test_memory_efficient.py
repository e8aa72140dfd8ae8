"""The memory-efficient kernel over packed texts, as a trace for a card sees it."""

from __future__ import annotations

import pytest
import torch

from memfit.memory.tracing.fake_tensors import fake_trace
from memfit.memory.tracing.operators import CudaKernels
from memfit.strategies.packing.packed_attention import Packed, efficient

TOKENS, HEADS, WIDTH, LONGEST = 300, 4, 64, 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_its_backward_gives_gradients_and_takes_the_buffers_of_the_kernel(
    dtype: torch.dtype,
) -> None:
    with fake_trace(CudaKernels((8, 6), 28)) as tracker:
        q, k, v = (
            torch.zeros(TOKENS, HEADS, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3)
        )
        limits = torch.tensor([0, 100, 200, 300], dtype=torch.int32)
        output = efficient(q, k, v, Packed(limits, LONGEST))
        before = len(tracker.events())
        output.backward(torch.zeros_like(output))
        assert q.grad is not None
        assert [one.grad.shape for one in (q, k, v)] == [q.shape] * 3  # type: ignore[union-attr]
        born = [one.nbytes for one in tracker.events()[before:] if one.birth]
    tiles = 2 * 1  # 100 tokens and 64 wide, in tiles of 64 by 64
    buffers = 3 * HEADS * (tiles * (64 * 64 * 4 + 16) + LONGEST * 4)
    assert any(abs(size - buffers) < 512 for size in born)
    product = TOKENS * HEADS * WIDTH * 4
    assert any(size == product for size in born) is (dtype is torch.float32)
