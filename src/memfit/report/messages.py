"""The report's words, by id, in English and in Chinese; see memfit/messages.py."""

from __future__ import annotations

from memfit.messages import Language

_Messages = dict[str, dict[Language, str]]

_PAGE: _Messages = {
    "title": {"en": "{model}, fine-tuned", "zh": "{model} 微调报告"},
    "title.unnamed": {"en": "A run of memfit", "zh": "memfit 训练报告"},
    "skip": {"en": "Skip to the content", "zh": "跳到正文"},
    "contents": {"en": "Contents", "zh": "目录"},
    "theme": {"en": "Appearance", "zh": "外观"},
    "theme.auto": {"en": "as the system", "zh": "跟随系统"},
    "theme.light": {"en": "light", "zh": "浅色"},
    "theme.dark": {"en": "dark", "zh": "深色"},
    "no.script": {
        "en": "Without scripts this page shows the state it was loaded with.",
        "zh": "未启用脚本，本页只显示加载时的状态。",
    },
    "live.waiting": {
        "en": "The run is getting ready: data and model are being loaded.",
        "zh": "训练正在准备：读取数据与模型。",
    },
    "live.updates": {"en": "This page updates itself.", "zh": "本页会自动更新。"},
    "live.gone": {
        "en": "The run no longer answers: it has ended, or was killed. This is the last that was "
        "known; report.html in its folder may tell more.",
        "zh": "训练进程已无响应：可能已结束或被终止。以下是最后已知的状态；"
        "其文件夹中的 report.html 可能有更多内容。",
    },
    "step": {"en": "step", "zh": "步"},
    "yes": {"en": "yes", "zh": "是"},
    "no": {"en": "no", "zh": "否"},
    "no.matplotlib": {
        "en": "The curves are missing: matplotlib is not installed (pip install memfit[report]).",
        "zh": "没有曲线：未安装 matplotlib（pip install memfit[report]）。",
    },
    "no.curves": {"en": "The run logged nothing to draw.", "zh": "没有可绘制的记录。"},
}

_LEAD: _Messages = {
    "state.finished": {"en": "Finished", "zh": "已完成"},
    "state.running": {"en": "Training", "zh": "正在训练"},
    "state.stopped": {"en": "Stopped", "zh": "已停止"},
    "state.failed": {"en": "Failed", "zh": "失败"},
    "state.cut": {"en": "No end on record", "zh": "没有结束记录"},
    "cut.why": {
        "en": "It is still running, or its process was killed.",
        "zh": "训练可能仍在进行，或者进程已被终止。",
    },
    "lead.time": {"en": "{time} of training", "zh": "训练用时 {time}"},
    "lead.device": {"en": "on {device}", "zh": "设备 {device}"},
    "lead.steps": {"en": "step {step:,} of {steps:,}", "zh": "第 {step:,} 步，共 {steps:,} 步"},
    "lead.steps.only": {"en": "{step:,} steps", "zh": "{step:,} 步"},
    "lead.left": {"en": "about {time} left", "zh": "约剩 {time}"},
    "resume": {"en": "It goes on from its last checkpoint with:", "zh": "从最近的检查点继续："},
}

