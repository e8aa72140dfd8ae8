"""The buffer a CUDA sum over rows takes: as in the gradient of a linear layer's bias.

`grad.sum(0)` of a [rows, columns] tensor is cut into blocks that leave partial sums in a buffer
of the allocator; for 4096 rows it is eight bytes an element, more than the gradient itself.
The rules are those of `setReduceConfig` in aten/src/ATen/native/cuda/Reduce.cuh.
"""

from __future__ import annotations

_THREADS = 512
_WARP = 32
_FEWEST_VALUES, _MOST_VALUES = 16, 256
_SUM_BYTES = 4  # half precision is summed in fp32 too


def row_sum_buffer_bytes(
    rows: int, columns: int, *, multiprocessors: int, threads_per_multiprocessor: int
) -> int:
    """The buffer of a sum over the rows of a contiguous [rows, columns] tensor, or 0."""
    vector = next(size for size in (4, 2, 1) if columns % size == 0)
    width, height = _block(columns // vector, rows, _THREADS // vector)
    values = rows
    if values < min(height * _FEWEST_VALUES, _MOST_VALUES):
        return 0  # a thread sums a column, or a part of it, by itself
    values = _divide(values, height)
    grid = _divide(columns // vector, width)
    blocks = multiprocessors * (threads_per_multiprocessor // (width * height))
    if values < _MOST_VALUES or grid > blocks:
        return 0
    parts = max(
        min(_divide(blocks, grid), _divide(values, _FEWEST_VALUES)), _divide(values, _MOST_VALUES)
    )
    return _SUM_BYTES * columns * parts * width * vector if parts > 1 else 0


def _block(columns: int, rows: int, most: int) -> tuple[int, int]:
    """Threads across and down: a warp across where there are columns enough."""
    across = min(_power_of_two(columns), most)
    down = min(_power_of_two(rows), most)
    height = min(down, most // min(across, _WARP))
    return min(across, most // height), height


def _power_of_two(count: int) -> int:
    """The largest that is not larger."""
    return 1 << (count.bit_length() - 1)


def _divide(count: int, by: int) -> int:
    return -(-count // by)
