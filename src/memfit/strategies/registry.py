"""The order in which strategies are applied, memfit's own and those of other packages."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint

from memfit.config.plugins import package_of, strategy_plugins
from memfit.config.schema import ALLOWABLE
from memfit.errors import ConfigError, nearest
from memfit.i18n import Message, add_catalogue
from memfit.strategies.activation_checkpointing import Checkpointing
from memfit.strategies.adafactor import SmallStateOptimizer
from memfit.strategies.base import Setup, Strategy
from memfit.strategies.cuda_graphs import CudaGraphs
from memfit.strategies.freezing import Freezing
from memfit.strategies.frozen_features import FrozenFeatures
from memfit.strategies.fully_sharded import FullySharded
from memfit.strategies.fused.fused_layers import FusedLayers
from memfit.strategies.fused_attention import FusedAttention
from memfit.strategies.half_precision import HalfPrecision
from memfit.strategies.lora import Lora
from memfit.strategies.lowbit.gradient_release import GradientRelease
from memfit.strategies.lowbit.lowbit_adamw import LowBitAdamW
from memfit.strategies.lowbit.state_offload import StateOffload
from memfit.strategies.offload.activation_offload import ActivationOffload
from memfit.strategies.offload.optimizer_offload import OptimizerOffload
from memfit.strategies.packing.packing_strategy import Packing
from memfit.strategies.planning import Half, Option
from memfit.strategies.small_workspace import SmallWorkspace
from memfit.strategies.truncation import Truncation

# First what changes which weights learn from which texts, then the precision, then how a
# layer runs, then how weights are stored and stepped, and last the step as a whole.
ORDER: tuple[type[Strategy], ...] = (
    Freezing,
    Lora,
    Truncation,
    HalfPrecision,
    FrozenFeatures,
    FusedAttention,
    Packing,
    FusedLayers,
    Checkpointing,
    ActivationOffload,
    LowBitAdamW,
    GradientRelease,
    StateOffload,
    OptimizerOffload,
    SmallStateOptimizer,
    FullySharded,
    SmallWorkspace,
    CudaGraphs,
)
"""memfit's own strategies."""

MOST_POINTS_LOST = 0.3
"""The planner leaves out what loses more points of F1 in float16."""

FLOAT16_POINTS: dict[Strategy, float] = {}
"""Points of F1 from fp32 AdamW, of strategies that lose in float16: the mean of the worst of three
models (benchmarks/quality.py --variants no-bf16)."""

_OWN = frozenset(ORDER)

BY_NAME: dict[str, type[Strategy]] = {kind.name: kind for kind in ORDER}


def all_strategies() -> tuple[type[Strategy], ...]:
    """Returns every strategy in its order, those of installed packages where they say."""
    return _with_outside()[0]


def not_loaded() -> dict[str, str]:
    """Returns the names that packages bring and that cannot be used, each with its reason."""
    return _with_outside()[1]


@functools.cache
def _with_outside() -> tuple[tuple[type[Strategy], ...], dict[str, str]]:
    problems: dict[str, str] = {}
    waiting: dict[str, type[Strategy]] = {}
    for name, plugin in strategy_plugins().items():
        try:
            waiting[name] = _loaded(name, plugin)
        except Exception as error:  # whatever another package does when it is imported
            problems[name] = Message(
                "it cannot be loaded from {package}: {error}",
                package=package_of(plugin),
                error=_sentence(error),
            )
    placed, homeless = _placed(ORDER, waiting.values())
    return placed, {**problems, **{kind.name: _no_place(kind) for kind in homeless}}


def _placed(
    order: Sequence[type[Strategy]], kinds: Iterable[type[Strategy]]
) -> tuple[tuple[type[Strategy], ...], list[type[Strategy]]]:
    """Returns the order with each of these after what it follows, and those that follow nothing."""
    made, waiting = list(order), sorted(kinds, key=lambda kind: kind.name)
    while True:
        names = [kind.name for kind in made]
        found = next((kind for kind in reversed(waiting) if kind.follows in names), None)
        if found is None:
            return tuple(made), waiting
        made.insert(names.index(found.follows) + 1, found)
        waiting.remove(found)


def _loaded(name: str, plugin: EntryPoint) -> type[Strategy]:
    kind = plugin.load()
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        raise ConfigError(Message("{value} is no Strategy", value=plugin.value))
    if kind.name != name:
        raise ConfigError(
            Message("its entry point is {name}, its name {other}", name=name, other=kind.name)
        )
    if name in BY_NAME:
        raise ConfigError(Message("memfit has a strategy of that name"))
    if kind.permission not in ("", name, *ALLOWABLE):
        raise ConfigError(
            Message(
                "its permission is {permission}; take its own name or one of {known}",
                permission=repr(kind.permission),
                known=", ".join(ALLOWABLE),
            )
        )
    if kind.catalogue is not None:
        add_catalogue(kind.catalogue)
    return kind


