"""One line of memory: the peak of a step, by its tokens and by the layers that are not recomputed.

    peak = fixed + tokens x token + tokens x kept layers x layer

The planner fits it to a few traces to know which settings to trace next; a trace decides. The guard
corrects it once, by what the rehearsal measured, and uses it to cut a batch that does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """The peak of one step, traced or measured."""

    tokens: int
    """Tokens of the largest micro-batch."""
    kept_layers: int
    """Layers whose activations stay on the device until backward."""
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """The peak of a step as a linear function of its settings."""

    fixed_bytes: float
    """Held whatever the micro-batch: weights, gradients, optimizer state, context."""
    token_bytes: float
    """Held for each token, whatever is recomputed."""
    layer_token_bytes: float
    """Held for each token in each layer that is not recomputed."""

    @classmethod
    def through(cls, points: Sequence[MemoryPoint]) -> MemoryLine:
        """Fits the line by least squares; fewer than three points leave coefficients at zero."""
        import numpy

        tokens = numpy.array([point.tokens for point in points], dtype=float)
        layers = numpy.array([point.kept_layers for point in points], dtype=float)
        peaks = numpy.array([point.peak_bytes for point in points], dtype=float)
        columns = numpy.stack([numpy.ones_like(tokens), tokens, tokens * layers], axis=1)
        # Columns of about one size: lstsq cuts off what is small beside the largest.
        scale = numpy.maximum(abs(columns).max(axis=0), 1.0)
        fixed, token, layer = numpy.linalg.lstsq(columns / scale, peaks)[0] / scale
        return cls(float(fixed), max(float(token), 0.0), max(float(layer), 0.0))

    def peak_bytes(self, tokens: int, kept_layers: int) -> float:
        """Returns the peak of a step with these settings."""
        return self.fixed_bytes + tokens * self.bytes_per_token(kept_layers)

    def bytes_per_token(self, kept_layers: int) -> float:
        """Returns what one more token takes while so many layers are kept."""
        return self.token_bytes + kept_layers * self.layer_token_bytes

    def corrected(self, measured: MemoryPoint) -> MemoryLine:
        """Returns the line moved up or down so that it passes through a measurement."""
        off = measured.peak_bytes - self.peak_bytes(measured.tokens, measured.kept_layers)
        return replace(self, fixed_bytes=self.fixed_bytes + off)

    def most_tokens(self, limit_bytes: float, kept_layers: int) -> int:
        """Returns the most tokens of a micro-batch below the limit; 0 where none fits."""
        room_bytes = limit_bytes - self.fixed_bytes
        each_bytes = self.bytes_per_token(kept_layers)
        if room_bytes <= 0:
            return 0
        return int(room_bytes / each_bytes) if each_bytes else 2**31

    def most_kept_layers(self, limit_bytes: float, tokens: int, depth: int) -> int | None:
        """Returns how many of `depth` layers can be kept below the limit; None: not even none."""
        fitting = (n for n in range(depth, -1, -1) if self.peak_bytes(tokens, n) <= limit_bytes)
        return next(fitting, None)