_MEMORY: _Messages = {
    "memory.title": {"en": "Memory", "zh": "显存占用"},
    "memory.bars": {"en": "The peak by component", "zh": "峰值的组成"},
    "memory.predicted": {"en": "predicted", "zh": "预测"},
    "memory.measured": {"en": "measured", "zh": "实测"},
    "memory.budget": {"en": "budget {bytes}", "zh": "预算 {bytes}"},
    "memory.budget.beyond": {
        "en": "budget {bytes}, beyond the scale",
        "zh": "预算 {bytes}，超出图示范围",
    },
    "memory.component": {"en": "component", "zh": "组成部分"},
    "memory.table": {"en": "Bytes by what they are for", "zh": "按用途统计"},
    "memory.table.module": {
        "en": "Bytes by what they are for; the peak is in {module}",
        "zh": "按用途统计；峰值出现在 {module}",
    },
    "memory.allocated": {"en": "allocated", "zh": "已分配"},
    "memory.device": {"en": "on the device", "zh": "设备占用"},
    "memory.above": {
        "en": "The prediction was {share} above what was measured.",
        "zh": "预测值比实测值高 {share}。",
    },
    "memory.below": {
        "en": "The prediction was {share} below what was measured.",
        "zh": "预测值比实测值低 {share}。",
    },
    "memory.one.step": {
        "en": "Measured at step {step:,}; on a CPU the budget counts live tensors.",
        "zh": "在第 {step:,} 步实测；在 CPU 上预算按存活的张量计算。",
    },
    "bar.within": {
        "en": "{title}: {bytes} at the peak, {share} of the budget of {budget}",
        "zh": "{title}：峰值 {bytes}，占预算 {budget} 的 {share}",
    },
    "bar.over": {
        "en": "{title}: {bytes} at the peak, {over} over the budget of {budget}",
        "zh": "{title}：峰值 {bytes}，超出预算 {budget} 达 {over}",
    },
    "bar.alone": {"en": "{title}: {bytes} at the peak", "zh": "{title}：峰值 {bytes}"},
    "component.weights": {"en": "weights", "zh": "权重"},
    "component.gradients": {"en": "gradients", "zh": "梯度"},
    "component.optimizer": {"en": "optimizer", "zh": "优化器"},
    "component.activations": {"en": "activations", "zh": "激活"},
    "component.workspace": {"en": "workspace", "zh": "工作区"},
    "component.context": {"en": "context", "zh": "CUDA 上下文"},
    "component.unused": {"en": "reserved, unused", "zh": "已保留未使用"},
    "time.title": {"en": "Memory over the run", "zh": "训练过程中的显存"},
    "time.process": {
        "en": "Memory of the whole process over the run",
        "zh": "训练过程中整个进程的主机内存",
    },
    "time.now": {"en": "in use", "zh": "当前"},
    "time.peak": {"en": "most until then", "zh": "迄今最高"},
    "time.label": {
        "en": "Memory over {steps:,} steps: at most {bytes}",
        "zh": "{steps:,} 步中的显存：最高 {bytes}",
    },
    "time.marks": {
        "en": "Dotted lines are adjustments, numbered as in the table.",
        "zh": "虚线为调整，编号见下表。",
    },
    "adjust.table": {
        "en": "What was adjusted while it trained",
        "zh": "训练中的调整",
    },
    "adjust.table.some": {
        "en": "What was adjusted while it trained: the first {shown} of {count:,}",
        "zh": "训练中的调整：{count:,} 次中的前 {shown} 次",
    },
    "adjust.number": {"en": "no.", "zh": "编号"},
    "adjust.step": {"en": "step", "zh": "步"},
    "adjust.why": {"en": "why", "zh": "原因"},
    "adjust.before": {"en": "before", "zh": "之前"},
    "adjust.after": {"en": "after", "zh": "之后"},
    "adjust.none": {
        "en": "Nothing had to be adjusted while it trained.",
        "zh": "训练中没有需要调整的地方。",
    },
}

_TRAINING: _Messages = {
    "training.title": {"en": "Training", "zh": "训练"},
    "training.table": {"en": "How it was trained", "zh": "训练设置"},
    "curve.loss": {"en": "Loss", "zh": "损失"},
    "curve.metrics": {"en": "Metrics on the validation rows", "zh": "验证集指标"},
    "curve.rate": {"en": "Learning rate", "zh": "学习率"},
    "curve.training": {"en": "training", "zh": "训练"},
    "curve.validation": {"en": "validation", "zh": "验证"},
    "curve.label": {
        "en": "{name}: from {first} at step {begin:,} to {last} at step {end:,}",
        "zh": "{name}：从第 {begin:,} 步的 {first} 到第 {end:,} 步的 {last}",
    },
    "training.model": {"en": "model", "zh": "模型"},
    "training.task": {"en": "task", "zh": "任务"},
    "training.steps": {"en": "steps", "zh": "步数"},
    "training.epochs": {"en": "epochs", "zh": "轮数"},
    "training.effective_batch": {"en": "effective batch", "zh": "有效批次"},
    "training.learning_rate": {"en": "learning rate", "zh": "学习率"},
    "training.optim": {"en": "optimizer", "zh": "优化器"},
    "training.seed": {"en": "seed", "zh": "随机种子"},
    "training.parameters": {"en": "parameters", "zh": "参数量"},
    "training.learning_parameters": {"en": "parameters that learn", "zh": "可训练参数"},
    "training.best": {"en": "best checkpoint", "zh": "最佳检查点"},
    "task.single_label": {"en": "single-label", "zh": "单标签分类"},
    "task.multi_label": {"en": "multi-label", "zh": "多标签分类"},
    "task.regression": {"en": "regression", "zh": "回归"},
    "work.data": {"en": "time reading the data", "zh": "读取数据用时"},
    "work.load": {"en": "time loading", "zh": "加载用时"},
    "work.plan": {"en": "time planning", "zh": "规划用时"},
    "work.train": {"en": "time training", "zh": "训练用时"},
    "work.evaluate": {"en": "time evaluating", "zh": "评估用时"},
    "work.save": {"en": "time saving", "zh": "保存用时"},
    "work.total": {"en": "time in all", "zh": "总用时"},
}

