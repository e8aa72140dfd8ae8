"""What the ladder says, in English and in Chinese."""

from __future__ import annotations

from collections.abc import Mapping

MESSAGES: Mapping[str, Mapping[str, str]] = {
    # ---- the rungs ----
    "rung.baseline": {"en": "baseline, batch {rows}", "zh": "基线，批大小 {rows}"},
    "rung.accumulation": {"en": "+ batch 1 × {rows}", "zh": "+ 批大小 1 × {rows}"},
    "rung.checkpointing": {"en": "+ checkpointing", "zh": "+ 梯度检查点"},
    "rung.adafactor": {"en": "+ Adafactor", "zh": "+ Adafactor 优化器"},
    "rung.frozen": {"en": "+ frozen encoder", "zh": "+ 冻结编码器"},
    "rung.tuned": {"en": "+ head at {rate}", "zh": "+ 分类头用 {rate}"},
    "rung.shorter": {"en": "+ length {tokens}", "zh": "+ 长度 {tokens}"},
    "rung.plan": {"en": "memfit in {budget}", "zh": "memfit 限 {budget}"},
    "rung.plan.auto": {"en": "memfit unlimited", "zh": "memfit 不设上限"},
    # ---- the table ----
    "title": {
        "en": "{model} on {device}, {rows} rows",
        "zh": "{model}，{device}，{rows} 行",
    },
    "head.rung": {"en": "rung", "zh": "做法"},
    "head.targets": {"en": "shrinks", "zh": "针对"},
    "head.predicted": {"en": "predicted", "zh": "预测"},
    "head.measured": {"en": "measured", "zh": "实测"},
    "head.error": {"en": "off by", "zh": "误差"},
    "head.epoch": {"en": "epoch", "zh": "一轮"},
    "head.times": {"en": "× baseline", "zh": "是基线的几倍"},
    "head.fidelity": {"en": "fidelity", "zh": "保真度"},
    "head.change": {"en": "points", "zh": "差几个百分点"},
    "fidelity.exact": {"en": "exact", "zh": "一致"},
    "fidelity.rounding": {"en": "rounding", "zh": "仅舍入"},
    "fidelity.optimizer": {"en": "optimizer", "zh": "换优化器"},
    "fidelity.capacity": {"en": "capacity", "zh": "学得更少"},
    "fidelity.data": {"en": "data", "zh": "文本截短"},
    "part.weights": {"en": "weights", "zh": "权重"},
    "part.gradients": {"en": "gradients", "zh": "梯度"},
    "part.optimizer": {"en": "optimizer", "zh": "优化器"},
    "part.activations": {"en": "activations", "zh": "激活"},
    "part.workspace": {"en": "workspaces", "zh": "工作区"},
    "part.context": {"en": "CUDA context", "zh": "CUDA 上下文"},
    "part.unused": {"en": "reserved, unused", "zh": "已预留、未使用"},
    "does_not_fit": {"en": "does not fit", "zh": "放不下"},
    "failed": {"en": "failed", "zh": "失败"},
    "not_run": {"en": "not run", "zh": "未运行"},
    # ---- below the table ----
    "note.memory": {
        "en": "Peaks are of a training step on the longest texts, live tensors on the CPU.",
        "zh": "峰值取自最长文本的一个训练步，是 CPU 上存活张量的字节数。",
    },
    "note.memory.cuda": {
        "en": "Peaks are of a training step on the longest texts, the CUDA context included.",
        "zh": "峰值取自最长文本的一个训练步，含 CUDA 上下文。",
    },
    "note.epoch": {
        "en": "An epoch is extrapolated: the median of {steps} timed steps × {count} steps.",
        "zh": "一轮的时间是外推的：{steps} 个计时步的中位数 × {count} 步。",
    },
    "note.budget": {
        "en": "Every rung was held to {budget}.",
        "zh": "每种做法都限制在 {budget} 之内。",
    },
    "note.loss": {
        "en": "Accumulated losses are divided as they should be; the Trainer by itself does not.",
        "zh": "累积的损失按应有的方式平均；Trainer 本身并不这样做。",
    },
    "plan": {"en": "{name}: {strategies}", "zh": "{name}：{strategies}"},
    "plan.none": {"en": "nothing but micro-batches", "zh": "只用微批次"},
    "why": {"en": "{name}: {why}", "zh": "{name}：{why}"},
    # ---- which cost quality ----
    "quality.same": {
        "en": "Cost no quality (same result up to rounding): {names}.",
        "zh": "不损失质量（结果相同，至多舍入差别）：{names}。",
    },
    "quality.may": {
        "en": "CHANGE WHAT IS LEARNT and may cost quality: {names}. Not measured: add --quality.",
        "zh": "【会改变学到的东西，可能损失质量】：{names}。尚未实测：加上 --quality。",
    },
    "quality.loses": {
        "en": "COSTS QUALITY: {name}, {change} points of {metric} ({score} against {base}).",
        "zh": "【损失质量】：{name}，{metric} 变化 {change} 个百分点（{score}，基线 {base}）。",
    },
    "quality.loses.share": {
        "en": "COSTS QUALITY: {name}, {metric} worse by {change} ({score} against {base}).",
        "zh": "【损失质量】：{name}，{metric} 变差 {change}（{score}，基线 {base}）。",
    },
    "quality.none": {
        "en": "No loss that {seeds} seeds can see: {names}.",
        "zh": "{seeds} 个随机种子看不出损失：{names}。",
    },
    "quality.rule": {
        "en": "Lost means: worse in every seed, and by half a point or more on average.",
        "zh": "“损失”指：每个种子都更差，且平均差半个百分点以上。",
    },
    "quality.trained": {
        "en": "{metric} after {epochs} epochs, mean over {seeds} seeds ± standard deviation.",
        "zh": "训练 {epochs} 轮后的 {metric}，{seeds} 个种子的平均值 ± 标准差。",
    },
    "why.optimizer": {"en": "another update rule", "zh": "换了更新规则"},
    "why.capacity": {"en": "fewer weights learn", "zh": "学习的权重更少"},
    "why.data": {"en": "texts are cut", "zh": "文本被截断"},
    "named": {"en": "{name} ({why})", "zh": "{name}（{why}）"},
    "separator": {"en": ", ", "zh": "、"},
    # ---- on the way ----
    "seed": {"en": "{rung}, seed {seed}", "zh": "{rung}，种子 {seed}"},
    "short": {"en": "{peak}, an epoch in {epoch}", "zh": "{peak}，一轮 {epoch}"},
    "killed": {
        "en": "the system ended its process, as it does where memory runs out",
        "zh": "进程被系统结束，通常是主机内存耗尽",
    },
    "ended": {
        "en": "its process ended with code {code}; see {log}",
        "zh": "进程以代码 {code} 结束；见 {log}",
    },
    "stopped": {
        "en": "what is measured is kept in {folder}; the same command goes on from there",
        "zh": "已测得的结果保存在 {folder}；再次运行同一命令即可继续",
    },
    "unpictured": {
        "en": "no picture: matplotlib is missing; install it with: pip install 'memfit[report]'",
        "zh": "没有图：缺少 matplotlib；安装：pip install 'memfit[report]'",
    },
    "undrawn": {
        "en": "the ladder could not be written: {why}",
        "zh": "梯子无法写入：{why}",
    },
    # ---- the picture ----
    "picture.title": {
        "en": "Peak memory and time of an epoch, {model}",
        "zh": "峰值显存与一轮时间，{model}",
    },
    "picture.tick": {"en": "predicted", "zh": "预测"},
    "picture.epoch": {"en": "epoch", "zh": "一轮"},
}
