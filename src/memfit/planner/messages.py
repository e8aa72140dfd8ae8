"""Every sentence the planner says, by its id, in English and in Chinese.

Fields in braces are filled in by explain.py and others; both languages have the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from memfit.reasons import NAMES, translated

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")

_USED: dict[str, dict[Language, str]] = {
    "packing": {
        "en": "texts are packed without padding, which would be {share} of every batch",
        "zh": "文本紧密拼接，不做填充；否则每个批次有 {share} 是填充",
    },
    "fused_attention": {
        "en": "attention is fused: weights of the square of the length are never stored",
        "zh": "使用融合注意力：不保存长度平方大小的注意力权重",
    },
    "fused_layers": {
        "en": "the small operators of every layer are fused: fewer passes over memory, less kept",
        "zh": "融合每一层的小算子：访存次数更少，保存的激活更少",
    },
    "small_workspace": {
        "en": "cuBLAS gets small workspaces, which these products do not need larger",
        "zh": "cuBLAS 使用小工作区，这些矩阵乘法不需要更大的",
    },
    "cuda_graphs": {
        "en": "the step is replayed as CUDA graphs: about {launches} kernels start without Python, "
        "which saves {saved_time} of a step",
        "zh": "训练步以 CUDA graph 重放：约 {launches} 个内核不再由 Python 逐个启动，每步省 "
        "{saved_time}",
    },
    "checkpointing.layer": {
        "en": "recomputes {count} of {depth} layers: saves {saved}, costs {cost} of the step",
        "zh": "重计算 {depth} 层中的 {count} 层：省 {saved}，使每步慢 {cost}",
    },
    "checkpointing.mlp": {
        "en": "recomputes the MLP half of {count} of {depth} layers: saves {saved}, costs {cost} "
        "of the step",
        "zh": "重计算 {depth} 层中 {count} 层的 MLP 部分：省 {saved}，使每步慢 {cost}",
    },
    "activation_offload": {
        "en": "activations of {count} of {depth} layers wait in host memory: saves {saved}, costs "
        "{cost} of the step",
        "zh": "{depth} 层中 {count} 层的激活暂存于主机内存：省 {saved}，使每步慢 {cost}",
    },
    "half_precision": {
        "en": "computes in {dtype} over float32 weights: half the activations, faster products",
        "zh": "以 {dtype} 计算、权重保持 float32：激活减半，矩阵乘法更快",
    },
    "lowbit_adamw": {
        "en": "weights in {dtype} with {bits}-bit masters and 8-bit moments: {bytes} bytes a "
        "parameter instead of 12, saves {saved}",
        "zh": "权重用 {dtype}，主权重 {bits} 位，动量 8 位：每个参数 {bytes} 字节而不是 12 字节，"
        "省 {saved}",
    },
    "gradients.kept": {
        "en": "gradients are kept in 2 bytes a parameter until the update: {bytes}",
        "zh": "梯度以每参数 2 字节保存到更新时：{bytes}",
    },
    "gradients.kept8": {
        "en": "gradients kept in 8 bits, because the global norm is needed to clip at {norm}: "
        "saves {saved}",
        "zh": "梯度以 8 位保存，因为按 {norm} 裁剪需要全局范数：省 {saved}",
    },
    "gradients.kept8.sum": {
        "en": "gradients of several micro-batches are added up in 8 bits: saves {saved}",
        "zh": "多个微批次的梯度以 8 位累加：省 {saved}",
    },
    "gradients.host": {
        "en": "gradients wait in host memory, {saved} of them; the true norm is still clipped "
        "at {norm}",
        "zh": "梯度（{saved}）暂存于主机内存；仍按真实范数在 {norm} 处裁剪",
    },
    "gradients.two_pass": {
        "en": "backward runs twice, first for the norm to clip at {norm}, then to update: no "
        "gradient is kept, which saves {saved}",
        "zh": "反向传播两次：先求用于在 {norm} 处裁剪的范数，再更新；不保存梯度，省 {saved}",
    },
    "gradients.release": {
        "en": "weights are updated inside backward, since nothing is clipped: saves {saved}",
        "zh": "不裁剪梯度，所以在反向传播中直接更新权重：省 {saved}",
    },
    "gradients.release.predicted": {
        "en": "weights are updated inside backward and clipped at {norm} by a norm predicted from "
        "earlier steps: saves {saved}, another update rule, as you allowed",
        "zh": "在反向传播中更新权重，按之前步骤预测的范数在 {norm} 处裁剪：省 {saved}；"
        "这是你允许的另一种更新规则",
    },
    "state_offload": {
        "en": "the optimizer's state lies in host memory, {host} there, where the card's update "
        "reads and writes it: saves {saved}, costs {cost} of the step",
        "zh": "优化器状态位于主机内存（{host}），由显卡上的更新直接读写：省 {saved}，使每步慢 "
        "{cost}",
    },
    "state_offload.gradients": {
        "en": "the optimizer's state and the 8-bit gradients lie in host memory, {host} there, "
        "where the card reads and writes them: saves {saved}, costs {cost} of the step",
        "zh": "优化器状态和 8 位梯度位于主机内存（{host}），由显卡直接读写：省 {saved}，使每步慢 "
        "{cost}",
    },
    "optimizer_offload": {
        "en": "AdamW runs on the CPU with its state in host memory, {host} there: saves {saved}, "
        "costs {cost} of the step",
        "zh": "AdamW 在 CPU 上运行，状态位于主机内存（{host}）：省 {saved}，使每步慢 {cost}",
    },
    "optimizer_offload.weights": {
        "en": "AdamW runs on the CPU and layers' weights come from host memory two at a time, "
        "{host} there: saves {saved}, costs {cost} of the step",
        "zh": "AdamW 在 CPU 上运行，各层权重从主机内存（{host}）每次取两层：省 {saved}，使每步慢 "
        "{cost}",
    },
    "small_state_optimizer": {
        "en": "{rule} instead of AdamW, as you allowed: its state is nearly nothing",
        "zh": "按你的允许用 {rule} 代替 AdamW：优化器状态几乎为零",
    },
    "lora": {
        "en": "only LoRA adapters of rank {rank} and the head learn, as you allowed",
        "zh": "按你的允许，只训练秩为 {rank} 的 LoRA 适配器和分类头",
    },
    "freezing": {
        "en": "frozen, as you allowed: {what}",
        "zh": "按你的允许冻结：{what}",
    },
    "frozen_features": {
        "en": "the frozen encoder runs once over all texts, every epoch trains the head alone",
        "zh": "冻结的编码器对所有文本只计算一次，每轮只训练分类头",
    },
    "truncation": {
        "en": "texts are cut at {tokens} tokens, as you allowed: {share} of the rows lose their "
        "end",
        "zh": "按你的允许把文本截到 {tokens} 个词元：{share} 的样本被截短",
    },
    "micro.whole": {
        "en": "the whole effective batch of {rows} rows runs at once: {tokens} tokens at most, "
        "{mean} on average",
        "zh": "整个有效批次（{rows} 行）一次计算：最多 {tokens} 个词元，平均 {mean}",
    },
    "micro.split": {
        "en": "at most {tokens} tokens are on the device at once: {parts} micro-batches a step of "
        "{rows} rows on average, {worst} for the longest texts",
        "zh": "设备上同时最多 {tokens} 个词元：{rows} 行的一步平均分 {parts} 个微批次，"
        "最长的文本分 {worst} 个",
    },
    "memory": {
        "en": "peaks at {peak} of {budget} ({share}), while {phase}",
        "zh": "峰值 {peak}，预算 {budget}（{share}），出现在{phase}",
    },
    "time": {
        "en": "a step takes {step}, an epoch of {steps} steps {epoch}, the whole run {total}",
        "zh": "每步 {step}，每轮 {steps} 步共 {epoch}，全部训练 {total}",
    },
}

_KEPT: dict[str, dict[Language, str]] = {
    "yours.checkpointing": {
        "en": "gradient_checkpointing is yours and stays: every layer is recomputed",
        "zh": "保留你设置的 gradient_checkpointing：每层都重计算",
    },
    "yours.precision": {
        "en": "{name} is yours and stays",
        "zh": "保留你设置的 {name}",
    },
    "yours.optim": {
        "en": "the optimizer {name} is yours and stays",
        "zh": "保留你选择的优化器 {name}",
    },
    "yours.compile": {
        "en": "torch_compile is yours and stays; it wants the same shapes in every step",
        "zh": "保留你设置的 torch_compile；它要求每步形状相同",
    },
    "yours.freeze": {
        "en": "frozen by you: {what}",
        "zh": "由你冻结：{what}",
    },
    "yours.lora": {
        "en": "your LoRA adapters of rank {rank} stay",
        "zh": "保留你的秩 {rank} LoRA 适配器",
    },
    "yours.loss": {
        "en": "your own loss is computed as it is",
        "zh": "按原样计算你自己的损失",
    },
}

_UNUSED: dict[str, dict[Language, str]] = {
    "unused.cannot": {
        "en": "not used: {name}, because {reason}",
        "zh": "未使用：{name}，因为 {reason}",
    },
    "unused.needless": {
        "en": "not used: {name}, because everything fits without it and it would cost {cost} of "
        "the step",
        "zh": "未使用：{name}，因为不用它也放得下，而它会使每步慢 {cost}",
    },
    "unused.exact": {
        "en": "not used: {name}, because --exact forbids rounding",
        "zh": "未使用：{name}，因为 --exact 不允许舍入",
    },
    "unused.graphs.slow": {
        "en": "not used: CUDA graphs, because this card hides the launches: {cost} of a step",
        "zh": "未使用：CUDA graph，因为这张卡能掩盖启动开销：每步 {cost}",
    },
    "unused.graphs.large": {
        "en": "not used: CUDA graphs, because their plan needs {bytes}, {missing} too much",
        "zh": "未使用：CUDA graph，因为相应方案需要 {bytes}，多出 {missing}",
    },
}

_OUTCOMES: dict[str, dict[Language, str]] = {
    "missing": {
        "en": "nothing fits {budget}: the smallest plan found needs {needs} ({parts}), so "
        "{missing} "
        "are missing",
        "zh": "{budget} 内没有可行的方案：找到的最小方案需要 {needs}（{parts}），缺 {missing}",
    },
    "missing.host": {
        "en": "the smallest plan for the device needs {host} of the computer's memory, of which "
        "{free} are free",
        "zh": "设备占用最小的方案需要 {host} 主机内存，目前空闲 {free}",
    },
    "helps.budget": {
        "en": "--budget {bytes} or more",
        "zh": "--budget {bytes} 或更多",
    },
    "helps.allow": {
        "en": "--allow {permission} reaches {bytes}",
        "zh": "--allow {permission} 可降到 {bytes}",
    },
    "helps.inexact": {
        "en": "without --exact it takes {bytes}",
        "zh": "不加 --exact 只需 {bytes}",
    },
    "helps.length": {
        "en": "--max-length {tokens} takes {bytes}",
        "zh": "--max-length {tokens} 需要 {bytes}",
    },
    "helps.model": {
        "en": "a model of {layers} layers, {width} wide, takes {bytes}",
        "zh": "{layers} 层、宽 {width} 的模型需要 {bytes}",
    },
    "note.host": {
        "en": "a faster plan was passed over: it needs {needs} of the computer's memory, of which "
        "{free} are free",
        "zh": "有更快的方案未被采用：它需要 {needs} 主机内存，目前空闲 {free}",
    },
    "note.disk": {
        "en": "checkpoints will take {needs} on the disk ({count} of {each} and the final model), "
        "of which {free} are free; lower --save-total-limit or choose another folder",
        "zh": "检查点将占 {needs} 磁盘空间（{count} 个，每个 {each}，另加最终模型），目前空闲 "
        "{free}；"
        "请调低 --save-total-limit 或换一个文件夹",
    },
    "note.guess": {
        "en": "what {operators} compute could not be counted, so their time is a guess from the "
        "sizes of what goes in and comes out",
        "zh": "{operators} 的计算量无法统计，其时间按输入输出的大小估计",
    },
    "used": {"en": "used: {name}", "zh": "使用：{name}"},
    "allow": {
        "en": "--allow {permission} ({fidelity}): {bytes}, a step in {step}, {times} as fast",
        "zh": "--allow {permission}（{fidelity}）：{bytes}，每步 {step}，速度为 {times}",
    },
    "allow.no_gain": {
        "en": "--allow {permission} ({fidelity}): nothing faster than this plan",
        "zh": "--allow {permission}（{fidelity}）：不会比本方案更快",
    },
    "allow.too_large": {
        "en": "--allow {permission} ({fidelity}): nothing that fits, {bytes} at least",
        "zh": "--allow {permission}（{fidelity}）：没有放得下的方案，至少 {bytes}",
    },
    "more": {
        "en": "{budget} would make a step {times} as fast: {step}",
        "zh": "{budget} 可使每步达到 {times} 的速度：{step}",
    },
    "smaller": {
        "en": "{layers} layers, {width} wide: {bytes}, a step in {step}",
        "zh": "{layers} 层、宽 {width}：{bytes}，每步 {step}",
    },
}

MESSAGES: dict[str, dict[Language, str]] = {**_USED, **_KEPT, **_UNUSED, **_OUTCOMES}

PHASES: dict[str, dict[Language, str]] = {
    "training": {"en": "training", "zh": "训练时"},
    "evaluation": {"en": "evaluating", "zh": "评估时"},
    "saving": {"en": "saving", "zh": "保存时"},
    "resuming": {"en": "resuming", "zh": "恢复训练时"},
}


def say(message: str, fields: Mapping[str, str], language: Language = "en") -> str:
    """The sentence of that id with its fields filled in; names of things in its language too."""
    known = {"name": NAMES, "phase": PHASES}
    said = {
        key: known[key][value][language] if key in known and value in known[key] else value
        for key, value in fields.items()
    }
    if "reason" in said:
        said["reason"] = translated(said["reason"], language)
    return MESSAGES[message][language].format_map(said)
