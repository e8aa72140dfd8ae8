"""The buffer CUDA takes to add up a long dimension.

A sum over many rows is shared by several thread blocks, which leave their partial results
in global memory. PyTorch sizes that buffer by the launch, not by the result: the bias
gradient of a linear layer takes twice the memory of the gradient it is summed from.
(`setReduceConfig` in aten/src/ATen/native/cuda/Reduce.cuh.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.memory.context import threads_per_multiprocessor

_MOST_THREADS = 512  # of a block that reduces
_WARP = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256  # a thread adds up
_ACCUMULATOR_BYTES = 4  # half types are added in fp32


@dataclass(frozen=True)
class Multiprocessors:
    """How much a device runs at once."""

    count: int
    threads: int

    @classmethod
    def of(cls, capability: tuple[int, int], count: int) -> Multiprocessors:
        """So many multiprocessors of a compute capability."""
        return cls(count, threads_per_multiprocessor(capability))


def reduction_buffer_bytes(
    shape: Sequence[int],
    stride: Sequence[int],
    dims: Sequence[int],
    device: Multiprocessors,
) -> int:
    """What adding up `dims` of a tensor takes beside its result; 0 where one block suffices."""
    reduced = {dim % len(shape) for dim in dims} if shape else set()
    inputs = math.prod(shape[dim] for dim in reduced)
    outputs = math.prod(shape) // max(inputs, 1)
    if inputs <= 1 or outputs == 0:
        return 0
    kept = [dim for dim in range(len(shape)) if dim not in reduced and shape[dim] > 1]
    fastest = min((stride[dim] for dim in reduced if shape[dim] > 1), default=1)
    if not kept or fastest < min(stride[dim] for dim in kept):
        return _along_rows(inputs, outputs, contiguous=fastest == 1, device=device)
    return _across_rows(inputs, outputs, _vector(shape, stride, reduced, kept), device)


def _across_rows(inputs: int, outputs: int, vector: int, device: Multiprocessors) -> int:
    """Neighbours in memory belong to different sums: each thread has its own."""
    width, height = _block(outputs // vector, inputs, _MOST_THREADS // vector)
    grid = -(-(outputs // vector) // width)
    if inputs < min(height * 16, _MOST_VALUES):
        return 0
    blocks = _blocks_per_sum(-(-inputs // height), grid, width * height, device)
    return _ACCUMULATOR_BYTES * outputs * blocks * width * vector if blocks > 1 else 0


def _along_rows(inputs: int, outputs: int, *, contiguous: bool, device: Multiprocessors) -> int:
    """Neighbours in memory belong to one sum: the threads of a row share it."""
    width, height = _block(
        inputs // 4 if contiguous and inputs >= 128 else inputs, outputs, _MOST_THREADS
    )
    values = -(-inputs // width)
    if values < min(height * 16, _MOST_VALUES):
        return 0
    blocks = _blocks_per_sum(-(-values // height), outputs, width * height, device)
    return _ACCUMULATOR_BYTES * outputs * blocks if blocks > 1 else 0


def _block(x: int, y: int, most: int) -> tuple[int, int]:
    wide, high = _power(x, most), _power(y, most)
    height = min(high, most // min(wide, _WARP))
    return min(wide, most // height), height


def _power(count: int, most: int) -> int:
    return most if count >= most else 1 << max(count, 1).bit_length() - 1


def _blocks_per_sum(values: int, grid: int, threads: int, device: Multiprocessors) -> int:
    target = device.count * (device.threads // threads)
    if values < _MOST_VALUES or grid > target:
        return 1
    return max(min(-(-target // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))


def _vector(
    shape: Sequence[int], stride: Sequence[int], reduced: set[int], kept: Sequence[int]
) -> int:
    """How many neighbouring sums a thread takes: four if all strides allow it."""
    inner = min(kept, key=lambda dim: stride[dim])
    if stride[inner] != 1:
        return 1
    width, pitch = shape[inner], []
    for dim in sorted({*reduced, *kept} - {inner}, key=lambda dim: stride[dim]):
        if dim in kept and stride[dim] == width:
            width *= shape[dim]  # one dimension with the inner one
        elif shape[dim] > 1:
            pitch.append(stride[dim])
    return math.gcd(4, width, *pitch)
