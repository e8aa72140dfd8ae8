"""What `memfit doctor` says, in English and in Chinese."""

from __future__ import annotations

from collections.abc import Mapping

_HERE: Mapping[str, Mapping[str, str]] = {
    "finding.problem": {"en": "problem: {text}", "zh": "问题：{text}"},
    "finding.note": {"en": "note: {text}", "zh": "注意：{text}"},
    "versions.none": {"en": "no {name}", "zh": "没有 {name}"},
    "versions.cuda": {
        "en": "torch {version} (CUDA {cuda})",
        "zh": "torch {version}（CUDA {cuda}）",
    },
    "versions.cpu": {"en": "torch {version} (no CUDA)", "zh": "torch {version}（无 CUDA）"},
    "card": {
        "en": "{name}, compute capability {capability}, {total}, {free} of it free",
        "zh": "{name}，计算能力 {capability}，显存 {total}，空闲 {free}",
    },
    "driver": {
        "en": "driver {version}, which runs CUDA up to {cuda}",
        "zh": "驱动 {version}，最高支持 CUDA {cuda}",
    },
    "host": {
        "en": "host memory {total}, {free} of it free",
        "zh": "主机内存 {total}，空闲 {free}",
    },
    "hint.gpu": {
        "en": "What a card can train: memfit doctor --gpu 'RTX 3060'",
        "zh": "想知道某张显卡能训练什么：memfit doctor --gpu 'RTX 3060'",
    },
}

_FINDINGS: Mapping[str, Mapping[str, str]] = {
    "package.missing": {"en": "{name} is not installed", "zh": "没有安装 {name}"},
    "package.missing.wanted": {
        "en": "{name} is not installed; memfit needs {wanted}",
        "zh": "没有安装 {name}；memfit 需要 {wanted}",
    },
    "package.version": {
        "en": "{name} is {version} here; memfit needs {wanted}",
        "zh": "这里的 {name} 是 {version}；memfit 需要 {wanted}",
    },
    "torch.broken": {
        "en": "torch cannot be imported: {error}",
        "zh": "torch 无法导入：{error}",
    },
    "torch.broken.dll": {
        "en": "torch cannot be imported: {error}; install Microsoft's Visual C++ Redistributable "
        "(x64) and try again",
        "zh": "torch 无法导入：{error}；请安装微软的 Visual C++ Redistributable（x64）后再试",
    },
    "gpu.none": {
        "en": "no NVIDIA GPU was found: memfit trains on the CPU",
        "zh": "没有找到 NVIDIA 显卡：memfit 用 CPU 训练",
    },
    "torch.cpu": {
        "en": "torch {version} was built without CUDA and leaves the {card} unused: memfit would "
        "train on the CPU",
        "zh": "torch {version} 不带 CUDA，{card} 用不上：memfit 只能用 CPU 训练",
    },
    "torch.driver": {
        "en": "torch {version} for CUDA {cuda} cannot use the {card}: driver {driver} runs CUDA "
        "{newest} at most, or CUDA_VISIBLE_DEVICES hides the card; update the driver or take "
        "another build of torch",
        "zh": "CUDA {cuda} 版的 torch {version} 用不了 {card}：驱动 {driver} 最高支持 CUDA "
        "{newest}，或者 CUDA_VISIBLE_DEVICES 隐藏了这张卡；请更新驱动或换一个 torch 版本",
    },
    "torch.kernels": {
        "en": "torch {version} has no kernels for the {card} (compute capability {capability}): it "
        "would fail with 'no kernel image is available'",
        "zh": "torch {version} 没有适合 {card}（计算能力 {capability}）的内核："
        "运行时会报 'no kernel image is available'",
    },
    "gpus": {
        "en": "there are {count} GPUs; one process trains on the first it sees",
        "zh": "有 {count} 张显卡；一个进程在它看到的第一张上训练",
    },
    "held": {
        "en": "{bytes} of the {card} are in use now; nvidia-smi shows by whom",
        "zh": "{card} 现在有 {bytes} 被占用；nvidia-smi 会显示被谁占用",
    },
    "windows.triton": {
        "en": "Windows has no Triton by default: fused_layers is not available and lowbit_adamw "
        "runs in plain torch, slower",
        "zh": "Windows 默认没有 Triton：fused_layers 不可用，lowbit_adamw 用普通 torch 运行，较慢",
    },
    "windows.fallback": {
        "en": "on Windows the driver may move what does not fit into the computer's own memory, "
        "many times slower, instead of failing; NVIDIA Control Panel, Manage 3D settings, CUDA - "
        "Sysmem Fallback Policy: Prefer No Sysmem Fallback",
        "zh": "在 Windows 上，显存放不下时驱动可能把数据挪到主机内存而不报错，速度慢很多倍；"
        "NVIDIA 控制面板 → 管理 3D 设置 → CUDA - Sysmem Fallback Policy，"
        "选 Prefer No Sysmem Fallback",
    },
}

