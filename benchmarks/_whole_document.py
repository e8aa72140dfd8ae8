"""The documents' tables of whole runs, from the file that whole_runs.py writes."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _plan_words import strategy_words
from memfit.i18n import pt, speaking, t

RESULTS = Path(__file__).resolve().parent / "results" / "whole_runs_h200.json"
UNSAID = ("packing", "fused_layers", "small_workspace")
"""Strategies that every plan on that card has, or that say little."""
MODELS = {
    "bert-base": "BERT-Base", "bert-large": "BERT-Large", "roberta-base": "RoBERTa-base",
    "roberta-large": "RoBERTa-large", "xlmr-base": "XLM-R-base", "xlmr-large": "XLM-R-large",
    "electra-base": "ELECTRA-base", "electra-large": "ELECTRA-large",
    "albert-base-v2": "ALBERT-base", "albert-xlarge-v2": "ALBERT-xlarge",
    "distilbert": "DistilBERT", "deberta-v3-base": "DeBERTa-v3-base",
    "deberta-v3-large": "DeBERTa-v3-large", "ernie-base": "ERNIE-base",
    "ernie-large": "ERNIE-large", "modernbert-base": "ModernBERT-base",
    "modernbert-large": "ModernBERT-large", "qwen3-0.6b": "Qwen3-0.6B",
}  # fmt: skip
STOCK_HEADS = {
    "en": (
        "command to saved model", "memfit s", "stock bf16 s", "ratio", "memfit GB", "stock GB",
        "imports to first step s", "time said ÷ taken",
    ),
    "zh": (
        "从命令到存好的模型", "memfit 秒", "原版 bf16 秒", "比值", "memfit GB", "原版 GB",
        "导入后到第一步 秒", "预告时间 ÷ 实际",
    ),
}  # fmt: skip
STOCK_NAMES = {
    "BERT-Large, one epoch, 4GB": {
        "en": "BERT-Large, one epoch, `--budget 4GB`", "zh": "BERT-Large，一轮，`--budget 4GB`",
    },
    "BERT-Base, two epochs, 4GB": {
        "en": "BERT-Base, two epochs, `--budget 4GB`", "zh": "BERT-Base，两轮，`--budget 4GB`",
    },
}  # fmt: skip
SEED_WORDS = {r", seeds from (\d+) on": r"，种子从 \1 起", ", no dropout": "，不用 dropout"}
SEED_HEADS = {
    "en": (
        "model, budget", "the plan chosen", "seeds", "learning rate", "F1", "stock fp32 F1",
        "points", "95 % interval",
    ),
    "zh": (
        "模型、预算", "选中的方案", "种子数", "学习率", "F1", "原版 fp32 的 F1", "差几个百分点",
        "95% 区间",
    ),
}  # fmt: skip
REAL_HEADS = {
    "en": ("run", "the plan chosen", "budget GB", "F1", "stock fp32 F1", "points"),
    "zh": ("训练", "选中的方案", "预算 GB", "F1", "原版 fp32 的 F1", "差几个百分点"),
}
HEADS = {
    "en": ("run", "the plan chosen", "budget GB", "predicted GB", "held GB", "held ÷ predicted"),
    "zh": ("训练", "选中的方案", "预算 GB", "预测 GB", "占用 GB", "占用 ÷ 预测"),
}
WORDS: dict[str, dict[str, str]] = {
    "length": {"en": "length {}", "zh": "长度 {}"},
    "multi": {"en": "multi-label", "zh": "多标签"},
    "regression": {"en": "regression", "zh": "回归"},
    "pairs": {"en": "pairs of texts", "zh": "句对"},
    "killed": {"en": "killed with -9 and resumed", "zh": "用 kill -9 中断后续训"},
    "budget": {"en": "`--budget {}`", "zh": "`--budget {}`"},
    "comma": {"en": ", ", "zh": "，"},
    "lost": {"en": "**lost**", "zh": "**失败**"},
    "does not fit": {"en": "nothing fits, said before training", "zh": "放不下，训练前已说明"},
    "whole": {"en": "nothing needed", "zh": "无需任何手段"},
}
FACT_HEADS = {"en": ("of all runs", ""), "zh": ("全部训练", "")}
FACTS: dict[str, dict[str, str]] = {
    "runs": {"en": "run", "zh": "训练次数"},
    "lost": {"en": "lost", "zh": "失败"},
    "does_not_fit": {"en": "ended before training, since nothing fits", "zh": "训练前说明放不下"},
    "over_budget": {"en": "above the budget, by NVML", "zh": "超出预算（NVML）"},
    "prediction_off_median": {
        "en": "held, off from what was predicted: median",
        "zh": "占用与预测之差：中位数",
    },
    "prediction_off_worst": {"en": "the same: worst", "zh": "同上：最大"},
    "longest_silence_seconds": {
        "en": "longest time without a character on the terminal, s",
        "zh": "终端最长无输出时间（秒）",
    },
}
ACTED_HEADS = {
    "en": (
        "acting as", "model", "the plan chosen", "may reserve GiB", "predicted GiB",
        "reserved GiB", "reserved ÷ predicted",
    ),
    "zh": (
        "模拟的显卡", "模型", "选中的方案", "可预留 GiB", "预测 GiB", "预留 GiB", "预留 ÷ 预测",
    ),
}  # fmt: skip
BETWEEN = {"en": "to", "zh": "到"}


def read(results: Path = RESULTS) -> dict[str, Any]:
    """The result file; nothing where none was committed yet."""
    if not results.is_file():
        return {"runs": []}
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    return found


def runs_table(language: str, found: Mapping[str, Any] | None = None) -> str:
    """What was predicted, and what NVML saw."""
    rows = []
    for run in (found or read())["runs"]:
        sizes = (run[name] for name in ("budget_bytes", "predicted_bytes", "held_bytes"))
        off = run["held_over_predicted"]
        held = "" if off is None else f"{off:.3f}"
        rows.append((name_of(run, language), plan_of(run, language), *map(_gb, sizes), held))
    return _table(HEADS[language], rows, texts=2)


def acted_table(language: str, found: Mapping[str, Any] | None = None) -> str:
    """What torch's allocator reserved on a card that acted as a smaller one."""
    rows = []
    for run in (found or read()).get("acted", []):
        case, off = run["case"], run["held_over_predicted"]
        sizes = (run[name] for name in ("budget_bytes", "predicted_bytes", "held_bytes"))
        told = ("" if size is None else f"{size / 2**30:.2f}" for size in sizes)
        ratio = "" if off is None else f"{off:.3f}"
        names = (case["card"], MODELS.get(case["model"], case["model"]))
        rows.append((*names, plan_of(run, language), *told, ratio))
    return _table(ACTED_HEADS[language], rows, texts=3)