_QUALITY: _Messages = {
    "quality.title": {"en": "Evaluation", "zh": "评估"},
    "quality.rows": {
        "en": "Measured on {rows:,} rows that were not trained on.",
        "zh": "在 {rows:,} 行未参与训练的数据上评估。",
    },
    "quality.binary": {
        "en": "F1, precision and recall are those of {positive}.",
        "zh": "F1、精确率与召回率针对类别“{positive}”。",
    },
    "quality.macro": {
        "en": "F1, precision and recall are means over the classes.",
        "zh": "F1、精确率与召回率为各类别的平均。",
    },
    "quality.micro": {
        "en": "F1, precision and recall count every label of every row; accuracy counts the rows "
        "with all labels right.",
        "zh": "F1、精确率与召回率按每行的每个标签统计；准确率统计全部标签都正确的行。",
    },
    "metric.accuracy": {"en": "accuracy", "zh": "准确率"},
    "metric.precision": {"en": "precision", "zh": "精确率"},
    "metric.recall": {"en": "recall", "zh": "召回率"},
    "metric.f1": {"en": "F1", "zh": "F1"},
    "metric.f1_macro": {"en": "F1 (macro)", "zh": "F1（宏平均）"},
    "metric.mse": {"en": "MSE", "zh": "均方误差"},
    "metric.mae": {"en": "MAE", "zh": "平均绝对误差"},
    "metric.r2": {"en": "R²", "zh": "R²"},
    "metric.pearson": {"en": "Pearson", "zh": "皮尔逊相关"},
    "metric.of": {"en": "{metric} (of {class_name})", "zh": "{metric}（{class_name}）"},
    "metric.macro": {"en": "{metric} (macro)", "zh": "{metric}（宏平均）"},
    "metric.micro": {"en": "{metric} (micro)", "zh": "{metric}（微平均）"},
    "classes.each": {"en": "Each class", "zh": "各类别"},
    "classes.weakest": {
        "en": "The {shown} weakest of {count:,} classes",
        "zh": "{count:,} 个类别中最弱的 {shown} 个",
    },
    "classes.class": {"en": "class", "zh": "类别"},
    "classes.rows": {"en": "rows", "zh": "行数"},
    "matrix": {
        "en": "Confusion matrix: rows are the truth, columns what the model said",
        "zh": "混淆矩阵：行为真实类别，列为模型的判断",
    },
    "confusions": {"en": "The most frequent confusions", "zh": "最常见的混淆"},
    "mistakes": {
        "en": "The texts it got most wrong: wrong labels in the data often show up here first",
        "zh": "错得最离谱的文本：数据中的错误标签往往最先出现在这里",
    },
    "mistakes.text": {"en": "text", "zh": "文本"},
    "mistakes.is": {"en": "is", "zh": "实际"},
    "mistakes.said": {"en": "was called", "zh": "被判为"},
    "mistakes.score": {"en": "score", "zh": "得分"},
    "mistakes.value": {"en": "value", "zh": "数值"},
}

_PLAN: _Messages = {
    "plan.title": {"en": "The plan and its reasons", "zh": "方案与理由"},
    "plan.table": {"en": "What it does to fit", "zh": "采用的做法"},
    "plan.strategy": {"en": "strategy", "zh": "策略"},
    "plan.settings": {"en": "settings", "zh": "设置"},
    "plan.why": {"en": "why", "zh": "理由"},
    "plan.none": {
        "en": "No strategy was needed: the plain training step fits.",
        "zh": "不需要任何策略：普通训练步就放得下。",
    },
    "plan.figures": {"en": "Predicted and measured", "zh": "预测与实测"},
    "plan.fidelity": {"en": "fidelity", "zh": "保真度"},
    "plan.limits": {"en": "on the device at once", "zh": "设备上同时最多"},
    "plan.peak": {"en": "peak on the device, predicted", "zh": "设备峰值（预测）"},
    "plan.peak.measured": {"en": "peak on the device, measured", "zh": "设备峰值（实测）"},
    "plan.host": {"en": "in the computer's memory, predicted", "zh": "主机内存（预测）"},
    "plan.step": {"en": "time of a step, predicted", "zh": "每步用时（预测）"},
    "plan.step.measured": {"en": "time of a step, measured", "zh": "每步用时（实测）"},
    "plan.reasons": {"en": "More about it", "zh": "其他说明"},
    "fidelity.exact": {
        "en": "exact: the same numbers, up to rounding",
        "zh": "exact：数值相同（仅有舍入差别）",
    },
    "fidelity.rounding": {
        "en": "rounding: the same algorithm with fewer bits",
        "zh": "rounding：算法相同，位数更少",
    },
    "fidelity.optimizer": {"en": "optimizer: another update rule", "zh": "optimizer：更新规则不同"},
    "fidelity.capacity": {
        "en": "capacity: fewer weights learn",
        "zh": "capacity：训练的权重更少",
    },
    "fidelity.data": {"en": "data: texts are cut shorter", "zh": "data：文本被截短"},
}

