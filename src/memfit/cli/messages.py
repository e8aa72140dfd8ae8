"""What the command line itself says, in English and in Chinese; help_chinese.py has its help."""

from __future__ import annotations

from collections.abc import Mapping

_USAGE: Mapping[str, Mapping[str, str]] = {
    "option.none": {"en": "there is no option {flag}.{hint}", "zh": "没有选项 {flag}。{hint}"},
    "option.value": {"en": "{flag} needs a value", "zh": "{flag} 需要一个值"},
    "option.switch": {
        "en": "{flag} is {value}; write true or false",
        "zh": "{flag} 是 {value}；请写 true 或 false",
    },
    "option.json": {"en": "{flag} is not JSON: {reason}", "zh": "{flag} 不是 JSON：{reason}"},
    "option.int": {
        "en": "{flag} is {value}; it takes a whole number",
        "zh": "{flag} 是 {value}；它要一个整数",
    },
    "option.float": {
        "en": "{flag} is {value}; it takes a number",
        "zh": "{flag} 是 {value}；它要一个数",
    },
    "option.whole": {"en": "{flag} takes a whole number", "zh": "{flag} 要一个整数"},
    "option.number": {"en": "{flag} takes a number", "zh": "{flag} 要一个数"},
    "option.alone": {"en": "{flag} takes no value", "zh": "{flag} 后面不跟值"},
    "option.wrong": {
        "en": "{flag} has a value it does not take: {reason}",
        "zh": "{flag} 的值不对：{reason}",
    },
    "lang.value": {
        "en": "--lang needs a value; write --lang en or --lang zh",
        "zh": "--lang 需要一个值；请写 --lang en 或 --lang zh",
    },
    "lang.none": {
        "en": "there is no language {name} here; write --lang en or --lang zh",
        "zh": "没有语言 {name}；请写 --lang en 或 --lang zh",
    },
    "command.none": {"en": "there is no command {name}.{hint}", "zh": "没有命令 {name}。{hint}"},
    "argument.missing": {
        "en": "{name} is missing; see memfit {command} --help",
        "zh": "缺少 {name}；见 memfit {command} --help",
    },
    "argument.extra": {
        "en": "more was given than memfit {command} takes: {words}",
        "zh": "给 memfit {command} 的参数多了：{words}",
    },
}

