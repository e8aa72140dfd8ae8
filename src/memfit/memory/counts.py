"""What a step does, as far as its time goes: arithmetic, traffic and launches."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """One optimizer step on the device; sums and multiples are counts again."""

    half_flops: float = 0.0
    """Multiplications and additions of matrix products in bf16 or fp16."""
    full_flops: float = 0.0
    """The same in fp32."""
    tf32_flops: float = 0.0
    """The same of fp32 products that may be rounded to TF32."""
    half_attention_flops: float = 0.0
    """Inside attention kernels, which reach a part of a product's rate."""
    full_attention_flops: float = 0.0
    bytes_moved: float = 0.0
    """Read from and written to the device's memory by kernels that are not matrix products."""
    product_bytes: float = 0.0
    """The same by matrix products, which overlap it with arithmetic."""
    launches: float = 0
    """Kernels started from the host; replayed ones are in `replayed`."""
    scripted: float = 0
    """Those of the launches that Python itself makes, not torch: Triton's kernels."""
    products: float = 0
    """Those of the launches that are matrix products."""
    recomputations: float = 0
    """How often backward stops to compute a layer, or a part of one, a second time."""
    replayed: float = 0
    """Kernels a captured graph starts."""
    replays: float = 0
    """How often a graph is started."""
    graph_launches: float = 0
    """How many more a graph has than are launched here: what goes through a table of pointers in
    one launch is captured one by one."""
    to_host_bytes: float = 0.0
    to_device_bytes: float = 0.0
    """Copies across the bus, overlapped with compute where the strategy does so."""
    reached_bytes: float = 0.0
    """Host memory that kernels read and write in place; nothing runs beside them."""
    host_parameters: float = 0
    """Parameters the CPU updates."""

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(**{name: value + getattr(other, name) for name, value in _items(self)})

    def __sub__(self, other: StepCounts) -> StepCounts:
        return self + other * -1

    def __mul__(self, factor: float) -> StepCounts:
        return StepCounts(**{name: value * factor for name, value in _items(self)})

    def as_graphs(self) -> StepCounts:
        """The same step replayed: the host starts one graph instead of every kernel."""
        return dataclasses.replace(
            self,
            launches=0,
            scripted=0,
            products=0,
            recomputations=0,
            graph_launches=0,
            replayed=self.replayed + self.launches + self.graph_launches,
        )


def _items(counts: StepCounts) -> list[tuple[str, float]]:
    return [(f.name, getattr(counts, f.name)) for f in dataclasses.fields(counts)]
