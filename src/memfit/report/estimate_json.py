"""An estimate as JSON for `memfit estimate --json`, the classic rules beside it, its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from memfit.memory.components import Component, MemoryPeak

if TYPE_CHECKING:
    from memfit.memory.cards import DeviceProfile
    from memfit.memory.stock_estimate import MemoryEstimate

Verdict = Literal["fits", "barely", "over"]

BARELY = 0.03
"""A card this nearly full is within what a prediction of device memory may be off."""


def component_maxima(estimate: MemoryEstimate) -> dict[str, int]:
    """The most each component holds at any moment; their moments differ."""
    live = dict.fromkeys(Component, 0)
    most = dict.fromkeys(Component, 0)
    for event in estimate.events:
        live[event.component] += event.nbytes if event.birth else -event.nbytes
        most[event.component] = max(most[event.component], live[event.component])
    most[Component.CONTEXT] = estimate.peak.components.get(Component.CONTEXT, 0)
    return {str(name): size for name, size in most.items()}


def classic_rules(estimate: MemoryEstimate) -> dict[str, int]:
    """What the four rules say: 4 bytes a parameter, 4 its gradient, 8 AdamW, the rest activations.

    The rest is what the step allocates beyond the first three.
    """
    weights, gradients, optimizer = (estimate.parameters * size for size in (4, 4, 8))
    rest = max(estimate.peak.allocated_bytes - weights - gradients - optimizer, 0)
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": rest,
    }


def estimate_json(
    estimate: MemoryEstimate, device: DeviceProfile | None, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """The numbers as the command prints them with --json."""
    return {
        "parameters": estimate.parameters,
        "trainable_parameters": estimate.trainable_parameters,
        **_peak_json(estimate.peak),
        "steady_bytes": estimate.steady_bytes,
        "component_maxima": component_maxima(estimate),
        "classic_rules": classic_rules(estimate),
        "phases": {name: _peak_json(peak) for name, peak in estimate.phases.items()},
        "device": None
        if device is None
        else {
            "name": device.name,
            "total_bytes": device.total_bytes,
            "usable_bytes": device.usable_bytes,
            "context_measured": device.measured,
        },
        "fits": None if device is None else fits(estimate, device),
        "traced_layers": list(estimate.traced_layers),
        "notes": list(notes),
    }


def fits(estimate: MemoryEstimate, device: DeviceProfile) -> bool:
    """Whether every phase stays within the card."""
    return _highest_bytes(estimate) <= device.usable_bytes


def verdict_on(estimate: MemoryEstimate, device: DeviceProfile) -> Verdict:
    """`fits`, `over`, or `barely` where the prediction's own error decides."""
    if not fits(estimate, device):
        return "over"
    barely = _highest_bytes(estimate) > (1 - BARELY) * device.usable_bytes
    return "barely" if barely else "fits"


def _highest_bytes(estimate: MemoryEstimate) -> int:
    return max(peak.device_bytes for peak in estimate.phases.values())


def _peak_json(peak: MemoryPeak) -> dict[str, Any]:
    return {
        "components": {str(name): peak.components.get(name, 0) for name in Component},
        "peak_allocated_bytes": peak.allocated_bytes,
        "peak_reserved_bytes": peak.reserved_bytes,
        "device_peak_bytes": peak.device_bytes,
        "peak_module": peak.module,
    }
