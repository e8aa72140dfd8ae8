"""A strategy with its settings in a few words, for tables in which plans stand side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from memfit.messages import N_, nt, pt, shown, t

if TYPE_CHECKING:
    from memfit.planner.plan import Plan
    from memfit.strategies import Strategy


def settings_in_words(plan: Plan) -> dict[str, str]:
    """Every strategy of a plan by its name, and how its batches are cut."""
    said = {one.name: strategy_in_words(one) for one in plan.strategies}
    tokens = plan.micro_batching.max_tokens
    if tokens is not None:
        said["micro_batching"] = t("micro-batches of {tokens} tokens", tokens=f"{tokens:,}")
    return said


def strategy_in_words(strategy: Strategy) -> str:
    """What it does with these settings; the name the planner has for it where it has none."""
    say = _SAID.get(strategy.name)
    return shown(strategy.called()) if say is None else say(strategy)


def difference_in_words(these: Mapping[str, str], those: Mapping[str, str]) -> str:
    """What one plan does that another does not, then what it leaves."""
    more = [words for name, words in these.items() if those.get(name) != words]
    less = [t("without {what}", what=those[name]) for name in those if name not in these]
    return pt("clauses", ", ").join([*more, *less])


def _layers(count: int) -> str:
    return nt("one layer", "{count} layers", count)


def _recomputed(one: Any) -> str:
    if one.part == "mlp":
        if one.layers is None:
            return t("the MLP half of every layer recomputed")
        return t("the MLP half of {layers} recomputed", layers=_layers(one.layers))
    if one.layers is None:
        return t("every layer recomputed")
    return t("{layers} recomputed", layers=_layers(one.layers))


def _offloaded(one: Any) -> str:
    if one.layers is None:
        return t("activations in host memory")
    return t("activations of {layers} in host memory", layers=_layers(one.layers))


_RELEASED = {
    "kept8": N_("gradients in 8 bits"),
    "host": N_("gradients in host memory"),
    "two_pass": N_("backward twice"),
    "release": N_("gradients released as they come"),
}


_SAID: Mapping[str, Callable[[Any], str]] = {
    "checkpointing": _recomputed,
    "activation_offload": _offloaded,
    "lowbit_adamw": lambda one: t("{master_bits}-bit masters", master_bits=one.master_bits),
    "gradient_release": lambda one: t(_RELEASED[one.mode]),
    "state_offload": lambda one: t(
        N_("the optimizer's state and gradients in host memory")
        if one.gradients
        else N_("the optimizer's state in host memory")
    ),
    "optimizer_offload": lambda one: t(
        N_("weights and update in host memory") if one.weights else N_("the update in host memory")
    ),
    "half_precision": lambda one: t("computed in {dtype}", dtype=one.dtype),
    "small_state_optimizer": lambda one: pt("settings", "{rule}", rule=one.rule),
    "lora": lambda one: t("LoRA of rank {rank}", rank=one.rank),
    "freezing": lambda one: t("{what} frozen", what=one.what),
    "truncation": lambda one: t("texts cut at {max_length} tokens", max_length=one.max_length),
}
