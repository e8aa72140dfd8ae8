"""The fused operators in plain torch: what they compute, said once without tiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from memfit.strategies.fused.fused_kernels import Drop, Gelu, Normed, NormGradients, keep_mask


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, drop: Drop | None
) -> Normed:
    """LayerNorm(dropout(x) + residual); the statistics are those of the sum as it is kept."""
    total = (_dropped(_wide(x), drop) + _wide(residual)).to(x.dtype)
    wide = _wide(total)
    mean = wide.mean(1)
    rstd = ((wide - mean[:, None]).square().mean(1) + eps).rsqrt()
    output = (wide - mean[:, None]) * rstd[:, None] * _wide(weight) + _wide(bias)
    return Normed(output.to(x.dtype), total, mean, rstd)


def add_norm_backward(
    d_output: Tensor, normed: Normed, weight: Tensor, drop: Drop | None
) -> NormGradients:
    """The gradients of x, the residual, the norm's parameters and of a bias added to x."""
    _, total, mean, rstd = normed
    d_out = _wide(d_output)
    unit = (_wide(total) - mean[:, None]) * rstd[:, None]
    d_unit = d_out * _wide(weight)
    along = (d_unit * unit).mean(1, keepdim=True)
    d_total = (d_unit - d_unit.mean(1, keepdim=True) - unit * along) * rstd[:, None]
    d_x = _dropped(d_total, drop)
    d_residual = d_total.to(total.dtype)
    kind = weight.dtype
    return NormGradients(
        d_residual if drop is None else d_x.to(total.dtype),
        d_residual,
        (d_out * unit).sum(0).to(kind),
        d_out.sum(0).to(kind),
        d_x.sum(0).to(kind),
    )


def gelu(x: Tensor, kind: Gelu) -> Tensor:
    """GELU(x)."""
    return F.gelu(x, approximate="none" if kind == "erf" else "tanh")


def gelu_backward(x: Tensor, d_output: Tensor, kind: Gelu) -> tuple[Tensor, Tensor, Tensor]:
    """GELU(x) once more, the gradient of x, and its column sums."""
    wide = _wide(x)
    if kind == "erf":
        share = 0.5 * (1 + torch.erf(wide * math.sqrt(0.5)))
        slope = torch.exp(-0.5 * wide.square()) / math.sqrt(2 * math.pi)
    else:
        root = math.sqrt(2 / math.pi)
        tanh = torch.tanh(root * (wide + 0.044715 * wide**3))
        share = 0.5 * (1 + tanh)
        slope = 0.5 * (1 - tanh.square()) * root * (1 + 3 * 0.044715 * wide.square())
    d_x = _wide(d_output) * (share + wide * slope)
    return (wide * share).to(x.dtype), d_output.copy_(d_x), d_x.sum(0).to(x.dtype)


def join(parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Three matrices side by side in one, and its column sums."""
    joined = torch.cat(parts, 1)
    return joined, _wide(joined).sum(0).to(joined.dtype)


def _wide(x: Tensor) -> Tensor:
    """Sums are made in 32 bits at least."""
    return x if x.dtype == torch.float64 else x.float()


def _dropped(x: Tensor, drop: Drop | None) -> Tensor:
    if drop is None:
        return x
    return torch.where(keep_mask(x.shape, drop), x * drop.scale, 0.0)
