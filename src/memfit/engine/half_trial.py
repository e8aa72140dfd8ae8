"""The products of a training step in half precision, run once to see whether the CPU does them.

`half_on_cpu.py` starts this file as a program of its own: a CPU that traps on an instruction it
advertises ends the process, and no Python code can catch that. It prints `ready`, then each type
whose products came out right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

# Rows, width and output width of products. oneDNN chooses its kernel by the size: the tile
# instructions are for the larger ones, and small or odd ones take other paths.
_SIZES = ((3, 8, 5), (37, 100, 212), (64, 512, 512), (192, 768, 768), (64, 1024, 64))

_BATCHED = ((5, 16, 7), (128, 64, 128))

_TOLERANCE = 0.05
"""The error allowed, as a share of the largest value: bfloat16 has eight bits."""


def try_products(dtype: torch.dtype) -> None:
    """Runs `mm`, `linear`, `bmm` and attention, forward and backward; checks what comes out."""
    torch.manual_seed(0)
    for rows, width, out in _SIZES:
        x, weight, bias = torch.randn(rows, width), torch.randn(out, width), torch.randn(out)
        _agree(dtype, lambda a, b: torch.mm(a, b.t()), x, weight)
        _agree(dtype, functional.linear, x, weight, bias)
        _agree(dtype, functional.linear, x.view(1, rows, width), weight)
    for rows, width, out in _BATCHED:
        _agree(dtype, torch.bmm, torch.randn(8, rows, width), torch.randn(8, width, out))
    heads = [torch.randn(2, 4, 64, 64) for _ in range(3)]
    _agree(dtype, functional.scaled_dot_product_attention, *heads)


def _agree(dtype: torch.dtype, product: Any, *inputs: torch.Tensor) -> None:
    """Results and gradients in half precision, against those in float32."""
    for full, half in zip(_run(product, inputs), _run(product, inputs, dtype), strict=True):
        error = (full - half.float()).abs().max() / full.abs().max()
        if not error < _TOLERANCE:  # NaN is not
            raise ArithmeticError(f"a product in {dtype} is wrong by {error:.3f} of its largest")


def _run(
    product: Any, inputs: tuple[torch.Tensor, ...], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    leaves = [one.detach().to(dtype).requires_grad_() for one in inputs]
    result = product(*leaves)
    result.backward(torch.ones_like(result))
    return [result.detach(), *(one.grad for one in leaves if one.grad is not None)]


def _without_core_dump() -> None:
    try:
        import resource
    except ImportError:  # Windows writes none
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _without_core_dump()
    print("ready", flush=True)
    for name in ("bfloat16", "float16"):
        try_products(getattr(torch, name))
        print(name, flush=True)