def _sentence(error: Exception) -> str:
    """Returns an error in one line."""
    if isinstance(error, ConfigError):
        return error.reason
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _no_place(kind: type[Strategy]) -> str:
    return Message(
        "it follows {follows}, and there is no such strategy", follows=repr(kind.follows)
    )


def by_name(name: str) -> type[Strategy]:
    """The strategy of that name."""
    if name in BY_NAME:
        return BY_NAME[name]
    known = {kind.name: kind for kind in all_strategies()}
    if name in known:
        return known[name]
    if reason := not_loaded().get(name):
        raise ConfigError(
            Message("there is no strategy {name}: {reason}", name=repr(name), reason=reason)
        )
    raise ConfigError(
        Message("there is no strategy {name}.{hint}", name=repr(name), hint=nearest(name, known))
    )


def called(name: str) -> str:
    """Returns what plans call the strategy of that name; the name itself if it is not known."""
    kinds = [BY_NAME[name]] if name in BY_NAME else all_strategies()
    return next((kind.called() for kind in kinds if kind.name == name), name)


def ordered(strategies: Iterable[Strategy]) -> list[Strategy]:
    """The strategies in the order they are applied; two that conflict are refused."""
    given = list(strategies)
    order = _order_of({type(one) for one in given})
    chosen = sorted(given, key=lambda strategy: order.index(type(strategy)))
    names = [strategy.name for strategy in chosen]
    for strategy in chosen:
        if names.count(strategy.name) > 1:
            raise ConfigError(
                Message("the strategy {name} is given twice", name=repr(strategy.name))
            )
        beside = sorted(strategy.conflicts & set(names))
        if beside:
            raise ConfigError(
                Message(
                    "{name} cannot be used together with {other}",
                    name=strategy.name,
                    other=beside[0],
                )
            )
    return chosen


def _order_of(kinds: set[type[Strategy]]) -> tuple[type[Strategy], ...]:
    """Returns an order that these have a place in, whether or not a package brings them."""
    if kinds <= _OWN:
        return ORDER
    known = all_strategies()
    order, homeless = _placed(known, kinds.difference(known))
    for kind in homeless:
        raise ConfigError(
            Message("{name} cannot be ordered: {reason}", name=kind.name, reason=_no_place(kind))
        )
    return order


def apply_all(strategies: Sequence[Strategy], setup: Setup) -> None:
    """Change the setup by each strategy in turn; one that cannot work here says why."""
    for strategy in ordered(strategies):
        strategy.apply(setup)


# ---- what traces use to ask and compare; a strategy that is not named here only takes longer ----


def loses_in_float16(strategy: Strategy) -> str:
    """Why this strategy is not offered on a card without bfloat16; empty where it is."""
    points = -FLOAT16_POINTS.get(strategy, 0.0)
    if points <= MOST_POINTS_LOST:
        return ""
    return Message("in float16 it loses {points} points of F1", points=f"{points:.1f}")


def asked_together(
    half: Half, *, cuda: bool, triton: bool, exact: bool, ranks: int = 1
) -> list[tuple[Option, Option]]:
    """Returns strategies that work together on most tasks, and those that then work too.

    A question builds a model, so the planner asks for many at once.
    """
    layers: Option = (Packing(), Checkpointing())
    if not cuda:
        return [(layers, ())]
    layers = (*layers, FusedLayers()) if triton else layers
    offloads: Option = (Packing(), ActivationOffload())
    if exact:
        return [(layers, ()), (offloads, ()), ((OptimizerOffload(True),), (OptimizerOffload(),))]
    stored, kept = usual_update(half)
    slower: Option = (GradientRelease("host"),)
    hosted = OptimizerOffload(True, "bfloat16")
    return [
        ((*layers, stored, kept, CudaGraphs()), (LowBitAdamW(16, half), *slower)),
        ((stored, kept, StateOffload(gradients=True)), (StateOffload(),)),
        (offloads, ()),
        ((hosted,), (OptimizerOffload(dtype="bfloat16"),)),
    ]


def usual_update(half: Half) -> Option:
    """Returns the way of updating that layers of half-precision weights are traced with."""
    return (LowBitAdamW(dtype=half), GradientRelease("kept8"))
