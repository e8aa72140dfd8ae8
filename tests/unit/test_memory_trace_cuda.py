"""What a CUDA device does differently: attention kernels, autocast's lists, saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from memfit.memory.tracing.attention_kernels import choose_kernel
from memfit.memory.tracing.fake_tensors import FakeTracker, fake_trace
from memfit.memory.tracing.operators import CudaKernels, cuda_fp32_operators

T4, A100, RTX3090, H100 = (7, 5), (8, 0), (8, 6), (9, 0)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def heads(dtype: torch.dtype, width: int = 64, count: int = 12) -> torch.Tensor:
    return torch.empty(2, count, 128, width, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("capability", "dtype", "masked", "dropout", "expected"),
    [
        (A100, FP32, False, 0.1, "efficient"),
        (A100, FP32, True, 0.1, "efficient"),
        (A100, BF16, False, 0.1, "flash"),
        (A100, BF16, True, 0.1, "efficient"),
        (A100, BF16, True, 0.0, "efficient"),
        (H100, BF16, False, 0.1, "flash"),  # cuDNN's dropout knows sixteenths only
        (H100, BF16, True, 0.1, "efficient"),
        (H100, BF16, True, 0.0, "cudnn"),
        (H100, FP16, False, 0.125, "cudnn"),
        (H100, FP32, False, 0.0, "efficient"),
        (T4, FP16, False, 0.1, "efficient"),  # no flash attention before 8.0
        (T4, BF16, False, 0.1, "math"),
        (T4, FP32, True, 0.1, "efficient"),
    ],
)
def test_the_kernel_is_the_one_pytorch_chooses(
    capability: tuple[int, int], dtype: torch.dtype, masked: bool, dropout: float, expected: str
) -> None:
    query = heads(dtype)
    mask = torch.ones(2, 1, 128, 128, dtype=torch.bool, device="meta") if masked else None
    assert choose_kernel(capability, query, query, query, mask, dropout) == expected


@pytest.mark.parametrize(
    ("width", "dtype", "capability", "expected"),
    [
        (12, FP32, A100, "efficient"),
        (10, FP32, A100, "math"),  # not a multiple of four
        (10, FP32, T4, "efficient"),
        (12, BF16, A100, "flash"),
        (288, BF16, A100, "efficient"),  # flash ends at 256
        (192, BF16, H100, "flash"),  # cuDNN at 128
    ],
)
def test_the_width_of_a_head_decides_too(
    width: int, dtype: torch.dtype, capability: tuple[int, int], expected: str
) -> None:
    query = heads(dtype, width)
    assert choose_kernel(capability, query, query, query, None, 0.1) == expected


def test_grouped_heads_in_fp32_fall_back_to_plain_products() -> None:
    query, key = heads(FP32, count=8), heads(FP32, count=2)
    assert choose_kernel(A100, query, key, key, None, 0.0) == "math"


def saved_bytes(run: Callable[[], Any], capability: tuple[int, int] | None, **more: Any) -> int:
    """What is alive after `run` beside its leaves: the result and what backward keeps."""
    kernels = None if capability is None else CudaKernels(capability, 108, **more)
    with fake_trace(kernels) as tracker:
        out = run()
        assert isinstance(tracker, FakeTracker)
        live = tracker.live_bytes
        del out
    return live


def test_dropout_keeps_a_byte_for_every_element() -> None:
    def run() -> Any:
        x = torch.empty(1000, requires_grad=True)
        return x, F.dropout(x, 0.1)

    assert saved_bytes(run, A100) == 4000 + 4000 + 1000
    assert saved_bytes(run, None) == 4000 + 4000 + 4000


def test_softmax_of_fp16_into_fp32_makes_no_copy_of_its_input() -> None:
    def run() -> Any:
        x = torch.empty(1000, dtype=FP16, requires_grad=True)
        return x, F.softmax(x, -1, dtype=FP32)

    assert saved_bytes(run, A100) == 2000 + 4000


def test_the_efficient_kernel_keeps_its_mask_in_every_layer_padded_to_eight() -> None:
    def run() -> Any:
        q = torch.empty(2, 4, 36, 64, requires_grad=True)
        mask = torch.ones(2, 1, 36, 36, dtype=torch.bool)
        return q, mask, F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    heads_bytes = 2 * 4 * 36 * 64 * 4
    mask_bytes = 2 * 36 * 36 + 2 * 36 * 40 * 4  # the mask, and its additive form
    log_sum_exp = 2 * 4 * 64 * 4  # of 32 queries at a time
    seeds = 2 * 8
    assert saved_bytes(run, A100) == 2 * heads_bytes + mask_bytes + log_sum_exp + seeds


def test_layer_norm_of_half_precision_keeps_its_statistics_in_fp32() -> None:
    def run() -> Any:
        x = torch.empty(100, 64, dtype=BF16, requires_grad=True)
        weight = torch.empty(64, dtype=BF16)
        return x, weight, F.layer_norm(x, (64,), weight)

    assert saved_bytes(run, A100) - saved_bytes(run, None) == 2 * 100 * 2


@pytest.mark.parametrize(
    "name", ["layer_norm", "softmax.int", "pow.Tensor_Scalar", "rsqrt", "exp", "log", "softplus"]
)
def test_the_list_of_fp32_operators_is_torchs_own_for_cuda(name: str) -> None:
    full = f"aten::{name}"
    assert full in cuda_fp32_operators() or name == "softmax.int"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(full, "AutocastCUDA")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(full, "AutocastCPU")


@pytest.mark.parametrize(
    ("operator", "dtype"),
    [
        (lambda x: F.layer_norm(x, (8,)), FP32),
        (lambda x: x.softmax(-1), FP32),
        (lambda x: x.pow(2), FP32),
        (lambda x: x.sum(), FP32),
        (lambda x: x.mean(), BF16),
        (lambda x: F.gelu(x), BF16),
        (lambda x: x @ x.t(), BF16),
        (lambda x: torch.addcmul(x.float(), x, x), FP32),
        (lambda x: torch.cat([x, x]), BF16),
    ],
    ids=["layer_norm", "softmax", "pow", "sum", "mean", "gelu", "matmul", "addcmul", "cat"],
)
def test_autocast_runs_each_operator_in_cudas_type(
    operator: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    with fake_trace(CudaKernels(A100, 108, autocast=True)):
        x = torch.empty(8, 8, dtype=BF16)
        with torch.autocast("cpu", dtype=BF16):
            assert operator(x).dtype is dtype


def test_autocast_keeps_a_weights_copy_until_its_context_ends() -> None:
    with fake_trace(CudaKernels(A100, 108, autocast=True)) as tracker:
        weight = torch.nn.Parameter(torch.empty(64, 64))
        x = torch.empty(1, 64)
        base = tracker.live_bytes
        with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
            F.linear(x, weight)
            F.linear(x, weight)
            assert tracker.live_bytes - base == 64 * 64 * 2
        assert tracker.live_bytes == base
