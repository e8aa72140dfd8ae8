"""Builds an untouched transformers Trainer for a `Case`: model, rows, arguments."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from _memory_cases import Case


def build_model(case: Case, *, device: str, tiny: bool) -> Any:
    """Random weights made on the device, then moved to the CPU: the Trainer brings them back."""
    family, overrides = case.config(tiny=tiny)
    config = AutoConfig.for_model(family, num_labels=2, **overrides)
    extra = {"attn_implementation": case.attn_implementation} if case.attn_implementation else {}
    with torch.device(device):
        model = AutoModelForSequenceClassification.from_config(
            config, dtype=getattr(torch, case.dtype), **extra
        )
    model.to("cpu")
    if case.freeze:
        freeze(model, case.freeze)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **case.lora))
    return model


def freeze(model: Any, what: str) -> None:
    """`encoder`: the whole base model; N: the embeddings and the first N layers."""
    base = model.base_model
    parts = [base] if what == "encoder" else [base.embeddings]
    if what.isdigit():
        parts += list(base.encoder.layer)[: int(what)]
    for part in parts:
        part.requires_grad_(False)


def make_rows(case: Case, config: Any) -> list[dict[str, Any]]:
    """Random token ids that never meet the padding id."""
    draw = torch.Generator().manual_seed(0)
    segments = case.describe()["token_type_ids"]
    rows = []
    for number, length in enumerate(case.row_lengths()):
        ids = torch.randint(3, config.vocab_size - 1, (length,), generator=draw)
        ids[ids == config.pad_token_id] = 2
        row = {"input_ids": ids.tolist(), "attention_mask": [1] * length, "labels": number % 2}
        rows.append(row | ({"token_type_ids": [0] * length} if segments else {}))
    return rows


def collate(
    rows: list[dict[str, Any]], *, pad: int, to_length: int | None, seen: list[list[int]]
) -> dict[str, Any]:
    """Pads to the longest row, or to `to_length`; writes the batch's shape into `seen`."""
    longest = to_length or max(len(row["input_ids"]) for row in rows)
    batch: dict[str, Any] = {"labels": torch.tensor([row["labels"] for row in rows])}
    for key, fill in (("input_ids", pad), ("attention_mask", 0), ("token_type_ids", 0)):
        if key in rows[0]:
            padded = [row[key] + [fill] * (longest - len(row[key])) for row in rows]
            batch[key] = torch.tensor(padded)
    seen.append([len(rows), longest])
    return batch


def arguments(case: Case, folder: str, *, cpu: bool, more_steps: int = 0) -> TrainingArguments:
    """Stock arguments; only what the case says differs from the defaults."""
    flags: dict[str, Any] = {"save_strategy": "no"}
    if case.phases:
        flags = {"save_strategy": "steps", "save_steps": case.steps}
        flags["per_device_eval_batch_size"] = case.batch
    if case.tf32 and not cpu:
        flags["tf32"] = True
    return TrainingArguments(
        output_dir=folder,
        max_steps=case.steps + more_steps,
        per_device_train_batch_size=case.batch,
        gradient_accumulation_steps=case.accumulation,
        learning_rate=2e-5,
        optim="adamw_torch_fused" if case.optim == "flash_adamw" else case.optim,
        bf16=case.bf16,
        fp16=case.fp16 and not cpu,
        gradient_checkpointing=case.gradient_checkpointing,
        torch_compile=case.torch_compile and not cpu,
        train_sampling_strategy="sequential",
        use_cpu=cpu,
        report_to="none",
        disable_tqdm=True,
        **flags,
        **case.training,
    )


def make_trainer(
    case: Case,
    model: Any,
    rows: list[dict[str, Any]],
    args: TrainingArguments,
    watch: TrainerCallback,
    seen: list[list[int]],
) -> Trainer:
    """An untouched Trainer; its own moving of the model to the device is part of the run."""
    to_length = case.length if case.padding == "max_length" else None
    pad = model.config.pad_token_id
    return Trainer(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=lambda part: collate(part, pad=pad, to_length=to_length, seen=seen),
        callbacks=[watch],
        optimizers=_optimizers(case, model, args.device),
    )


def _optimizers(case: Case, model: Any, device: Any) -> tuple[Any, Any]:
    """The one optimizer that the Trainer does not know by name."""
    if case.optim != "flash_adamw":
        return None, None
    from flashoptim import FlashAdamW

    model.to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return FlashAdamW(trained, lr=2e-5, master_weight_bits=24), None
