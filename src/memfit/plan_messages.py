"""What `memfit plan` and a run say about plans, in English and in Chinese."""

from __future__ import annotations

from collections.abc import Mapping

MESSAGES: Mapping[str, Mapping[str, str]] = {
    "waiting": {"en": "planning …", "zh": "正在制定方案……"},
    "given": {"en": "the plan given", "zh": "给定的方案"},
    "untraced": {
        "en": "memory cannot be predicted: {error}",
        "zh": "无法预测显存：{error}",
    },
    "fits": {
        "en": "{name} fits: {needs} of {budget}, a step in {step}",
        "zh": "{name} 放得下：需要 {needs}，预算 {budget}，每步 {step}",
    },
    "no_longer_fits": {
        "en": "{name} does not fit: it needs {needs} and the budget is {budget}, so {missing} are "
        "missing; make a new one with memfit plan",
        "zh": "{name} 放不下：需要 {needs}，预算 {budget}，缺 {missing}；请用 memfit plan 重新制定",
    },
    "changed": {"en": "changed since: {what}", "zh": "此后的变化：{what}"},
    "headline": {
        "en": "{model} on {card}, budget {budget}: {fidelity}",
        "zh": "{model}，{card}，预算 {budget}：{fidelity}",
    },
    "cpu": {"en": "this CPU", "zh": "本机 CPU"},
    "cpu.hint": {
        "en": "there is no GPU here; plan for one with --gpu NAME",
        "zh": "本机没有 GPU；可用 --gpu 名称 为某张卡制定方案",
    },
    "fidelity.exact": {
        "en": "exact, the same numbers up to rounding of the same precision",
        "zh": "exact，数值相同，仅有同精度的舍入差别",
    },
    "fidelity.rounding": {
        "en": "rounding, the same algorithm with fewer bits",
        "zh": "rounding，算法相同，位数更少",
    },
    "fidelity.optimizer": {
        "en": "optimizer, another update rule",
        "zh": "optimizer，换了更新规则",
    },
    "fidelity.capacity": {
        "en": "capacity, fewer weights learn",
        "zh": "capacity，参与训练的权重更少",
    },
    "fidelity.data": {"en": "data, texts are cut shorter", "zh": "data，文本被截得更短"},
    "total": {
        "en": "{total} in all: {training} of training, {evaluation} of {count} evaluations",
        "zh": "共 {total}：训练 {training}，{count} 次评估 {evaluation}",
    },
    "total.alone": {"en": "{total} in all, of training", "zh": "共 {total}，均为训练"},
    "peak": {"en": "Highest moment of the run", "zh": "整个运行的最高点"},
    "peak.smallest": {"en": "The smallest plan found", "zh": "找到的最小方案"},
    "decisions": {"en": "Decisions", "zh": "各项决定"},
    "next": {"en": "Other plans that fit", "zh": "其他放得下的方案"},
    "next.step": {"en": "step", "zh": "每步"},
    "next.memory": {"en": "memory", "zh": "显存"},
    "next.fidelity": {"en": "fidelity", "zh": "保真度"},
    "next.differs": {"en": "differs by", "zh": "差别"},
    "way.comma": {"en": ", ", "zh": "，"},
    "way.without": {"en": "without {what}", "zh": "不用{what}"},
    "way.micro_batching": {"en": "micro-batches of {tokens} tokens", "zh": "微批次 {tokens} 词元"},
    "way.layers": {"en": "{count} layers", "zh": "{count} 层"},
    "way.layers.one": {"en": "one layer", "zh": "1 层"},
    "way.checkpointing.layer": {"en": "{layers} recomputed", "zh": "{layers}重计算"},
    "way.checkpointing.layer.all": {"en": "every layer recomputed", "zh": "全部层重计算"},
    "way.checkpointing.mlp": {
        "en": "the MLP half of {layers} recomputed",
        "zh": "{layers}的 MLP 部分重计算",
    },
    "way.checkpointing.mlp.all": {
        "en": "the MLP half of every layer recomputed",
        "zh": "全部层的 MLP 部分重计算",
    },
    "way.activation_offload": {
        "en": "activations of {layers} in host memory",
        "zh": "{layers}的激活放主机内存",
    },
    "way.activation_offload.all": {
        "en": "activations in host memory",
        "zh": "激活放主机内存",
    },
    "way.lowbit_adamw": {"en": "{master_bits}-bit masters", "zh": "{master_bits} 位主权重"},
    "way.gradient_release.kept8": {"en": "gradients in 8 bits", "zh": "8 位梯度"},
    "way.gradient_release.host": {"en": "gradients in host memory", "zh": "梯度放主机内存"},
    "way.gradient_release.two_pass": {"en": "backward twice", "zh": "反向两遍"},
    "way.gradient_release.release": {
        "en": "gradients released as they come",
        "zh": "梯度即用即弃",
    },
    "way.state_offload": {
        "en": "the optimizer's state in host memory",
        "zh": "优化器状态在主机内存",
    },
    "way.state_offload.gradients": {
        "en": "the optimizer's state and gradients in host memory",
        "zh": "优化器状态和梯度在主机内存",
    },
    "way.optimizer_offload": {"en": "the update in host memory", "zh": "在主机内存中更新"},
    "way.optimizer_offload.weights": {
        "en": "weights and update in host memory",
        "zh": "权重和更新都在主机内存",
    },
    "way.half_precision": {"en": "computed in {dtype}", "zh": "以 {dtype} 计算"},
    "way.small_state_optimizer": {"en": "{rule}", "zh": "优化器 {rule}"},
    "way.lora": {"en": "LoRA of rank {rank}", "zh": "秩 {rank} 的 LoRA"},
    "way.freezing": {"en": "{what} frozen", "zh": "冻结 {what}"},
    "way.truncation": {
        "en": "texts cut at {max_length} tokens",
        "zh": "文本截到 {max_length} 词元",
    },
    "allow": {"en": "What more permission would reach", "zh": "更多许可能达到什么"},
    "more": {"en": "What more budget would buy", "zh": "更多预算能换来什么"},
    "smaller": {"en": "Smaller models of the family", "zh": "同系列的更小模型"},
    "notes": {"en": "Notes", "zh": "注意"},
    "figures": {
        "en": "planned in {seconds}: {considered} ways priced, {traced} traced in full",
        "zh": "规划用时 {seconds}：估算 {considered} 种方式，完整追踪 {traced} 种",
    },
    "written": {"en": "written to {path}", "zh": "已写入 {path}"},
    "datasets": {"en": "Datasets", "zh": "数据集"},
    "datasets.failed": {
        "en": "{count} of {total} datasets failed: {names}; go on with: {command}",
        "zh": "{total} 个数据集中有 {count} 个失败：{names}；继续：{command}",
    },
    "datasets.stopped": {
        "en": "stopped at {name}; {done} of {total} datasets are done; go on with: {command}",
        "zh": "停在 {name}；{total} 个数据集已完成 {done} 个；继续：{command}",
    },
}
