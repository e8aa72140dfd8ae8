"""What training says while it runs, in English and in Chinese: the bar, adjustments,
checkpoints, and a loss that is none."""

from __future__ import annotations

from collections.abc import Mapping

_WHILE: Mapping[str, Mapping[str, str]] = {
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
        "zh": "{way}，{layers} 层重计算",
    },
    "way.offloaded": {"en": "{way}, activations offloaded", "zh": "{way}，激活移到主机内存"},
    "stop.memory": {
        "en": "out of memory in step {step}, with nothing left to make smaller ({way}): "
        "{failed}; give it a larger --budget, a shorter --max-length or a smaller model",
        "zh": "第 {step} 步显存不足，已经没有可以再缩小的（{way}）：{failed}；"
        "请给更大的 --budget、更短的 --max-length 或更小的模型",
    },
    "stop.outside": {
        "en": "out of memory beside step {step}, after memory was given back and the call "
        "repeated: {failed}; give it a larger --budget, or close what else uses the card",
        "zh": "第 {step} 步之外显存不足，释放后重试仍失败：{failed}；"
        "请给更大的 --budget，或关闭占用显卡的其他程序",
    },
    "stop.row": {
        "en": "the longest row alone does not fit ({way}): {failed}; raise --budget, or "
        "choose a shorter --max-length or a smaller model",
        "zh": "单独最长的一行也放不下（{way}）：{failed}；请提高 --budget，"
        "或选更短的 --max-length 或更小的模型",
    },
}

_CHECKPOINTS: Mapping[str, Mapping[str, str]] = {
    "checkpoint.passed": {"en": "{path} is passed over: {why}", "zh": "跳过 {path}：{why}"},
    "checkpoint.last": {
        "en": "{file}, which is written last, is missing",
        "zh": "缺少最后才写的 {file}",
    },
    "checkpoint.unread": {
        "en": "{file} cannot be read: {reason}",
        "zh": "{file} 无法读取：{reason}",
    },
    "checkpoint.missing": {"en": "{file} is missing", "zh": "缺少 {file}"},
    "checkpoint.folder": {"en": "it is a link to somewhere else", "zh": "它是指向别处的链接"},
    "checkpoint.link": {
        "en": "{file} is a link to somewhere else",
        "zh": "{file} 是指向别处的链接",
    },
    "checkpoint.size": {
        "en": "{file} has {bytes} of its {whole} bytes",
        "zh": "{file} 应有 {whole} 字节，只有 {bytes}",
    },
    "checkpoint.sum": {
        "en": "{file} does not match its checksum",
        "zh": "{file} 与校验和不符",
    },
    "checkpoint.incomplete": {
        "en": "{path} is not a complete checkpoint: {problem}",
        "zh": "{path} 不是完整的检查点：{problem}",
    },
    "checkpoint.unusable": {
        "en": "cannot go on from {path}: {reason}",
        "zh": "无法从 {path} 继续：{reason}",
    },
    "save.refused": {
        "en": "{what} cannot be saved, so no training was begun: {reason}; mend it, or write no "
        "checkpoints with --save-strategy no",
        "zh": "{what}无法保存，训练没有开始：{reason}；请修正，或用 --save-strategy no 不写检查点",
    },
    "save.room": {
        "en": "a checkpoint takes {needs} and {folder} has {free} free, so no training was begun; "
        "make room, name another --output-dir, or write no checkpoints with --save-strategy no",
        "zh": "一个检查点需要 {needs}，而 {folder} 只剩 {free}，训练没有开始；请腾出空间、"
        "换一个 --output-dir，或用 --save-strategy no 不写检查点",
    },
    "saved.model": {"en": "the model", "zh": "模型"},
    "saved.arguments": {"en": "what the training arguments hold", "zh": "训练参数"},
    "saved.optimizer": {"en": "the optimizer's state", "zh": "优化器的状态"},
    "saved.schedule": {"en": "the learning rate schedule's state", "zh": "学习率调度的状态"},
    "saved.scaler": {"en": "the loss scale", "zh": "损失缩放的状态"},
    "saved.random": {"en": "the state of the random numbers", "zh": "随机数的状态"},
    "saved.callback": {"en": "the state of the callback {name}", "zh": "回调 {name} 的状态"},
    "saved.state": {"en": "the Trainer's state", "zh": "Trainer 的状态"},
    "resume.nothing": {
        "en": "nothing to resume: No valid checkpoint found in output directory ({folder})",
        "zh": "没有可以继续的：{folder} 里没有完整的检查点",
    },
    "resume.absent": {
        "en": "Can't find a valid checkpoint at {path}: there is no such folder",
        "zh": "{path} 处没有可用的检查点：没有这个文件夹",
    },
    "resume.damaged": {
        "en": "nothing to resume: no checkpoint in {folder} is whole. {damaged}",
        "zh": "没有可以继续的：{folder} 里没有完好的检查点。{damaged}",
    },
    "resume.anew": {
        "en": "{why}; start anew in another --output-dir",
        "zh": "{why}；请换一个 --output-dir 重新开始",
    },
    "gpu.lost": {
        "en": "the GPU no longer answers, after step {step}: {reason}",
        "zh": "第 {step} 步之后显卡没有响应：{reason}",
    },
}

