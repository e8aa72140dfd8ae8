"""What the strategies of a measured plan are called, those that memfit no longer has included."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from memfit import strategies
from memfit.i18n import language
from memfit.strategies import by_name
from memfit.strategies.retired import current_settings

# docs/history.md says why each went.
RETIRED = {
    "sharded_state": {
        "en": "the optimizer's state divided over the ranks",
        "zh": "优化器状态分摊到各进程",
    },
    "two_pass": {"en": "backward twice", "zh": "反向两遍"},
    "mlp": {"en": "the MLP half of {count} recomputed", "zh": "{count} 层的 MLP 部分重计算"},
}


def strategy_words(name: str, settings: Mapping[str, Any]) -> str:
    """What one strategy of a plan does, in the language that is spoken."""
    spoken = language()
    if name in RETIRED:
        return RETIRED[name][spoken]
    if settings.get("mode") in RETIRED:
        return RETIRED[settings["mode"]][spoken]
    if settings.get("part") == "mlp":
        layers = settings["layers"]
        count = f"{layers} layers" if layers > 1 else "one layer"
        return RETIRED["mlp"][spoken].format(count=count if spoken == "en" else layers)
    return str(by_name(name)(**current_settings(name, settings, name)).in_words())


def strategy_of(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the settings of a strategy that is written as Python: Packing()."""
    call: Any = ast.parse(text, mode="eval").body
    kind = getattr(strategies, call.func.id)
    return kind.name, {one.arg: ast.literal_eval(one.value) for one in call.keywords}
