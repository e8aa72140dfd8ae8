"""Products of a training step in half precision; `half_on_cpu.py` runs this file as a program.

Prints `ready`, then each type whose products came out right.
"""

from __future__ import annotations

import contextlib

import torch

# Rows, width and output width. oneDNN chooses its kernel by the size: the tile instructions are for
# the larger products, and small or odd ones take other paths.
_SIZES = ((3, 8, 5), (37, 100, 212), (64, 512, 512), (192, 768, 768), (64, 1024, 64))

_TOLERANCE = 0.05
"""The error allowed, as a share of the largest value: bfloat16 has eight bits."""


def try_products(dtype: torch.dtype) -> None:
    """Runs `linear` and `bmm`, forward and backward; raises if a result or a gradient is wrong."""
    torch.manual_seed(0)
    for rows, width, out in _SIZES:
        inputs = [torch.randn(8, rows, width), torch.randn(out, width), torch.randn(8, width, out)]
        found = []
        for kind in (torch.float32, dtype):
            x, weight, other = leaves = [one.to(kind, copy=True).requires_grad_() for one in inputs]
            results = [torch.nn.functional.linear(x, weight), torch.bmm(x, other)]
            ones = [torch.ones_like(one) for one in results]
            found.append([*results, *torch.autograd.grad(results, leaves, ones)])
        for full, half in zip(*found, strict=True):
            error = (full - half.float()).abs().max() / full.abs().max()
            if not error < _TOLERANCE:  # NaN is not
                raise ArithmeticError(f"a product in {dtype} is wrong by {error:.3f}")


if __name__ == "__main__":
    with contextlib.suppress(ImportError):  # Windows writes no core dumps
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", flush=True)
    for name in ("bfloat16", "float16"):
        try_products(getattr(torch, name))
        print(name, flush=True)
