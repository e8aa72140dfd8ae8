"""The buffer of a sum over rows, against what the real kernel took."""

from __future__ import annotations

import base64
import json
import zlib
from array import array
from collections import Counter
from pathlib import Path

import pytest
import torch

from memfit.memory.tracing.operators import Multiprocessors, reduction_buffer_bytes

HISTORY = Path(__file__).parents[2] / "benchmarks" / "results" / "memory_h200.history.json"


H200 = Multiprocessors.of((9, 0), 132)


def buffer(tensor: torch.Tensor, dims: list[int], device: Multiprocessors = H200) -> int:
    return reduction_buffer_bytes(tensor.shape, tensor.stride(), dims, device)


def on_h200(rows: int, columns: int) -> int:
    return buffer(torch.empty(rows, columns, device="meta"), [0])


def requests(name: str) -> Counter[int]:
    """How often each size was asked for in a recorded run of three steps."""
    packed = json.loads(HISTORY.read_text())[name]["events"]
    numbers = array("q")
    numbers.frombytes(zlib.decompress(base64.b64decode(packed)))
    return Counter(size for size in numbers[::2] if size >= 0)


@pytest.mark.parametrize(("columns", "times"), [(768, 5 * 12 * 3), (3072, 12 * 3)])
def test_each_bias_gradient_of_a_recorded_run_took_the_predicted_buffer(
    columns: int, times: int
) -> None:
    # BERT-base: of 4096 rows, query, key, value and two outputs are 768 wide, one layer is 3072.
    taken = requests("bert-base/32x1/len128/mixed/adamw_torch_fused")
    assert taken[on_h200(4096, columns)] == times


def test_half_precision_takes_the_same_buffer_since_it_is_summed_in_fp32() -> None:
    taken = requests("bert-base/32x1/len128/mixed/adamw_torch_fused/bf16/expandable_segments")
    assert taken[on_h200(4096, 3072)] == 12 * 3


def test_the_buffer_is_eight_bytes_an_element_at_4096_rows() -> None:
    assert on_h200(4096, 768) == 8 * 4096 * 768
    assert on_h200(4096, 3072) == 8 * 4096 * 3072


@pytest.mark.parametrize("rows", [1, 32, 512, 1020])
def test_few_rows_need_no_buffer(rows: int) -> None:
    assert on_h200(rows, 768) == 0


def test_a_small_card_cuts_the_sum_into_fewer_parts() -> None:
    laptop = Multiprocessors.of((8, 6), 16)
    # 192 blocks over a grid of 6: 32 parts instead of 64.
    rows = torch.empty(4096, 768, device="meta")
    assert buffer(rows, [0], laptop) == buffer(rows, [0], H200) // 2


def test_a_head_of_two_columns_is_summed_in_narrow_blocks() -> None:
    # One vector of two: 1 x 256 threads; 16 values a thread are too few for a buffer.
    assert on_h200(4096, 2) == 0


def test_a_3d_gradient_is_summed_as_its_rows_and_short_dimensions_are_summed_for_nothing() -> None:
    grad = torch.empty(32, 128, 768, device="meta")
    assert buffer(grad, [0, 1]) == on_h200(4096, 768)
    assert buffer(grad.view(4096, 768), [-2]) == on_h200(4096, 768)
    assert buffer(grad.view(4096, 768), [-1]) == 0


def test_the_mean_over_an_embeddings_rows_takes_more_than_the_embedding_does() -> None:
    # Adafactor's, of 21128 rows: 331 parts.
    assert on_h200(21128, 768) == 4 * 768 * 128 * 331 > 21128 * 768 * 4
