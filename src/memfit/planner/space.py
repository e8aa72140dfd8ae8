"""Which ways of training there are for a task, a card and what the user allows.

A way is one option of every axis in AXES and one limit of the micro-batches. To let the planner
use another strategy, add it to the axis it is an alternative on (or make a new axis), and, if it
stores or does something new, to pricer.py. What cannot stand together is said by the
strategies' own `conflicts`; what makes no sense together, and how batches are cut, by space.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from memfit.engine.micro_batches import MicroBatching
from memfit.errors import ConfigError, nearest
from memfit.memory.cards import DeviceProfile
from memfit.planner.candidates import Candidate, Workload
from memfit.planner.workload import batches_of
from memfit.strategies import (
    ActivationOffload,
    Checkpointing,
    CudaGraphs,
    Fidelity,
    Freezing,
    FrozenFeatures,
    FusedAttention,
    FusedLayers,
    GradientRelease,
    HalfPrecision,
    Lora,
    LowBitAdamW,
    OptimizerOffload,
    Packing,
    SmallStateOptimizer,
    SmallWorkspace,
    StateOffload,
    Strategy,
    Truncation,
    ordered,
)
from memfit.strategies.base import CANNOT_BE_USED
from memfit.strategies.truncation import choose_length
from memfit.text import Message

Option = tuple[Strategy, ...]

_PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Into how many micro-batches the largest batch may be cut."""


def together(strategies: Option, free: Option) -> Option | None:
    """All of them in their order; None where two conflict. Free ones give way."""
    names = {one.name for one in strategies}
    added = [
        one
        for one in free
        if not one.conflicts & names
        and not any(one.name in other.conflicts for other in strategies)
    ]
    try:
        return tuple(ordered([*strategies, *added]))
    except ConfigError:
        return None


def senseless(strategies: Option) -> bool:
    """Whether one of them would have nothing to do beside the others."""
    kinds = {type(one): one for one in strategies}
    release = kinds.get(GradientRelease)
    few_learn = any(kind in kinds for kind in (Lora, Freezing, FrozenFeatures))
    few = (OptimizerOffload, SmallStateOptimizer, StateOffload)
    if few_learn and (release or any(kind in kinds for kind in few)):
        return True  # gradients and state are small already
    again = kinds.get(Checkpointing)
    if StateOffload in kinds and isinstance(again, Checkpointing) and again.part == "mlp":
        return True  # whole layers are computed again before the bus is used
    hosted = kinds.get(OptimizerOffload)
    # The last resort: weights on the host go with all layers recomputed, or with none.
    last = isinstance(hosted, OptimizerOffload) and hosted.weights
    if last and (ActivationOffload in kinds or (again is not None and again != Checkpointing())):
        return True
    frozen = kinds.get(Freezing)
    nothing_kept = FrozenFeatures in kinds or (
        isinstance(frozen, Freezing) and frozen.what == "encoder"
    )
    if nothing_kept and (Checkpointing in kinds or ActivationOffload in kinds):
        return True
    if CudaGraphs in kinds:
        host = isinstance(release, GradientRelease) and release.mode == "host"
        return host or LowBitAdamW not in kinds or Packing not in kinds
    return False


def wasteful(strategies: Option, every: set[Strategy]) -> bool:
    """Whether it holds scratch memory that costs nothing to leave out: graphs parse no setting."""
    kinds = {type(one) for one in strategies}
    return CudaGraphs in kinds and SmallWorkspace not in kinds and SmallWorkspace() in every


