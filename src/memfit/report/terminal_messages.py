"""The words of the terminal's tables, in English and in Chinese."""

from __future__ import annotations

from collections.abc import Mapping

MESSAGES: Mapping[str, Mapping[str, str]] = {
    "memory": {"en": "Memory", "zh": "显存"},
    "bar.within": {
        "en": "{bytes} of {budget}, {share}",
        "zh": "{bytes}，预算 {budget}，{share}",
    },
    "bar.of": {"en": "{bytes} of {budget}, ", "zh": "{bytes}，预算 {budget}，"},
    "bar.over": {"en": "{bytes} too much", "zh": "超出 {bytes}"},
    "rows": {"en": "on {rows} rows", "zh": "共 {rows} 行"},
    "rows.split": {
        "en": "{train} to train on, {validation} to validate",
        "zh": "训练 {train}，验证 {validation}",
    },
    "left.text": {
        "en": "{rows}; left out {no_text} without text",
        "zh": "{rows}；略去没有文本的 {no_text} 行",
    },
    "left.label": {
        "en": "{rows}; left out {no_label} without label",
        "zh": "{rows}；略去没有标签的 {no_label} 行",
    },
    "left.both": {
        "en": "{rows}; left out {no_text} without text and {no_label} without label",
        "zh": "{rows}；略去没有文本的 {no_text} 行和没有标签的 {no_label} 行",
    },
    "class": {"en": "class", "zh": "类别"},
    "class.rows": {"en": "rows", "zh": "行数"},
    "matrix": {"en": "true ↓ predicted →", "zh": "真实 ↓ 预测 →"},
    "fact.result": {"en": "result", "zh": "结果"},
    "fact.training": {"en": "training", "zh": "训练"},
    "fact.predicted": {"en": "predicted", "zh": "预测"},
    "fact.measured": {"en": "measured", "zh": "实测"},
    "fact.model": {"en": "model", "zh": "模型"},
    "fact.report": {"en": "report", "zh": "报告"},
    "fact.summary": {"en": "summary", "zh": "汇总"},
    "fact.columns": {"en": "columns", "zh": "列"},
    "fact.rows": {"en": "rows", "zh": "行数"},
    "fact.classes": {"en": "classes", "zh": "类别"},
    "fact.note": {"en": "note", "zh": "注意"},
    "fact.tokens": {"en": "tokens", "zh": "词元"},
    "peak": {"en": "{bytes} at the peak", "zh": "峰值 {bytes}"},
    "peak.step": {
        "en": "{bytes} at the peak of step {step}",
        "zh": "第 {step} 步的峰值 {bytes}",
    },
    "peak.share": {"en": "{peak}, {share} of the budget", "zh": "{peak}，占预算的 {share}"},
    "status.finished": {"en": "finished", "zh": "已完成"},
    "status.running": {"en": "running", "zh": "进行中"},
    "status.stopped": {"en": "stopped", "zh": "已停止"},
    "status.failed": {"en": "failed", "zh": "失败"},
    "status.waiting": {"en": "waiting", "zh": "等待中"},
    "many.dataset": {"en": "dataset", "zh": "数据集"},
    "many.rows": {"en": "rows", "zh": "行数"},
    "many.time": {"en": "time", "zh": "时间"},
    "many.memory": {"en": "memory", "zh": "显存"},
    "many.status": {"en": "status", "zh": "状态"},
    "steps": {"en": "{steps:,} steps", "zh": "{steps:,} 步"},
    "epoch": {"en": "{epochs:g} epoch", "zh": "{epochs:g} 轮"},
    "epochs": {"en": "{epochs:g} epochs", "zh": "{epochs:g} 轮"},
    "classes.more": {"en": "and {count} more", "zh": "还有 {count} 类"},
    "duplicates": {
        "en": "{rows} validation rows repeat a text that is also trained on, which flatters the "
        "metrics",
        "zh": "有 {rows} 行验证文本也在训练集里，指标会偏高",
    },
    "column.text": {"en": "text {name}", "zh": "文本 {name}"},
    "column.pair": {"en": "pair {name}", "zh": "句对 {name}"},
    "column.label": {"en": "label {name}", "zh": "标签 {name}"},
    "task.single_label": {"en": "single-label", "zh": "单标签"},
    "task.multi_label": {"en": "multi-label", "zh": "多标签"},
    "task.regression": {"en": "regression", "zh": "回归"},
    "lengths.whole": {
        "en": "median {median}, 90 % up to {most}, longest {longest}; max_length {length} cuts "
        "none",
        "zh": "中位数 {median}，90 % 不超过 {most}，最长 {longest}；max_length {length} 不截断",
    },
    "lengths.cut": {
        "en": "median {median}, 90 % up to {most}, longest {longest}; max_length {length} cuts "
        "{rows} rows ({share})",
        "zh": "中位数 {median}，90 % 不超过 {most}，最长 {longest}；"
        "max_length {length} 截断 {rows} 行（{share}）",
    },
}