def facts_table(language: str, found: Mapping[str, Any] | None = None) -> str:
    """How many were lost or above their budget, and how far predictions were off."""
    summary = (found or read()).get("summary")
    if not summary:
        return ""
    rows = []
    for name, words in FACTS.items():
        value = summary[name]
        if isinstance(value, list):
            told = str(len(value))
        elif value is None:
            told = ""
        elif "off" in name:
            told = f"{value:.1%}"
        else:
            told = f"{value:,}" if isinstance(value, int) else f"{value:.1f}"
        rows.append((words[language], told))
    return _table(FACT_HEADS[language], rows)


def stock_table(language: str, found: Mapping[str, Any] | None = None) -> str:
    """Whole commands, beside a stock script's."""
    rows = []
    for pair in (found or read()).get("stock", []):
        said = pair["said"]
        sides = [_mean(said[f"{who}_seconds"]) for who in ("memfit", "stock")]
        sizes = (said["memfit_held_bytes"], said["stock_held_bytes"])
        held = (_gb(max((one for one in both if one), default=None)) for both in sizes)
        name = STOCK_NAMES.get(pair["name"], {}).get(language, pair["name"])
        late = _mean(said["first_step_after_imports_seconds"])
        told = _mean(said["said_over_taken"])
        seconds = (f"{one:.1f}" for one in sides)
        rows.append((name, *seconds, f"{said['ratio']:.2f}", *held, f"{late:.1f}", f"{told:.2f}"))
    return _table(STOCK_HEADS[language], rows)


