"""What `memfit plan` and a run say about plans, in English and in Chinese."""

from __future__ import annotations

from collections.abc import Mapping

MESSAGES: Mapping[str, Mapping[str, str]] = {
    "given": {"en": "the plan given", "zh": "给定的方案"},
    "untraced": {
        "en": "memory cannot be predicted: {error}",
        "zh": "无法预测显存：{error}",
    },
    "no_longer_fits": {
        "en": "{name} does not fit: it needs {needs} and the budget is {budget}, so {missing} are "
        "missing; make a new one with memfit plan",
        "zh": "{name} 放不下：需要 {needs}，预算 {budget}，缺 {missing}；请用 memfit plan 重新制定",
    },
}
