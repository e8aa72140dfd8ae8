"""What training says while it runs, in English and in Chinese: the bar, and adjustments."""

from __future__ import annotations

from collections.abc import Mapping

MESSAGES: Mapping[str, Mapping[str, str]] = {
    "bar": {"en": "training", "zh": "训练中"},
    "begin": {"en": "training: {steps} steps", "zh": "训练：{steps} 步"},
    "begin.about": {
        "en": "training: {steps} steps, about {time}",
        "zh": "训练：{steps} 步，约 {time}",
    },
    "total": {
        "en": "training will take about {time}, evaluation aside",
        "zh": "训练约需 {time}，评估另计",
    },
    "total.first": {
        "en": "training will take about {time} by the first step, evaluation aside",
        "zh": "按第一步估计，训练约需 {time}，评估另计",
    },
    "step": {"en": "step {step}/{steps}", "zh": "第 {step}/{steps} 步"},
    "epoch": {"en": "epoch {epoch:.2f}: {metric}", "zh": "第 {epoch:.2f} 轮：{metric}"},
    "metric": {"en": "{name} {value}", "zh": "{name} {value}"},
    "name.loss": {"en": "loss", "zh": "损失"},
    "name.accuracy": {"en": "accuracy", "zh": "准确率"},
    "name.mse": {"en": "mse", "zh": "均方误差"},
    "name.mae": {"en": "mae", "zh": "平均绝对误差"},
    "process": {"en": "process {now}", "zh": "进程 {now}"},
    "memory": {"en": "memory {now} (peak {peak})", "zh": "显存 {now}（峰值 {peak}）"},
    "memory.budget": {
        "en": "memory {now} (peak {peak} of {budget})",
        "zh": "显存 {now}（峰值 {peak}，预算 {budget}）",
    },
    "speed": {"en": "{tokens:,.0f} tokens/s", "zh": "{tokens:,.0f} 词元/秒"},
    "left": {"en": "{time} left", "zh": "剩余 {time}"},
    "adjusted": {
        "en": "step {step}: {why}: {before} -> {after}",
        "zh": "第 {step} 步：{why}：{before} -> {after}",
    },
    "why.memory": {"en": "out of memory ({failed})", "zh": "显存不足（{failed}）"},
    "why.evaluation": {"en": "out of memory in evaluation", "zh": "评估时显存不足"},
    "why.rehearsal": {
        "en": "the largest batch was tried and did not fit ({failed})",
        "zh": "试跑最大的批次，放不下（{failed}）",
    },
    "why.less": {"en": "less memory is free", "zh": "空闲显存变少了"},
    "why.more": {"en": "more memory is free", "zh": "空闲显存变多了"},
    "why.spilled": {
        "en": "{bytes} were moved to shared memory",
        "zh": "有 {bytes} 被移到共享内存",
    },
    "why.room": {"en": "there is room", "zh": "还有余量"},
    "limit": {"en": "a limit of {bytes}", "zh": "上限 {bytes}"},
    "again": {"en": "once more", "zh": "再试一次"},
    "way.whole": {"en": "whole batches", "zh": "整个批次"},
    "way.rows": {"en": "{rows:,} rows at once", "zh": "一次 {rows:,} 行"},
    "way.tokens": {"en": "{tokens:,} tokens at once", "zh": "一次 {tokens:,} 个词元"},
    "way.both": {
        "en": "{rows:,} rows and {tokens:,} tokens at once",
        "zh": "一次 {rows:,} 行、{tokens:,} 个词元",
    },
    "way.recomputed": {
        "en": "{way}, {layers} layers recomputed",
        "zh": "{way}，{layers} 层重算",
    },
    "way.offloaded": {"en": "{way}, activations offloaded", "zh": "{way}，激活移到主机内存"},
    "stop.memory": {
        "en": "out of memory in step {step}, with nothing left to make smaller ({way}): "
        "{failed}; give it a larger --budget, a shorter --max-length or a smaller model",
        "zh": "第 {step} 步显存不足，已经没有可以再缩小的（{way}）：{failed}；"
        "请给更大的 --budget、更短的 --max-length 或更小的模型",
    },
    "stop.row": {
        "en": "the longest row alone does not fit ({way}): {failed}; raise --budget, or "
        "choose a shorter --max-length or a smaller model",
        "zh": "单独最长的一行也放不下（{way}）：{failed}；请提高 --budget，"
        "或选更短的 --max-length 或更小的模型",
    },
}
