"""What becomes of gradients between backward and the update, beside the low-bit optimizer.

kept8      added up in 8 bits, clipped by the true global norm         1 byte a parameter
    host       added up in host memory, clipped by the true global norm    none on the device
    two_pass   a first backward only for the norm, the update in a second  none, more time
    release    the update inside backward, no norm to clip by              none

Without this strategy they are kept in 2 bytes, as any training loop does.

lowbit_optimizer.py      LowBitAdamW: 5 or 4 bytes a parameter, a torch.optim.Optimizer
number_formats.py    how numbers are stored; lowbit_kernels_torch.py and lowbit_kernels_triton.py
compute
small_parameters.py      biases and norms: fp32, flat
gradient_sinks.py      where gradients go: gradient_sinks.py, releasing_sinks.py, host_sink.py
step_scalars.py    fp16 loss scale on the device
number_formats.py    fp32 model -> bf16 or fp16 weights, nothing lost
lowbit_optimizer.py save, load, fp32 export
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from memfit.errors import ConfigError, nearest
from memfit.strategies.base import Fidelity, Setup, Strategy
from memfit.strategies.lowbit.gradient_sinks import KeptGradients, KeptInt8, LowBitSink
from memfit.strategies.lowbit.host_sink import HostGradients
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.releasing_sinks import ReleasedGradients, TwoPassRelease
from memfit.text import N_, Message

Mode = Literal["kept8", "host", "two_pass", "release"]


@dataclass(frozen=True, slots=True)
class GradientRelease(Strategy):
    """How gradients wait for the update.

    `clip="predicted"` clips by a norm guessed from the steps before: another update rule.
    """

    name = "gradient_release"
    title = N_("releasing gradients")
    reason = "gradients are used as they come instead of being kept for all weights at once"
    shrinks = ("gradients",)

    mode: Mode = "release"
    clip: Literal["none", "predicted"] = "none"
    accumulate: bool = False
    """Let `release` add several micro-batches to the moments: another update rule."""

    def __post_init__(self) -> None:
        if self.mode not in ("kept8", "host", "two_pass", "release"):
            raise ConfigError(
                Message("there is no way {mode} of keeping gradients", mode=repr(self.mode))
            )

    @property
    def fidelity(self) -> Fidelity:
        another_rule = self.mode == "release" and (self.clip == "predicted" or self.accumulate)
        return Fidelity.OPTIMIZER if another_rule else Fidelity.ROUNDING

    def unavailable(self, setup: Setup) -> str:
        if setup.make_optimizer is None:
            return Message("it needs the low-bit optimizer, whose update can run inside backward")
        clips = (setup.args.max_grad_norm or 0) > 0
        if self.mode == "release" and clips and self.clip == "none":
            return Message(
                "max_grad_norm={max_grad_norm} would be lost: set it to 0, keep the "
                "gradients (kept8, host, two_pass), or allow clip='predicted'",
                max_grad_norm=setup.args.max_grad_norm,
            )
        return ""

    def change(self, setup: Setup) -> None:
        from memfit.strategies.lowbit import gradient_sinks, host_sink, releasing_sinks

        kinds: dict[str, Callable[..., gradient_sinks.LowBitSink]] = {
            "kept8": gradient_sinks.KeptInt8,
            "host": host_sink.HostGradients,
            "two_pass": releasing_sinks.TwoPassRelease,
            "release": partial(releasing_sinks.ReleasedGradients, clip=self.clip),
        }
        setup.make_sink = kinds[self.mode]
        setup.single_micro_batch = self.mode == "two_pass" or (
            self.mode == "release" and not self.accumulate
        )


SINKS: dict[str, type[LowBitSink]] = {
    sink.name: sink
    for sink in (KeptGradients, KeptInt8, HostGradients, TwoPassRelease, ReleasedGradients)
}
"""Every sink by name; the first that fits the memory is the best in fidelity and time."""


def make_sink(name: str, optimizer: LowBitOptimizer, **settings: Any) -> LowBitSink:
    """Attach the sink of this name: kept, kept8, host, two_pass or release."""
    if name not in SINKS:
        raise ValueError(f"no gradient sink {name!r}; {', '.join(SINKS)}.{nearest(name, SINKS)}")
    return SINKS[name](optimizer, **settings)
