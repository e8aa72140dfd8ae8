"""The words of the documents' tables, in the languages they are written in."""

from __future__ import annotations

from collections.abc import Mapping

Words = Mapping[str, tuple[str, ...]]
"""By language: en, zh."""

RECIPE_HEADS: Words = {
    "en": ("", "tensors GiB", "reserved GiB", "device GiB", "predicted", "step s", "learns"),
    "zh": ("", "张量 GiB", "预留 GiB", "整卡 GiB", "预测误差", "每步秒数", "学习的部分"),
}
LEARNS: Words = {"en": ("all", "the head"), "zh": ("全部", "分类头")}
EXPERT: Words = {
    "en": (
        "bf16 autocast, batch 32",
        "bf16, batch 32, checkpointing",
        "bf16, batch 32, checkpointing, Adafactor",
    ),
    "zh": (
        "bf16 autocast，批大小 32",
        "bf16，批大小 32，检查点",
        "bf16，批大小 32，检查点，Adafactor",
    ),
}
COMPONENT_HEADS: Words = {
    "en": ("MiB", "weights", "optimizer", "workspaces", "all gradients", "a step adds", "context"),
    "zh": ("MiB", "权重", "优化器状态", "工作区", "全部梯度", "一步新增", "上下文"),
}
# The first row, and the two after the expert's.
COMPONENT_ROWS: Words = {
    "en": ("fp32, batch 32", "fp32, batch 1 × 32", "the whole recipe"),
    "zh": ("fp32，批大小 32", "fp32，批大小 1 × 32", "整套配方"),
}
LADDER_HEADS: Words = {
    "en": ("", "shrinks", "predicted MiB", "measured MiB", "epoch, × baseline", "fidelity"),
    "zh": ("", "针对", "预测 MiB", "实测 MiB", "一轮，是基线的几倍", "保真度"),
}
INFERENCE_HEADS: Words = {
    "en": ("", "rows a second", "time, × `predict --file`"),
    "zh": ("", "每秒行数", "用时，是 `predict --file` 的几倍"),
}
INFERENCE_ROWS: dict[str, dict[str, str]] = {
    "predict --file": {"en": "`memfit predict --file`", "zh": "`memfit predict --file`"},
    "evaluate": {"en": "`memfit evaluate`", "zh": "`memfit evaluate`"},
    **{
        f"pipeline, {size}": {
            "en": f'`pipeline("text-classification", batch_size={size})`',
            "zh": f'`pipeline("text-classification", batch_size={size})`',
        }
        for size in (1, 8, 32, 64)
    },
}
INFERENCE_MEMORY_HEAD = {"en": "{rows} rows", "zh": "{rows} 行"}
PLAN_HEADS: Words = {
    "en": (
        "budget", "the plan chosen", "predicted GB", "measured GB", "off", "step ms", "best other",
    ),
    "zh": (
        "预算", "选中的方案", "预测 GB", "实测 GB", "误差", "每步毫秒", "其他方案中最快",
    ),
}  # fmt: skip
PLAN_PAIRS: dict[str, dict[str, str]] = {
    "large 4GB": {"en": "BERT-Large, 4 GB", "zh": "BERT-Large，4 GB"},
    "large 3GB": {"en": "BERT-Large, 3 GB", "zh": "BERT-Large，3 GB"},
    "large 2GB": {"en": "BERT-Large, 2 GB", "zh": "BERT-Large，2 GB"},
    "large 16GB exact": {
        "en": "BERT-Large, 16 GB, `--exact`",
        "zh": "BERT-Large，16 GB，`--exact`",
    },
    "base 2GB": {"en": "BERT-Base, 2 GB", "zh": "BERT-Base，2 GB"},
    "base 1.5GB": {"en": "BERT-Base, 1.5 GB", "zh": "BERT-Base，1.5 GB"},
}
UNSAID = ("packing", "fused_layers", "small_workspace")
"""Strategies that every plan on that card has, or that say little."""
GUARD_HEADS: Words = {
    "en": ("", "epoch s", "most GB held", "out of memory", "adjustments"),
    "zh": ("", "一轮秒数", "最多占用 GB", "显存不足次数", "调整次数"),
}
GUARD_ROWS: Words = {
    "en": ("alone", "beside a process that takes and returns up to 0.9 GB"),
    "zh": ("单独运行", "旁边有进程反复占用又归还最多 0.9 GB"),
}
FAMILY_HEADS: Words = {
    "en": ("model", "runs", "tensors", "reserved", "on the device"),
    "zh": ("模型", "训练次数", "张量", "预留", "整块显卡"),
}
QUALITY_HEADS: Words = {
    "en": ("", "F1", "points", "95 % interval"),
    "zh": ("", "F1", "差几个百分点", "95% 区间"),
}
BETWEEN = {"en": "to", "zh": "到"}
# What the recipe does to the result: variants of quality.py, and what a reader calls them.
QUALITY: Mapping[str, Mapping[str, str]] = {
    "fp32 AdamW": {
        "en": "every weight, fp32, AdamW, 2e-5",
        "zh": "全部权重，fp32，AdamW，2e-5",
    },
    "fp32 AdamW, packed": {
        "en": "the same, without padding (as `memfit train` does it)",
        "zh": "同上，不填充（`memfit train` 的做法）",
    },
    "bf16 autocast, packed": {"en": "the same, in bf16", "zh": "同上，bf16"},
    "Adafactor": {"en": "Adafactor instead of AdamW", "zh": "AdamW 换成 Adafactor"},
    "length 32": {"en": "texts cut to 32 tokens", "zh": "文本截到 32 个 token"},
    "frozen encoder, 1e-3": {
        "en": "encoder frozen, the head at 1e-3",
        "zh": "冻结编码器，分类头用 1e-3",
    },
    "frozen encoder, 2e-5": {
        "en": "encoder frozen, the head at the copied 2e-5",
        "zh": "冻结编码器，分类头照抄 2e-5",
    },
}
# What `rounding` does to the result, on every model it was tried on.
ROUNDING_HEADS: Words = {
    "en": ("points of F1 from fp32 AdamW", "m3e-small, 24 M", "albert-tiny, 12 M", "MiniLM, 23 M"),
    "zh": ("与 fp32 AdamW 相差的 F1 点数", "m3e-small，24 M", "albert-tiny，12 M", "MiniLM，23 M"),
}
NO_BF16: Mapping[str, Mapping[str, str]] = {
    "fp32 AdamW, packed": {
        "en": "fp32, without padding (`--exact`)",
        "zh": "fp32，去填充（`--exact`）",
    },
    "fp16 autocast, packed": {
        "en": "fp16 autocast over fp32 weights",
        "zh": "fp32 权重，fp16 自动混合精度",
    },
    "24-bit masters of fp16, clipped, fused": {
        "en": "24-bit masters of fp16 weights, loss scale",
        "zh": "fp16 权重的 24 位主权重，损失缩放",
    },
    "16-bit stochastic of fp16, 8-bit gradients, clipped, fused, graphs": {
        "en": "16-bit masters of fp16 weights, 8-bit gradients, CUDA graphs",
        "zh": "fp16 权重的 16 位主权重，8 位梯度，CUDA graph",
    },
}
ROUNDING_MODELS = ("m3e-small", "albert-tiny", "minilm")
ROUNDING: Mapping[str, Mapping[str, str]] = {
    "bf16 autocast, packed": {"en": "bf16 autocast", "zh": "bf16 自动混合精度"},
    "24-bit masters, clipped": {"en": "24-bit masters", "zh": "24 位主权重"},
    "24-bit masters, 8-bit gradients, clipped": {
        "en": "24-bit masters, 8-bit gradients",
        "zh": "24 位主权重，8 位梯度",
    },
    "24-bit masters, 8-bit gradients, clipped, fused, graphs": {
        "en": "the same, fused, replayed as CUDA graphs",
        "zh": "同上，融合，CUDA graph 重放",
    },
    "24-bit masters, gradients on the host, clipped": {
        "en": "24-bit masters, gradients in host memory",
        "zh": "24 位主权重，梯度放主机内存",
    },
    "24-bit masters of fp16, clipped": {
        "en": "24-bit masters of fp16 weights",
        "zh": "fp16 权重的 24 位主权重",
    },
    "16-bit stochastic, clipped": {"en": "16-bit masters", "zh": "16 位主权重"},
    "16-bit stochastic, 8-bit gradients, clipped": {
        "en": "16-bit masters, 8-bit gradients",
        "zh": "16 位主权重，8 位梯度",
    },
    "optimizer on the host, bf16 weights": {
        "en": "the update in host memory, bf16 weights",
        "zh": "在主机内存中更新，bf16 权重",
    },
}

RESULT_HEADS = {
    "en": ("BERT-Large, 32 texts a step", "GPU memory", "one step", "what is trained"),
    "zh": ("BERT-Large，每步 32 条文本", "显存", "一步", "训练什么"),
}
# By the row of the picture.
RESULT_ROWS = {
    "en": {
        0: ("the stock Trainer, fp32", "everything"),
        3: ("+ batch 1 × 32, checkpointing, Adafactor", "everything"),
        5: ("+ frozen encoder, texts cut at 32 tokens", "the head only"),
        6: ("memfit `--budget 4GB`", "everything"),
        8: ("memfit `--budget 2GB`", "everything"),
    },
    "zh": {
        0: ("原版 Trainer，fp32", "全部参数"),
        3: ("+ 批大小 1 × 32、梯度检查点、Adafactor", "全部参数"),
        5: ("+ 冻结编码器，文本截到 32 个词元", "只有分类头"),
        6: ("memfit `--budget 4GB`", "全部参数"),
        8: ("memfit `--budget 2GB`", "全部参数"),
    },
}
