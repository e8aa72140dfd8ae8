"""The Triton kernels, run by Triton's interpreter on the CPU, against the plain ones."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

# Odd row counts, widths that are no power of two, and more rows than one program reads.
NORM_SHAPES = [(3, 312), (5, 768), (3, 1024), (1, 4096)]
MATRIX_SHAPES = [(3, 312), (70, 200), (2, 1024)]
EXACT, ONE_BF16_STEP = 3e-6, 2**-6


def found() -> Iterator[tuple[str, list[float]]]:
    """For each case, each result's largest difference, of the largest value."""
    from memfit.strategies.fused import fused_kernels_torch, fused_kernels_triton
    from memfit.strategies.fused.fused_kernels import Drop

    def compare(name: str, ours: object, theirs: object) -> tuple[str, list[float]]:
        pairs = zip(ours, theirs, strict=True)  # type: ignore[call-overload]
        return name, [_error(mine, other) for mine, other in pairs]

    generator = torch.Generator().manual_seed(0)
    for dtype, shape in [(torch.float32, s) for s in NORM_SHAPES] + [(torch.bfloat16, (5, 96))]:
        x, r, dy = torch.randn(3, *shape, generator=generator).to(dtype)
        weight, bias = torch.randn(2, shape[1], generator=generator).to(dtype)
        for drop in (None, Drop(0.3, torch.tensor([2**61 + 12345]), 5)):
            name = f"{dtype} {shape} {drop is not None}"
            given = (x, r, weight, bias, 1e-12, drop)
            normed = fused_kernels_torch.add_norm(*given)
            yield compare(f"norm {name}", fused_kernels_triton.add_norm(*given), normed)
            back = (dy, normed, weight, drop)
            ours, theirs = (
                k.add_norm_backward(*back) for k in (fused_kernels_triton, fused_kernels_torch)
            )
            yield compare(f"norm backward {name}", ours, theirs)
    cases = [(torch.float32, s) for s in MATRIX_SHAPES] + [(torch.bfloat16, (5, 96))]
    for dtype, shape in cases:
        x, y, z = (torch.randn(3, *shape, generator=generator) * 3).to(dtype)
        both = fused_kernels_triton, fused_kernels_torch
        for kind in ("erf", "tanh"):
            yield compare(f"gelu {dtype} {shape} {kind}", *([k.gelu(x, kind)] for k in both))
            ours, theirs = (k.gelu_backward(x, y.clone(), kind) for k in both)
            yield compare(f"gelu backward {dtype} {shape} {kind}", ours, theirs)
        # A transposed view, as attention gives them, and two whose rows are far apart.
        parts = (torch.cat([x, y], 1)[:, : shape[1]], y, z.t().contiguous().t())
        yield compare(f"join {dtype} {shape}", *(k.join(parts) for k in both))


def _error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    difference = (ours.double() - theirs.double()).abs().max()
    return float(difference / theirs.double().abs().max())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_equal_the_plain_ones() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    results: dict[str, list[float]] = json.loads(run.stdout)
    assert len(results) == 2 * 5 * 2 + 4 * 5
    for name, errors in results.items():
        # The interpreter cuts fp32 to bf16 where the card rounds.
        assert max(errors) <= (ONE_BF16_STEP if "bfloat16" in name else EXACT), name


if __name__ == "__main__":
    print(json.dumps(dict(found())))
