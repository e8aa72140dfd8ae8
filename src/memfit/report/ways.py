"""A strategy with its settings in a few words, for tables in which plans stand side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from memfit.messages import t
from memfit.reasons import called

if TYPE_CHECKING:
    from memfit.planner.plan import Plan
    from memfit.strategies import Strategy


def settings_in_words(plan: Plan) -> dict[str, str]:
    """Every strategy of a plan by its name, and how its batches are cut."""
    said = {one.name: strategy_in_words(one) for one in plan.strategies}
    tokens = plan.micro_batching.max_tokens
    if tokens is not None:
        said["micro_batching"] = t("planned.way.micro_batching", tokens=f"{tokens:,}")
    return said


def strategy_in_words(strategy: Strategy) -> str:
    """What it does with these settings; the name the planner has for it where it has none."""
    say = _SAID.get(strategy.name)
    return called(strategy.name) if say is None else say(strategy)


def difference_in_words(these: Mapping[str, str], those: Mapping[str, str]) -> str:
    """What one plan does that another does not, then what it leaves."""
    more = [words for name, words in these.items() if those.get(name) != words]
    less = [t("planned.way.without", what=those[name]) for name in those if name not in these]
    return t("planned.way.comma").join([*more, *less])


def _plain(key: str, *fields: str) -> Callable[[Any], str]:
    return lambda one: t(f"planned.way.{key}", **{name: getattr(one, name) for name in fields})


def _layers(key: str) -> Callable[[Any], str]:
    """With the number of layers, or for all of them."""

    def say(one: Any) -> str:
        what = f"planned.way.{key}.{one.part}" if key == "checkpointing" else f"planned.way.{key}"
        if one.layers is None:
            return t(f"{what}.all")
        several = t("planned.way.layers", count=one.layers)
        return t(what, layers=t("planned.way.layers.one") if one.layers == 1 else several)

    return say


_SAID: Mapping[str, Callable[[Any], str]] = {
    "checkpointing": _layers("checkpointing"),
    "activation_offload": _layers("activation_offload"),
    "lowbit_adamw": _plain("lowbit_adamw", "master_bits"),
    "gradient_release": lambda one: t(f"planned.way.gradient_release.{one.mode}"),
    "state_offload": lambda one: t(
        "planned.way.state_offload.gradients" if one.gradients else "planned.way.state_offload"
    ),
    "optimizer_offload": lambda one: t(
        "planned.way.optimizer_offload.weights" if one.weights else "planned.way.optimizer_offload"
    ),
    "half_precision": _plain("half_precision", "dtype"),
    "small_state_optimizer": _plain("small_state_optimizer", "rule"),
    "lora": _plain("lora", "rank"),
    "freezing": _plain("freezing", "what"),
    "truncation": _plain("truncation", "max_length"),
}