def seeds_table(language: str, found: Mapping[str, Any] | None = None) -> str:
    """What plans do to F1, with paired seeds."""
    rows = []
    for one in (found or read()).get("seeds", []):
        points, between = one["points"], BETWEEN[language]
        interval = (
            f"{points['low']:+.2f} {between} {points['high']:+.2f}" if "low" in points else ""
        )
        scores = (f"{_mean(one[name]):.4f}" for name in ("f1", "stock_f1"))
        plan = in_words({"strategies": one["strategies"] or {}}, language)
        name = one["name"]
        if language == "zh":
            for english, chinese in SEED_WORDS.items():
                name = re.sub(english, chinese, name)
        rate = f"{one['learning_rate']:.0e}" if "learning_rate" in one else ""
        rate = rate.replace("e-0", "e-")
        counted = (str(one["seeds"]), rate)
        rows.append((name, plan, *counted, *scores, f"{points['mean']:+.2f}", interval))
    return _table(SEED_HEADS[language], rows, texts=2)


def real_table(language: str, found: Mapping[str, Any] | None = None) -> str:
    """F1 of single runs with pre-trained weights, beside the stock Trainer's on the same rows."""
    rows = []
    for run in (found or read())["runs"]:
        if run.get("stock_f1") is None or "f1" not in (run["metrics"] or {}):
            continue
        ours, stock = run["metrics"]["f1"], run["stock_f1"]
        names = (name_of(run, language), plan_of(run, language), _gb(run["budget_bytes"]))
        rows.append((*names, f"{ours:.4f}", f"{stock:.4f}", f"{100 * (ours - stock):+.2f}"))
    return _table(REAL_HEADS[language], rows, texts=2)


def name_of(run: Mapping[str, Any], language: str) -> str:
    """Model, task and flags as a reader of that language says them."""
    case = run["case"]

    def say(key: str, *values: object) -> str:
        return WORDS[key][language].format(*values)

    parts = [MODELS.get(case["model"], case["model"])]
    if case["length"] != 128:
        parts.append(say("length", case["length"]))
    if case["task"] in WORDS:
        parts.append(say(case["task"]))
    if case["budget"] == "auto" or case["budget"].endswith("%"):
        parts.append(say("budget", case["budget"]))
    if case["flags"]:
        parts.append(f"`{' '.join(case['flags'])}`")
    if case["kill_at"] is not None and len(run["processes"]) > 1:
        parts.append(say("killed"))
    return say("comma").join(parts)


def plan_of(run: Mapping[str, Any], language: str) -> str:
    """What the plan does; or that there is none, and why."""
    if not run["outcome"].startswith("finished"):
        return WORDS[run["outcome"]][language]
    plan = tomllib.loads(run["plan_toml"]) if run.get("plan_toml") else {}
    return in_words(plan, language)


def in_words(tables: Mapping[str, Any], language: str) -> str:
    """A plan's strategies and micro-batches, but for what all of them do."""
    given, cut = tables.get("strategies", {}), tables.get("micro_batching", {})
    with speaking(language):
        said = [strategy_words(name, one) for name, one in given.items() if name not in UNSAID]
        if cut.get("max_tokens") is not None:
            said.append(t("micro-batches of {tokens} tokens", tokens=f"{cut['max_tokens']:,}"))
        return pt("clauses", ", ").join(said) or WORDS["whole"][language]


def _gb(size: int | None) -> str:
    """Two digits after the point; sizes of small models get more."""
    if size is None:
        return ""
    return f"{size / 1e9:.2f}" if size >= 10**8 else f"{size / 1e9:.4f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Markdown, as document.py writes it; nothing where there is no row."""
    from document import table

    found = list(rows)
    return table(heads, found, texts=texts) if found else ""
