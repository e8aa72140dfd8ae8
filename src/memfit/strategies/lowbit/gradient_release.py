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
from typing import Any, Literal

from memfit.errors import ConfigError, nearest
from memfit.i18n import N_, Message, t
from memfit.strategies.base import Fidelity, Setup, Strategy
from memfit.strategies.lowbit.gradient_sinks import KeptGradients, KeptInt8, LowBitSink
from memfit.strategies.lowbit.host_sink import HostGradients
from memfit.strategies.lowbit.lowbit_adamw import LowBitAdamW
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.lowbit.releasing_sinks import ReleasedGradients, TwoPassRelease
from memfit.strategies.planning import (
    Axis,
    Combination,
    Effects,
    Half,
    Option,
    PlanFigures,
    PlanQuestion,
    Tier,
    TracePart,
    widened,
)
from memfit.units import gb

Mode = Literal["kept8", "host", "two_pass", "release"]

_TIERS = {"two_pass": Tier.TWO_PASS, "host": Tier.GRADIENTS_ON_HOST}

_IN_WORDS = {
    "kept8": N_("gradients in 8 bits"),
    "host": N_("gradients in host memory"),
    "two_pass": N_("backward twice"),
    "release": N_("gradients released as they come"),
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
    "two_pass": N_(
        "backward runs twice, first for the norm to clip at {norm}, then to "
        "update: no gradient is kept, which saves {saved}"
    ),
    "release": N_("weights are updated inside backward, since nothing is clipped: saves {saved}"),
    "release, predicted": N_(
        "weights are updated inside backward and clipped at {norm} by a norm "
        "predicted from earlier steps: saves {saved}, another update rule, as "
        "you allowed"
    ),
}


@dataclass(frozen=True, slots=True)
class GradientRelease(Strategy):
    """How gradients wait for the update.

    `clip="predicted"` clips by a norm guessed from the steps before: another update rule.
    """

    name = "gradient_release"
    title = N_("releasing gradients")
    reason = "gradients are used as they come instead of being kept for all weights at once"
    shrinks = ("gradients",)
    faster_with = "triton"
    axis = Axis.UPDATING
    permission = "optimizer"
    traced = TracePart.UPDATE

    mode: Mode = "release"
    clip: Literal["none", "predicted"] = "none"
    accumulate: bool = False
    """Whether `release` may add several micro-batches to the moments: another update rule."""

    def __post_init__(self) -> None:
        if self.mode not in ("kept8", "host", "two_pass", "release"):
            raise ConfigError(
                Message("there is no way {mode} of keeping gradients", mode=repr(self.mode))
            )

    @property
    def fidelity(self) -> Fidelity:
        another_rule = self.mode == "release" and (self.clip == "predicted" or self.accumulate)
        return Fidelity.OPTIMIZER if another_rule else Fidelity.ROUNDING

    @property
    def effects(self) -> Effects:
        return Effects(
            takes_gradients=True,
            releases=self.mode in ("release", "two_pass"),
            passes=2 if self.mode == "two_pass" else 1,
            copies=self.mode == "host",
        )

    @classmethod
    def as_used(cls, half: Half) -> Option:
        return (LowBitAdamW(dtype=half), cls("kept8"))

    @classmethod
    def options(cls, asked: PlanQuestion, so_far: list[Option]) -> list[Option]:
        """Each way of keeping gradients until the norm is known, beside the low-bit optimizer."""
        clips = (asked.workload.args.max_grad_norm or 0) > 0
        ways = [cls("kept8"), cls("two_pass"), cls("host")]
        if not clips:
            ways.append(cls("release"))
        if asked.allows(cls):
            clip: Literal["none", "predicted"] = "predicted" if clips else "none"
            ways.append(cls("release", clip=clip, accumulate=True))
            if clips:
                ways.append(cls("release", clip=clip))

        def released(option: Option) -> list[Option]:
            if not Combination(option).effects.state_bytes:
                return []
            return [(*option, *way) for way in asked.usable([(way,) for way in ways], option)]

        return widened(so_far, released)

    def is_pointless(self, beside: Combination) -> bool:
        return beside.effects.few_learn

    def needs_whole_batches(self, beside: Combination) -> bool:  # noqa: ARG002
        return self.mode == "two_pass" or (self.mode == "release" and not self.accumulate)

    def tier(self, beside: Combination) -> Tier:  # noqa: ARG002
        return _TIERS.get(self.mode, Tier.USUAL)

    @property
    def is_rare(self) -> bool:
        return self.mode not in ("kept8", "release")

    def in_words(self) -> str:
        return t(_IN_WORDS[self.mode])

    def explain(self, plan: PlanFigures) -> str:
        clips = plan.workload.args.max_grad_norm or 0
        kept = 1.0 if self.mode == "kept8" else 2.0
        mode: str = self.mode
        if mode == "kept8" and not clips:
            mode = "kept8, summed"
        if mode == "release" and self.clip == "predicted":
            mode = "release, predicted"
        saved = gb(kept * plan.learning_parameters)
        return Message(_EXPLAINED[mode], norm=f"{clips:g}", saved=saved)

    def unavailable(self, setup: Setup) -> str:
        if setup.make_optimizer is None:
            return Message("it needs the low-bit optimizer, whose update can run inside backward")
        if setup.ranks.world_size > 1 and self.mode == "two_pass":
            return Message("several processes exchange their gradients once a step, not twice")
        if setup.ranks.world_size > 1 and self.accumulate:
            return Message("several processes may run different numbers of micro-batches")
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
        setup.single_micro_batch = self.needs_whole_batches(Combination((self,)))


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
