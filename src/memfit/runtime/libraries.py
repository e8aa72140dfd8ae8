"""The matrix libraries' workspaces, taken where they do not stand in anybody's way."""

from __future__ import annotations

import torch

from memfit.memory.workspace import drop_workspaces


def take_workspaces(device: torch.device) -> None:
    """One small linear layer on the current stream, forward and backward.

    cuBLAS takes a workspace at a thread's first product on a stream, and keeps it. In the middle
    of a first step it would lie between activations, and its whole page of 20 MiB with it, when
    they are gone: 40 MB of a BERT-Base's graphs on an H200. Before the first step it lies at the
    end of what stays. Those that earlier trainings took on other streams are given back.
    """
    drop_workspaces()
    half = torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = torch.bfloat16 if half else torch.float16
    with torch.enable_grad():
        weight = torch.zeros(16, 16, device=device, dtype=dtype, requires_grad=True)
        bias = torch.zeros(16, device=device, dtype=dtype, requires_grad=True)
        out = torch.nn.functional.linear(weight, weight, bias)
        torch.autograd.grad(out.sum(), (weight, bias))