def limits_for(workload: Workload, strategies: Option) -> list[MicroBatching]:
    """The whole effective batch at once, or in ever smaller parts down to the longest row."""
    whole = [MicroBatching()]
    if needs_whole_batches(strategies):
        return whole
    batches = batches_of(workload, strategies)
    longest = batches.longest_tokens
    if any(isinstance(one, Packing) for one in strategies):
        most = batches.worst_tokens
        counts = {batches.usual_most_tokens(), *(-(-most // parts) for parts in _PARTS)}
    else:
        rows = min(workload.effective_rows, len(workload.lengths))
        most = rows * longest
        counts = {-(-rows // parts) * longest for parts in _PARTS}
    smaller = sorted({max(one, longest) for one in counts} - {most}, reverse=True)
    return whole + [MicroBatching(max_tokens=one) for one in smaller if one < most]


def needs_whole_batches(strategies: Option) -> bool:
    """Whether a step of several micro-batches is another update rule, or is not captured."""
    release = next((one for one in strategies if isinstance(one, GradientRelease)), None)
    if release is None:
        # Gradients kept in `.grad` would be the graph's own memory, written anew each time.
        return any(isinstance(one, CudaGraphs) for one in strategies)
    return release.mode == "two_pass" or (release.mode == "release" and not release.accumulate)


Judge = Callable[[Option], str]
"""Why these strategies cannot be used for the task on the card; empty where they can."""

ALLOWABLE = ("optimizer", "lora", "freeze", "truncate")
"""What lowers the fidelity below `rounding`, by the name it is allowed by."""

_CUT_SHARES = (0.05, 0.2)
"""Shares of the rows that a shorter length may cut."""


@dataclass(frozen=True)
class PlanRequest:
    """What is to be trained, where, and what may be done for it."""

    workload: Workload
    card: DeviceProfile | None
    judge: Judge
    exact: bool = False
    allow: frozenset[str] = frozenset()
    left_out: dict[str, str] = field(default_factory=dict)
    """For every strategy that cannot be used here, why not."""

    def __post_init__(self) -> None:
        for name in sorted(self.allow - set(ALLOWABLE)):
            known = ", ".join(ALLOWABLE)
            raise ConfigError(
                Message(
                    "cannot allow {name}; {known}.{hint}",
                    name=repr(name),
                    known=known,
                    hint=nearest(name, ALLOWABLE),
                )
            )

    @cached_property
    def depth(self) -> int:
        """Layers a text passes."""
        config: Any = self.workload.config.get_text_config()
        return int(config.num_hidden_layers) * int(getattr(config, "inner_group_num", 1))

    @cached_property
    def half(self) -> Literal["bfloat16", "float16"]:
        """The half precision this device computes in."""
        return "bfloat16" if self.card is None or self.card.has_bf16 else "float16"

    def works(self, *strategies: Strategy) -> bool:
        """Whether these can be used; of what cannot, the reason is kept."""
        if strategies[-1].fidelity is not Fidelity.EXACT and self.exact:
            return False
        if self._good.issuperset(strategies):
            return True
        reason = self.judge(strategies)
        if reason:
            name = strategies[-1].name
            self.left_out.setdefault(name, _without_name(name, reason))
        else:
            self._good.update(strategies)
        return not reason

    @cached_property
    def _good(self) -> set[Strategy]:
        """Those known to work: many are asked for at once, since a question builds a model."""
        good: set[Strategy] = set()
        for asked, alike in _usual(self):
            if not self.judge(asked):
                good.update((*asked, *alike))
        return good

    def usable(self, options: Iterable[Option], beside: Option = ()) -> list[Option]:
        """Those of the options that can be used beside these strategies."""
        return [one for one in options if not one or self.works(*beside, *one)]

    def given(self, name: str) -> bool:
        """Whether the user set this training argument."""
        return name in self.workload.user_set


def _usual(asked: PlanRequest) -> list[tuple[Option, Option]]:
    """Strategies that work together on most tasks, and those that then work too."""
    layers: Option = (Packing(), Checkpointing())
    half: Option = (Packing(), Checkpointing(part="mlp"))
    if asked.card is None:
        return [(layers, ()), (half, ())]
    layers, half = (*layers, FusedLayers()), (*half, ActivationOffload())
    if asked.exact:
        return [(layers, ()), (half, ()), ((OptimizerOffload(True),), (OptimizerOffload(),))]
    stored = LowBitAdamW(dtype=asked.half)
    slower = (GradientRelease("two_pass"), GradientRelease("host"))
    alike = (LowBitAdamW(16, asked.half), *slower)
    hosted = OptimizerOffload(True, "bfloat16")
    kept = GradientRelease("kept8")
    return [
        ((*layers, stored, kept, CudaGraphs()), alike),
        ((stored, kept, StateOffload(gradients=True)), (StateOffload(),)),
        (half, ()),
        ((hosted,), (OptimizerOffload(dtype="bfloat16"),)),
    ]


def candidates(
    asked: PlanRequest, *, having: Sequence[str] = (), also: Option = ()
) -> Iterator[Candidate]:
    """Every way of training, the plainest first.

    Only those with one of the strategies `having` where any are named; each with all of `also`.
    """
    free = _free(asked)
    options = [axis(asked) for axis in AXES]
    every = {one for axis in options for option in axis for one in option}
    for chosen in itertools.product(*options):
        strategies = (*itertools.chain(*chosen), *also)
        if having and not any(one.name in having for one in strategies):
            continue
        whole = together(strategies, free)
        if whole is None or senseless(whole) or wasteful(whole, every):
            continue
        for limits in limits_for(asked.workload, whole):
            yield Candidate(whole, limits)


# ------------------------------------------------------------------------------- the axes


def _learning(asked: PlanRequest) -> list[Option]:
    """Which weights learn."""
    options: list[Option] = [()]
    if asked.workload.freeze is None and asked.workload.lora is None:
        if "freeze" in asked.allow:
            frozen: list[Option] = [(Freezing("embeddings"),), (Freezing("encoder"),)]
            frozen.append((Freezing("encoder"), FrozenFeatures()))
            options += asked.usable(frozen)
        if "lora" in asked.allow:
            options += asked.usable([(Lora(),)])
    elif asked.workload.freeze == "encoder" and "freeze" in asked.allow:
        options += asked.usable([(FrozenFeatures(),)])
    return options


def _texts(asked: PlanRequest) -> list[Option]:
    """How long texts may be."""
    if "truncate" not in asked.allow:
        return [()]
    lengths = asked.workload.lengths
    shorter = {choose_length(lengths, cut_at_most=share).max_length for share in _CUT_SHARES}
    shorter.add(max(8, asked.workload.longest_tokens // 2 // 8 * 8))
    fewer = sorted((one for one in shorter if one < max(lengths)), reverse=True)
    return [(), *asked.usable((Truncation(one),) for one in fewer)]


def _updating(asked: PlanRequest) -> list[Option]:
    """In which precision is computed, and how weights are stored and stepped.

    Where the low-bit optimizer can be used, float32 weights are left out: the same arithmetic
    with more memory and more traffic, so slower and larger on any card.
    """
    low_bit = _low_bit(asked) if asked.card is not None else []
    halved = _half_precision(asked) if not low_bit else []
    options: list[Option] = low_bit or [(), *halved]
    if asked.card is None:
        return options
    # On the host weights move while the gradient is still coming: nothing can be left out then.
    hosts = not asked.workload.skips_bad_steps
    if not low_bit and hosts:
        hosted = [(OptimizerOffload(weights=weights),) for weights in (False, True)]
        for one in asked.usable(hosted):
            options += [one, *((*half, *one) for half in halved)]
    if hosts and asked.half == "bfloat16" and not _refused(asked, "bf16"):
        bf16 = [(OptimizerOffload(weights=which, dtype="bfloat16"),) for which in (False, True)]
        options += asked.usable(bf16)
    if "optimizer" in asked.allow:
        small = asked.usable([(SmallStateOptimizer(),)])
        options += [*small, *((*half, *one) for half in halved for one in small)]
    return options


def _keeping(asked: PlanRequest) -> list[Option]:
    """What layers keep for backward, recompute, or leave in host memory."""
    depth = asked.depth
    options: list[Option] = [()]
    recomputed = bool(asked.workload.args.gradient_checkpointing)
    if not recomputed and not asked.given("gradient_checkpointing"):
        if asked.works(Checkpointing()):
            options += [(Checkpointing(count if count < depth else None),) for count in _up(depth)]
        # Where a layer has no such half, layers are still recomputed: nothing is left out.
        if not asked.judge((Checkpointing(part="mlp"),)):
            counts = [count if count < depth else None for count in _up(depth)]
            options += [(Checkpointing(count, "mlp"),) for count in counts]
    if asked.card is not None and asked.works(ActivationOffload()):
        if not recomputed:
            shares = sorted({max(depth * share // 4, 1) for share in (1, 2, 3)})
            options += [(ActivationOffload(count),) for count in shares]
        options.append((ActivationOffload(),))
        if (Checkpointing(),) in options:
            options.append((Checkpointing(), ActivationOffload()))
    return options


def _launching(asked: PlanRequest) -> list[Option]:
    """Kernels launched one by one, or replayed."""
    if asked.card is None or asked.exact:
        return [()]  # graphs capture the low-bit optimizer's step
    beside = (Packing(), LowBitAdamW(dtype=asked.half))
    return [(), *asked.usable([(CudaGraphs(),)], beside)]


def _scratch(asked: PlanRequest) -> list[Option]:
    """The matrix libraries' scratch memory: as it is, or small."""
    return [(), *asked.usable([(SmallWorkspace(),)])] if asked.card is not None else [()]


AXES: tuple[Callable[[PlanRequest], list[Option]], ...] = (
    _learning,
    _texts,
    _updating,
    _keeping,
    _launching,
    _scratch,
)


def _free(asked: PlanRequest) -> Option:
    """Strategies that cost neither time nor fidelity, wherever they can be used."""
    packs = asked.works(Packing())
    free: list[Strategy] = [Packing()] if packs else []
    config: Any = asked.workload.config
    eager = getattr(config, "_attn_implementation", None) == "eager"
    if (
        not packs
        and eager
        and not asked.given("attn_implementation")
        and asked.works(FusedAttention())
    ):
        free.append(FusedAttention())
    if asked.card is not None and asked.works(*free, FusedLayers()):
        free.append(FusedLayers())
    return tuple(free)


# --------------------------------------------------------------------- parts of the axes


def _without_name(name: str, reason: str) -> str:
    """Returns the strategy's own reason, from the sentence it refuses with."""
    if (
        isinstance(reason, Message)
        and reason.text == CANNOT_BE_USED
        and reason.values["strategy"] == name
    ):
        bare: str = reason.values["reason"]
        return bare
    return reason


def _half_precision(asked: PlanRequest) -> list[Option]:
    if asked.card is None:
        from memfit.strategies.half_precision import has_fast_bf16

        if not has_fast_bf16():
            asked.left_out["half_precision"] = Message("this CPU has no bfloat16 instructions")
            return []
    if _refused(asked, "bf16" if asked.half == "bfloat16" else "fp16"):
        return []
    return asked.usable([(HalfPrecision(asked.half),)])


def _low_bit(asked: PlanRequest) -> list[Option]:
    """The low-bit optimizer with each way of keeping gradients until the norm is known."""
    if _refused(asked, "bf16" if asked.half == "bfloat16" else "fp16"):
        return []
    if not asked.works(LowBitAdamW(dtype=asked.half)):
        return []
    clips = (asked.workload.args.max_grad_norm or 0) > 0
    ways: list[Option] = [
        (),
        (GradientRelease("kept8"),),
        (GradientRelease("two_pass"),),
        (GradientRelease("host"),),
    ]
    if not clips:
        ways.append((GradientRelease("release"),))
    if "optimizer" in asked.allow:
        clip: Literal["none", "predicted"] = "predicted" if clips else "none"
        ways.append((GradientRelease("release", clip=clip, accumulate=True),))
        if clips:
            ways.append((GradientRelease("release", clip=clip),))
    options: list[Option] = []
    for bits in (24, 16):
        stored = LowBitAdamW(24 if bits == 24 else 16, asked.half)
        for way in asked.usable(ways, (stored,)):
            options += [(stored, *way), *((stored, *way, away) for away in _away(asked, way))]
    return options


def _away(asked: PlanRequest, way: Option) -> list[Strategy]:
    """How the low-bit state may lie in host memory, where gradients wait in this way."""
    modes = [one.mode for one in way if isinstance(one, GradientRelease)]
    if modes not in ([], ["kept8"], ["release"]):
        return []  # those are slow already, or keep nothing on the card
    places = [StateOffload(), *([StateOffload(gradients=True)] if modes == ["kept8"] else [])]
    stored = LowBitAdamW(dtype=asked.half)
    return [one for one in places if asked.works(stored, *way, one)]


def _refused(asked: PlanRequest, name: str) -> bool:
    """Whether the user said no to a precision."""
    return asked.given(name) and not getattr(asked.workload.args, name)


def _up(depth: int) -> range:
    return range(1, depth + 1)