_DATA: _Messages = {
    "data.title": {"en": "Data", "zh": "数据"},
    "data.rows": {"en": "Rows", "zh": "数据行"},
    "data.classes": {"en": "Rows of each class", "zh": "各类别行数"},
    "data.classes.some": {
        "en": "The first {shown} of {count:,} classes",
        "zh": "{count:,} 个类别中的前 {shown} 个",
    },
    "data.train": {"en": "train", "zh": "训练"},
    "data.validation": {"en": "validation", "zh": "验证"},
    "data.lengths": {"en": "Length of the texts", "zh": "文本长度"},
    "data.tokens": {"en": "tokens", "zh": "词元"},
    "data.cut": {"en": "max_length {tokens:,}", "zh": "max_length {tokens:,}"},
    "data.lengths.cut": {
        "en": "Half of the texts have up to {p50:,} tokens, nine in ten up to {p90:,}, the longest "
        "{longest:,}. A max_length of {limit:,} cuts {cut:,} of them ({share}).",
        "zh": "一半的文本不超过 {p50:,} 个词元，九成不超过 {p90:,} 个，最长 {longest:,} 个。"
        "max_length 为 {limit:,} 时有 {cut:,} 条被截断（{share}）。",
    },
    "data.lengths.whole": {
        "en": "Half of the texts have up to {p50:,} tokens, nine in ten up to {p90:,}, the longest "
        "{longest:,}. A max_length of {limit:,} cuts none of them.",
        "zh": "一半的文本不超过 {p50:,} 个词元，九成不超过 {p90:,} 个，最长 {longest:,} 个。"
        "max_length 为 {limit:,} 时没有文本被截断。",
    },
    "count.rows_read": {"en": "read", "zh": "读取"},
    "count.train_rows": {"en": "trained on", "zh": "用于训练"},
    "count.validation_rows": {"en": "validated on", "zh": "用于验证"},
    "count.dropped_no_text": {"en": "left out, no text", "zh": "舍弃（无文本）"},
    "count.dropped_no_label": {"en": "left out, no label", "zh": "舍弃（无标签）"},
    "count.duplicates_across_split": {
        "en": "validation texts also trained on",
        "zh": "同时出现在训练集中的验证文本",
    },
    "count.text_column": {"en": "text column", "zh": "文本列"},
    "count.text_pair_column": {"en": "second text column", "zh": "第二文本列"},
    "count.label_column": {"en": "label column", "zh": "标签列"},
    "count.encoding": {"en": "encoding", "zh": "编码"},
}

_USE: _Messages = {
    "use.title": {"en": "Use it", "zh": "使用模型"},
    "use.python": {"en": "In Python", "zh": "在 Python 中"},
    "use.terminal": {"en": "In a terminal", "zh": "在终端中"},
    "use.pipeline": {"en": "With transformers alone", "zh": "只用 transformers"},
    "made.title": {"en": "Made with", "zh": "运行环境"},
    "made.table": {"en": "Versions and machine", "zh": "版本与机器"},
    "made.device": {"en": "device", "zh": "设备"},
    "made.config": {"en": "configuration", "zh": "配置"},
    "made.rerun": {
        "en": "The configuration that reruns it (run.toml)",
        "zh": "可重新运行的配置（run.toml）",
    },
    "notebook.report": {"en": "The whole report: {path}", "zh": "完整报告：{path}"},
    "notebook.steps": {"en": "steps", "zh": "步数"},
    "notebook.batch": {"en": "effective batch", "zh": "有效批次"},
    "notebook.at.once": {"en": "on the device at once", "zh": "设备上同时"},
    "notebook.whole": {"en": "the whole batch", "zh": "整个批次"},
    "notebook.before": {"en": "not started yet", "zh": "还没有开始"},
    "notebook.trainer": {"en": "BudgetTrainer", "zh": "BudgetTrainer"},
    "notebook.plan": {"en": "Plan", "zh": "训练方案"},
}

MESSAGES: _Messages = {
    **_PAGE, **_LEAD, **_MEMORY, **_TRAINING, **_QUALITY, **_PLAN, **_DATA, **_USE,
}  # fmt: skip