_LOSS: Mapping[str, Mapping[str, str]] = {
    "loss.what": {"en": "the loss is {value}", "zh": "损失是 {value}"},
    "loss.gradient": {"en": "the gradient is {value}", "zh": "梯度是 {value}"},
    "loss.where": {"en": "step {step}", "zh": "第 {step} 步"},
    "loss.where.rows": {
        "en": "step {step} (rows {rows} of the training dataset)",
        "zh": "第 {step} 步（训练集第 {rows} 行）",
    },
    "loss.where.more": {
        "en": "step {step} (rows {rows} and {more} more of the training dataset)",
        "zh": "第 {step} 步（训练集第 {rows} 行，另有 {more} 行）",
    },
    "loss.stopped": {"en": "{what} in {where}", "zh": "{where}{what}"},
    "loss.hopeless": {
        "en": "{what} in {where}, the {count}th step in a row: the weights no longer work; try a "
        "smaller learning rate",
        "zh": "{where}{what}，已连续 {count} 步：权重已不可用；请试试更小的学习率",
    },
    "loss.skipped": {
        "en": "{where} is skipped, {what}: weights and optimizer stay as they were, the schedule "
        "and the order of the rows go on",
        "zh": "跳过{where}，{what}：权重和优化器保持不变，学习率调度和数据顺序照常",
    },
    "loss.weights": {
        "en": "after step {step} weights of the model are not finite numbers",
        "zh": "第 {step} 步之后模型的权重不是有限数",
    },
    "unpredicted": {
        "en": "the memory of {model} cannot be predicted ({reason}): it is trained without a plan, "
        "and the rehearsal and smaller micro-batches keep it inside the budget",
        "zh": "无法预测 {model} 的显存（{reason}）：将不经规划直接训练，"
        "由预演和更小的微批次保证不超出预算",
    },
    "accumulation.twice": {
        "en": "The `AcceleratorConfig`'s `num_steps` is set but `gradient_accumulation_steps` is "
        "greater than 1, too: leave one of them out",
        "zh": "同时设置了 AcceleratorConfig 的 num_steps 和大于 1 的 gradient_accumulation_steps："
        "请去掉其中一个",
    },
    "steps.both": {
        "en": "max_steps={steps} and num_train_epochs={epochs} are both set: max_steps counts",
        "zh": "同时设置了 max_steps={steps} 和 num_train_epochs={epochs}：以 max_steps 为准",
    },
    "optim.backward": {
        "en": "optim={name} updates weights inside backward and cannot take an effective batch in "
        "parts; choose another optimizer",
        "zh": "optim={name} 在反向过程中就更新权重，有效批无法分成几份；请换一个优化器",
    },
    "sharded": {
        "en": "BudgetTrainer does not run with {name}: it decides itself what is on the device; "
        "use one process a GPU (torchrun), or transformers.Trainer",
        "zh": "BudgetTrainer 不能与 {name} 一起用：设备上放什么由它自己决定；"
        "请每张显卡一个进程（torchrun），或用 transformers.Trainer",
    },
}

MESSAGES: Mapping[str, Mapping[str, str]] = {**_WHILE, **_CHECKPOINTS, **_LOSS}
