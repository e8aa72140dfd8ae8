"""What becomes of gradients between backward and the update, beside the low-bit optimizer.

    kept8      added up in 8 bits, clipped by the true global norm         1 byte a parameter
    host       added up in host memory, clipped by the true global norm    none on the device
    two_pass   a first backward only for the norm, the update in a second  none, more time
    release    the update inside backward, no norm to clip by              none

Without this strategy they are kept in 2 bytes, as any training loop does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from memfit.errors import ConfigError
from memfit.messages import N_, Message
from memfit.strategies.base import Fidelity, Setup, Strategy

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
        from memfit import optim

        kinds: dict[str, Callable[..., optim.GradientSink]] = {
            "kept8": optim.KeptInt8,
            "host": optim.HostGradients,
            "two_pass": optim.TwoPassRelease,
            "release": partial(optim.GradientRelease, clip=self.clip),
        }
        setup.make_sink = kinds[self.mode]
        setup.single_micro_batch = self.mode == "two_pass" or (
            self.mode == "release" and not self.accumulate
        )
