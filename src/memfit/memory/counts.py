"""What a step does, as far as its time goes: arithmetic, traffic and launches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """One optimizer step on the device."""

    half_flops: float = 0.0
    """Multiplications and additions of matrix products in bf16 or fp16."""
    full_flops: float = 0.0
    """The same in fp32."""
    bytes_moved: float = 0.0
    """Read from and written to the device's memory by kernels that are not matrix products."""
    product_bytes: float = 0.0
    """The same by matrix products, which overlap it with arithmetic."""
    launches: int = 0
    """Kernels started from the host; replayed ones are in `replayed`."""
    replayed: int = 0
    """Kernels a captured graph starts."""
    to_host_bytes: float = 0.0
    to_device_bytes: float = 0.0
    """Copies across the bus, overlapped with compute where the strategy does so."""
    host_parameters: int = 0
    """Parameters the CPU updates."""
