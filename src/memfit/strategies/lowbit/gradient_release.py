"""What becomes of gradients between backward and the update, beside the low-bit optimizer.

    kept8   added up in 8 bits, clipped by the true global norm         1 byte a parameter
    host    added up in host memory, clipped by the true global norm    none on the device

Without this strategy they are kept in 2 bytes, as any training loop does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memfit.errors import ConfigError
from memfit.i18n import N_, Message, t
from memfit.strategies.base import Fidelity, PlanFigures, Setup, Strategy
from memfit.strategies.lowbit.gradient_sinks import KeptInt8
from memfit.strategies.lowbit.host_sink import HostGradients
from memfit.units import gb

Mode = Literal["kept8", "host"]

USED_UP_IN_BACKWARD = N_(
    "gradients are no longer used up inside backward: instead of {value} take 'kept8', or 'host' "
    "to have none on the card"
)

_IN_WORDS = {
    "kept8": N_("gradients in 8 bits"),
    "host": N_("gradients in host memory"),
}

_EXPLAINED = {
    "kept8": N_(
        "gradients kept in 8 bits, because the global norm is needed to clip at "
        "{norm}: saves {saved}"
    ),
    "kept8, summed": N_("gradients of several micro-batches are added up in 8 bits: saves {saved}"),
    "host": N_(
        "gradients wait in host memory, {saved} of them; the true norm is still clipped at {norm}"
    ),
}


@dataclass(frozen=True, slots=True)
class GradientRelease(Strategy):
    """How gradients wait for the update."""

    name = "gradient_release"
    title = N_("releasing gradients")
    reason = "gradients wait for the update in 8 bits or in host memory"
    shrinks = ("gradients",)

    mode: Mode = "kept8"

    def __post_init__(self) -> None:
        if self.mode in ("two_pass", "release"):
            raise ConfigError(USED_UP_IN_BACKWARD, value=repr(self.mode))
        if self.mode not in _IN_WORDS:
            raise ConfigError("there is no way {mode} of keeping gradients", mode=repr(self.mode))

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.ROUNDING

    def in_words(self) -> str:
        return t(_IN_WORDS[self.mode])

    def explain(self, plan: PlanFigures) -> str:
        clips = plan.task.args.max_grad_norm or 0
        kept = 1.0 if self.mode == "kept8" else 2.0
        mode: str = self.mode
        if mode == "kept8" and not clips:
            mode = "kept8, summed"
        saved = gb(kept * plan.trainable_parameters)
        return Message(_EXPLAINED[mode], norm=f"{clips:g}", saved=saved)

    def unavailable(self, setup: Setup) -> str:
        if setup.make_optimizer is None:
            return Message("it needs the low-bit optimizer, which reads gradients from there")
        if setup.ranks > 1:
            return Message("it takes gradients before those of several processes are summed")
        return ""

    def change(self, setup: Setup) -> None:
        setup.make_sink = KeptInt8 if self.mode == "kept8" else HostGradients
