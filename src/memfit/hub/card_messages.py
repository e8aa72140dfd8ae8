"""The words of the model card, in English and in Chinese; its metadata are the hub's own."""

from __future__ import annotations

from collections.abc import Mapping

_OPENING: Mapping[str, Mapping[str, str]] = {
    "opening.number": {"en": "Gives a text a number ({names}).", "zh": "给文本打分（{names}）。"},
    "opening.several": {
        "en": "Gives a text any of these labels: {names}.",
        "zh": "给文本打上以下标签中的任意几个：{names}。",
    },
    "opening.one": {
        "en": "Gives a text one of these labels: {names}.",
        "zh": "给文本打上以下标签之一：{names}。",
    },
    "base.modelscope": {"en": "`{name}` (ModelScope)", "zh": "`{name}`（ModelScope）"},
    "base.folder": {"en": "a model from a local folder", "zh": "本地文件夹里的模型"},
    "use": {"en": "Use", "zh": "使用"},
    "results": {"en": "Results", "zh": "结果"},
    "data": {"en": "Data", "zh": "数据"},
    "training": {"en": "Training", "zh": "训练"},
    "memory": {"en": "Memory", "zh": "显存"},
    "time": {"en": "Time", "zh": "时间"},
    "plan": {"en": "Plan", "zh": "方案"},
    "made": {
        "en": "Trained and uploaded with memfit.",
        "zh": "由 memfit 训练并上传（Trained and uploaded with memfit）。",
    },
    "made.versions": {
        "en": "Trained and uploaded with memfit ({versions}).",
        "zh": "由 memfit 训练并上传（Trained and uploaded with memfit: {versions}）。",
    },
}

_RESULTS: Mapping[str, Mapping[str, str]] = {
    "on.rows": {"en": "On {rows} validation rows.", "zh": "在 {rows} 行验证数据上。"},
    "on.rows.positive": {
        "en": "On {rows} validation rows; precision, recall and F1 are those of {name}.",
        "zh": "在 {rows} 行验证数据上；精确率、召回率和 F1 是 {name} 这一类的。",
    },
    "on.rows.averaged": {
        "en": "On {rows} validation rows; averaged over the classes ({how}).",
        "zh": "在 {rows} 行验证数据上；各类别平均（{how}）。",
    },
    "on.some": {"en": "On the validation rows.", "zh": "在验证数据上。"},
    "on.some.positive": {
        "en": "On the validation rows; precision, recall and F1 are those of {name}.",
        "zh": "在验证数据上；精确率、召回率和 F1 是 {name} 这一类的。",
    },
    "on.some.averaged": {
        "en": "On the validation rows; averaged over the classes ({how}).",
        "zh": "在验证数据上；各类别平均（{how}）。",
    },
    "head.metric": {"en": "metric", "zh": "指标"},
    "head.value": {"en": "value", "zh": "值"},
    "head.class": {"en": "class", "zh": "类别"},
    "head.precision": {"en": "precision", "zh": "精确率"},
    "head.recall": {"en": "recall", "zh": "召回率"},
    "head.rows": {"en": "rows", "zh": "行数"},
    "head.count": {"en": "count", "zh": "数量"},
    "head.train": {"en": "training rows", "zh": "训练行数"},
    "head.validation": {"en": "validation rows", "zh": "验证行数"},
    "head.peak": {"en": "at the peak", "zh": "峰值时"},
    "head.predicted": {"en": "predicted", "zh": "预测"},
    "head.measured": {"en": "measured", "zh": "实测"},
    "head.part": {"en": "part", "zh": "部分"},
    "head.time": {"en": "time", "zh": "时间"},
    "head.strategy": {"en": "strategy", "zh": "策略"},
    "head.settings": {"en": "settings", "zh": "设置"},
    "head.why": {"en": "why", "zh": "理由"},
}

_FIGURES: Mapping[str, Mapping[str, str]] = {
    "rows.train": {"en": "rows to train on", "zh": "训练的行数"},
    "rows.validation": {"en": "rows to validate on", "zh": "验证的行数"},
    "rows.dropped": {
        "en": "rows left out, without text or label",
        "zh": "略去的没有文本或标签的行",
    },
    "rows.duplicates": {"en": "validation texts also in training", "zh": "训练集里也有的验证文本"},
    "rows.lengths": {
        "en": "tokens of a text: median / 90 % / longest",
        "zh": "每条文本的词元数：中位数 / 90 % / 最长",
    },
    "rows.cut": {"en": "texts are cut at", "zh": "文本截断于"},
    "rows.cut.tokens": {"en": "{tokens} tokens", "zh": "{tokens} 个词元"},
    "rows.lost": {"en": "texts that lost their end", "zh": "被截短的文本"},
    "fact.base": {"en": "base model", "zh": "基础模型"},
    "fact.parameters": {"en": "parameters", "zh": "参数量"},
    "fact.learning_parameters": {"en": "of them learned", "zh": "其中参与训练"},
    "fact.epochs": {"en": "epochs", "zh": "轮数"},
    "fact.steps": {"en": "optimizer steps", "zh": "优化器步数"},
    "fact.effective_batch": {"en": "rows a step", "zh": "每步行数"},
    "fact.learning_rate": {"en": "learning rate", "zh": "学习率"},
    "fact.optim": {"en": "optimizer", "zh": "优化器"},
    "fact.seed": {"en": "seed", "zh": "随机种子"},
    "memory.budget": {"en": "The budget was {budget}.", "zh": "预算是 {budget}。"},
    "memory.device": {"en": "**on the device**", "zh": "**设备上**"},
    "time.on": {"en": "On {device}.", "zh": "在 {device} 上。"},
    "time.data": {"en": "data", "zh": "数据"},
    "time.load": {"en": "load", "zh": "加载"},
    "time.plan": {"en": "plan", "zh": "方案"},
    "time.train": {"en": "train", "zh": "训练"},
    "time.evaluate": {"en": "evaluate", "zh": "评估"},
    "time.save": {"en": "save", "zh": "保存"},
    "time.total": {"en": "total", "zh": "总计"},
    "plan.fidelity": {
        "en": "What it does to the result: {fidelity}.",
        "zh": "对结果的影响：{fidelity}。",
    },
}

MESSAGES: Mapping[str, Mapping[str, str]] = {**_OPENING, **_RESULTS, **_FIGURES}
