"""A model and its TrainingArguments as the step the memory trace prices."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments

from memfit.memory.spec import OPTIMIZERS, StepSpec
from memfit.parts import base_of, layers_of

# Optimizers the trace does not run itself, by one whose state is as large or larger.
_LIKE = {"adamw_8bit": "adamw_bnb_8bit", "paged_adamw_8bit": "adamw_bnb_8bit"}
_LARGEST = "adamw_torch"


def spec_of(
    model: PreTrainedModel | torch.nn.Module, args: TrainingArguments, *, rows: int, length: int
) -> StepSpec:
    """The step these arguments train, on micro-batches of this size.

    What the trace cannot tell apart (weights frozen in no order) is priced as if it learned.
    """
    inner, rank = _without_adapters(model)
    effective_rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    optim = str(getattr(args.optim, "value", args.optim))
    optim = _LIKE.get(optim, optim)
    return StepSpec(
        config=inner.config,
        rows=rows,
        length=length,
        num_labels=int(inner.config.num_labels or 2),
        problem_type=inner.config.problem_type or "single_label_classification",
        precision=_precision(inner, args),
        optim=optim if optim in OPTIMIZERS else _LARGEST,
        gradient_accumulation_steps=2 if rows < effective_rows else 1,
        gradient_checkpointing=args.gradient_checkpointing,
        freeze=None if rank else _frozen(inner),
        lora=rank,
        attn_implementation=inner.config._attn_implementation,
        max_grad_norm=args.max_grad_norm or 0.0,
    )


def _without_adapters(model: Any) -> tuple[Any, int | None]:
    """The transformers model itself, and the rank of the LoRA adapters around it."""
    if not hasattr(model, "peft_config"):
        return model, None
    ranks = [getattr(config, "r", 8) for config in model.peft_config.values()]
    return model.get_base_model(), max(ranks)


def _precision(model: PreTrainedModel, args: TrainingArguments) -> str:
    if model.dtype is torch.bfloat16:
        return "pure_bf16"
    if model.dtype is torch.float16:
        return "pure_fp16"
    if args.bf16:
        return "bf16"
    # A CPU trains in fp32 whatever fp16 says.
    return "fp16" if args.fp16 and args.device.type != "cpu" else "fp32"


def _frozen(model: PreTrainedModel) -> str | None:
    """As StepSpec spells it: the whole encoder, the embeddings and N layers, or nothing."""

    def learns(part: torch.nn.Module) -> bool:
        return any(parameter.requires_grad for parameter in part.parameters())

    if not learns(base_of(model)):
        return "encoder"
    layers = layers_of(model)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    first = next((count for count, layer in enumerate(layers) if learns(layer)), len(layers))
    before = list(base_of(model).named_parameters())
    embeddings = [p for name, p in before if id(p) not in inside and "embed" in name]
    if not embeddings or any(parameter.requires_grad for parameter in embeddings):
        return None
    return str(first) if first else "embeddings"