_TABLES: Mapping[str, Mapping[str, str]] = {
    "head.package": {"en": "optional package", "zh": "可选的包"},
    "head.version": {"en": "version", "zh": "版本"},
    "head.purpose": {"en": "for", "zh": "用途"},
    "head.strategy": {"en": "strategy", "zh": "策略"},
    "head.fidelity": {"en": "fidelity", "zh": "保真度"},
    "head.here": {"en": "here", "zh": "本机"},
    "head.card": {"en": "on {card}", "zh": "在 {card} 上"},
    "head.model": {"en": "model", "zh": "模型"},
    "head.allowed": {"en": "with --allow", "zh": "用 --allow"},
    "ready": {"en": "ready", "zh": "可用"},
    "ready.note": {"en": "ready; {note}", "zh": "可用；{note}"},
    "faster": {"en": "faster with {package}", "zh": "装上 {package} 会更快"},
    "pricing": {
        "en": "pricing {model} ({number} of {count})",
        "zh": "正在估算 {model}（第 {number} 个，共 {count} 个）",
    },
    "trains": {
        "en": "What {card} can train in {budget}: batches of {rows} texts of {tokens} tokens",
        "zh": "{card} 在 {budget} 内能训练什么：每批 {rows} 条文本，每条 {tokens} 个词元",
    },
    "trains.foot": {
        "en": "memory and texts a second of the fastest plan that fits, predicted; in brackets "
        "what the smallest would need. exact: the same numbers; rounding: fewer bits, no loss of "
        "quality that was measured; --allow: another optimizer, LoRA, frozen weights, shorter "
        "texts. Everywhere else every parameter learns",
        "zh": "能放下的最快方案的显存和每秒文本数，均为预测；括号里是最小方案需要的显存。"
        "exact：数值相同；rounding：位数较少，实测没有质量损失；"
        "--allow：换优化器、LoRA、冻结权重、截短文本。其余各列都训练全部参数",
    },
    "trains.unpriced": {"en": "cannot be priced", "zh": "无法估算"},
    "cell.unneeded": {"en": "not needed", "zh": "不需要"},
    "cell.fits": {"en": "{size}, {speed}/s", "zh": "{size}，{speed} 条/秒"},
    "cell.none": {"en": "no ({size})", "zh": "放不下（{size}）"},
}

_PURPOSES: Mapping[str, Mapping[str, str]] = {
    "triton": {
        "en": "kernels of fused_layers and lowbit_adamw on a GPU",
        "zh": "显卡上 fused_layers 和 lowbit_adamw 的内核",
    },
    "peft": {"en": "--lora", "zh": "用于 --lora"},
    "matplotlib": {"en": "curves in the report", "zh": "报告里的曲线"},
    "modelscope-hub": {"en": "models from and to ModelScope", "zh": "从 ModelScope 下载和上传模型"},
    "sentencepiece": {
        "en": "tokenizers without a tokenizer.json, such as DeBERTa-v3's",
        "zh": "没有 tokenizer.json 的分词器，例如 DeBERTa-v3 的",
    },
    "flash-attn": {
        "en": "--attn-implementation flash_attention_2; packing does without",
        "zh": "用于 --attn-implementation flash_attention_2；packing 不需要它",
    },
    "bitsandbytes": {
        "en": "--optim adamw_bnb_8bit of the stock Trainer",
        "zh": "原版 Trainer 的 --optim adamw_bnb_8bit",
    },
    "torchao": {
        "en": "--optim adamw_torch_8bit of the stock Trainer",
        "zh": "原版 Trainer 的 --optim adamw_torch_8bit",
    },
}

MESSAGES: Mapping[str, Mapping[str, str]] = {
    **_HERE,
    **_FINDINGS,
    **_TABLES,
    **{f"purpose.{name}": both for name, both in _PURPOSES.items()},
}