_ESTIMATE: Mapping[str, Mapping[str, str]] = {
    "model.none": {
        "en": "no model given; name one with --model",
        "zh": "没有给出模型；请用 --model 指定",
    },
    "timeline.unwritten": {
        "en": "cannot write the timeline {path}: name a file in a folder that is there",
        "zh": "无法写入时间线 {path}：请给出一个已有文件夹里的文件名",
    },
    "timeline.written": {"en": "timeline: {path}", "zh": "时间线：{path}"},
    "timeline.title": {"en": "Memory of training {model}", "zh": "训练 {model} 的显存"},
    "note": {"en": "note: {text}", "zh": "注意：{text}"},
    "parameters": {"en": "{count} parameters", "zh": "{count} 个参数"},
    "parameters.part": {
        "en": "{count} parameters, {learning} of them learn",
        "zh": "{count} 个参数，其中 {learning} 个参与训练",
    },
    "verdict.fits": {"en": "fits on {card}, {total}", "zh": "放得下：{card}，{total}"},
    "verdict.barely": {
        "en": "fits barely on {card}, {total}",
        "zh": "勉强放得下：{card}，{total}",
    },
    "verdict.over": {
        "en": "does not fit on {card}, {total}",
        "zh": "放不下：{card}，{total}",
    },
    "verdict.assumed": {
        "en": "{verdict}; there is no GPU here, name yours with --gpu",
        "zh": "{verdict}；本机没有显卡，请用 --gpu 指定你的显卡",
    },
    "context.rule": {
        "en": "context about {size} MiB, by rule, not measured",
        "zh": "CUDA 上下文约 {size} MiB，按经验估计，未实测",
    },
    "peak.title": {"en": "Peak of a step", "zh": "一步的峰值"},
    "peak.module": {"en": "reached in {module}", "zh": "出现在 {module}"},
    "rules.weights": {"en": "4 B a parameter", "zh": "每参数 4 B"},
    "rules.gradients": {"en": "4 B a parameter", "zh": "每参数 4 B"},
    "rules.optimizer": {"en": "8 B a parameter (AdamW)", "zh": "每参数 8 B（AdamW）"},
    "rules.activations": {"en": "the rest", "zh": "其余"},
    "head.component": {"en": "component", "zh": "组成部分"},
    "head.rule": {"en": "classic rule", "zh": "经验法则"},
    "head.says": {"en": "says", "zh": "算得"},
    "head.peak": {"en": "at the peak", "zh": "峰值时"},
    "head.most": {"en": "at its most", "zh": "自身最大"},
    "head.phase": {"en": "phase", "zh": "阶段"},
    "head.tensors": {"en": "tensors", "zh": "张量"},
    "head.reserved": {"en": "reserved", "zh": "已保留"},
    "head.device": {"en": "on the device", "zh": "设备上"},
    "phase.training": {"en": "training", "zh": "训练"},
    "phase.evaluation": {"en": "evaluation", "zh": "评估"},
    "phase.saving": {"en": "saving", "zh": "保存"},
    "phase.resuming": {"en": "resuming", "zh": "续训"},
    "part.build": {"en": "weights", "zh": "权重"},
    "part.workspace": {"en": "workspaces", "zh": "工作区"},
    "part.micro": {"en": "forward and backward", "zh": "前向和反向"},
    "part.micro_more": {"en": "accumulating", "zh": "累积"},
    "part.update_first": {"en": "first update", "zh": "首次更新"},
    "part.clear": {"en": "gradients freed", "zh": "释放梯度"},
}

_OTHERS: Mapping[str, Mapping[str, str]] = {
    "plan.unwritten": {
        "en": "cannot write the plan {path}: name a file in a folder that is there",
        "zh": "无法写入方案 {path}：请给出一个已有文件夹里的文件名",
    },
    "predict.either": {
        "en": "give either sentences or --file, not both and not neither",
        "zh": "请给出句子或 --file，二者只取其一",
    },
    "predict.output": {
        "en": "--output goes with --file; sentences are answered on the screen",
        "zh": "--output 要和 --file 一起用；句子的结果直接显示在屏幕上",
    },
    "predict.wrote": {"en": "wrote {rows} rows to {path}", "zh": "已把 {rows} 行写入 {path}"},
    "predict.wrote.empty": {
        "en": "wrote {rows} rows to {path}; {empty} without text",
        "zh": "已把 {rows} 行写入 {path}；其中 {empty} 行没有文本",
    },
    "head.label": {"en": "label", "zh": "标签"},
    "head.score": {"en": "score", "zh": "得分"},
    "head.text": {"en": "text", "zh": "文本"},
    "licence.question": {
        "en": "Under which licence may others use the model? {common}, ...",
        "zh": "别人可以按哪种许可证使用这个模型？{common} 等",
    },
    "licence.prompt": {"en": "licence", "zh": "许可证"},
    "token.make": {
        "en": "Make a token at {address} and paste it here.",
        "zh": "请在 {address} 新建一个令牌，粘贴到这里。",
    },
    "token.prompt": {"en": "token (not shown): ", "zh": "令牌（不显示）："},
    "ladder.files": {
        "en": "{folder}: ladder.json, ladder.md, ladder.png, ladder.svg",
        "zh": "{folder}：ladder.json、ladder.md、ladder.png、ladder.svg",
    },
}

MESSAGES: Mapping[str, Mapping[str, str]] = {**_USAGE, **_ESTIMATE, **_OTHERS}
