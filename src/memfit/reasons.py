"""Strategies in words: what each is called, and why one cannot be used.

Strategies refuse in English sentences of their own, which their pages quote. Those that users meet
stand here word for word; `translated` finds them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from memfit.messages import Language, language

NAMES: dict[str, dict[Language, str]] = {
    "packing": {"en": "packing", "zh": "紧密拼接"},
    "fused_attention": {"en": "fused attention", "zh": "融合注意力"},
    "fused_layers": {"en": "fused layers", "zh": "融合层"},
    "small_workspace": {"en": "small workspaces", "zh": "小工作区"},
    "cuda_graphs": {"en": "CUDA graphs", "zh": "CUDA graph"},
    "checkpointing": {"en": "recomputing layers", "zh": "层重计算"},
    "activation_offload": {"en": "activation offload", "zh": "激活卸载"},
    "half_precision": {"en": "half precision", "zh": "半精度"},
    "lowbit_adamw": {"en": "the low-bit optimizer", "zh": "低比特优化器"},
    "gradient_release": {"en": "releasing gradients", "zh": "梯度即用即弃"},
    "state_offload": {"en": "state offload", "zh": "优化器状态卸载"},
    "optimizer_offload": {"en": "optimizer offload", "zh": "优化器卸载"},
    "small_state_optimizer": {"en": "a small-state optimizer", "zh": "小状态优化器"},
    "lora": {"en": "LoRA", "zh": "LoRA"},
    "freezing": {"en": "freezing", "zh": "冻结"},
    "frozen_features": {"en": "frozen features", "zh": "冻结特征"},
    "truncation": {"en": "shorter texts", "zh": "截短文本"},
}

MESSAGES: Mapping[str, Mapping[str, str]] = {
    # First: what follows it is a sentence of its own.
    "because": {
        "en": "{strategy} cannot be used here: {reason}",
        "zh": "{strategy} 在这里不能用：{reason}",
    },
    "kernels": {
        "en": "its kernels are for CUDA; on a {device} they would save nothing",
        "zh": "它的内核用于 CUDA；在 {device} 上省不了什么",
    },
    "triton": {
        "en": "its kernels need Triton, which is not installed",
        "zh": "它的内核需要 Triton，这里没有安装",
    },
    "triton.old": {
        "en": "its kernels need Triton, which needs compute capability 7.0",
        "zh": "它的内核需要 Triton，而 Triton 要求计算能力 7.0",
    },
    "activations": {
        "en": "on a {device} device activations are in host memory already",
        "zh": "在 {device} 上激活本来就在主机内存里",
    },
    "optimizer": {
        "en": "on a {device} device the optimizer is in host memory already",
        "zh": "在 {device} 上优化器本来就在主机内存里",
    },
    "state": {
        "en": "on a {device} device the state is in host memory already",
        "zh": "在 {device} 上优化器状态本来就在主机内存里",
    },
    "state.lowbit": {
        "en": "it needs the low-bit optimizer, whose state is small enough to cross the bus",
        "zh": "它需要低比特优化器，其状态小到可以经总线读写",
    },
    "state.kept8": {
        "en": "only gradients of eight bits can be added up there; take kept8",
        "zh": "只有 8 位梯度能在那里累加；请用 kept8",
    },
    "cublas": {"en": "a {device} has no cuBLAS", "zh": "{device} 没有 cuBLAS"},
    "workspace": {
        "en": "this card's workspace is small already",
        "zh": "这张卡的工作区本来就小",
    },
    "graphs": {"en": "a {device} has no CUDA graphs", "zh": "{device} 没有 CUDA graph"},
    "peft": {
        "en": "peft is not installed; install it with: pip install memfit[lora]",
        "zh": "没有安装 peft；请安装：pip install memfit[lora]",
    },
    "chosen": {"en": "you set {variable} yourself", "zh": "你自己设置了 {variable}"},
    "host": {
        "en": "it needs {needed} of the computer's memory, of which {free} are free",
        "zh": "它需要 {needed} 主机内存，而空闲的只有 {free}",
    },
    "deberta": {
        "en": "DeBERTa's attention mixes in relative positions and ignores text boundaries",
        "zh": "DeBERTa 的注意力含相对位置，不理会文本边界",
    },
    "mpnet": {
        "en": "MPNet adds relative position biases and silently ignores text boundaries",
        "zh": "MPNet 加入相对位置偏置，悄悄忽略文本边界",
    },
    "decoder": {
        "en": "{kind} is a decoder; only encoders are packed so far",
        "zh": "{kind} 是解码器；目前只打包编码器",
    },
    "no_rule": {
        "en": "there is no packing rule for the model type {kind}",
        "zh": "模型类型 {kind} 没有打包规则",
    },
    "not_bert": {
        "en": "{name} is not built of BERT's layers",
        "zh": "{name} 不是由 BERT 的层构成",
    },
    "is_decoder": {"en": "{name} is a decoder", "zh": "{name} 是解码器"},
    "activation": {
        "en": "its activation is {name}, and only GELU is fused",
        "zh": "它的激活函数是 {name}，只有 GELU 能融合",
    },
    "own_layers": {
        "en": "no layer of {name} is a stock layer: adapters, hooks or own classes are in it",
        "zh": "{name} 没有一层是原版的：里面有适配器、钩子或自定义的类",
    },
    "own_loss": {
        "en": "your own loss cannot be captured unseen",
        "zh": "你自己的损失函数无法不经查看就录制",
    },
    "shared": {
        "en": "all layers of {name} share their weights, which are needed all the time",
        "zh": "{name} 的所有层共享权重，时刻都要用到",
    },
    "half.cpu": {
        "en": "this CPU advertises {dtype} instructions that it does not run",
        "zh": "这个 CPU 声称支持 {dtype} 指令，却不能执行",
    },
    "bf16": {
        "en": "this CPU has no bfloat16 instructions",
        "zh": "这个 CPU 没有 bfloat16 指令",
    },
}


def called(name: str) -> str:
    """A strategy by the name it has in the language spoken."""
    return NAMES.get(name, {}).get(language(), name)


def translated(reason: str, spoken: Language | None = None) -> str:
    """A strategy's own sentence in the language spoken; itself where nobody has translated it."""
    spoken = spoken or language()
    if spoken == "en":
        return reason
    for name, both in MESSAGES.items():
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(both["en"]))
        if found := re.fullmatch(pattern, reason):
            fields = found.groupdict()
            if name == "because":
                fields["reason"] = translated(fields["reason"], spoken)
            return both[spoken].format_map(fields)
    return reason
