"""What is to be trained, read from a run's configuration or from a Trainer's arguments."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PretrainedConfig, TrainingArguments

from memfit.config import RunConfig
from memfit.data.values import LabelSpace
from memfit.errors import TraceError
from memfit.messages import Message
from memfit.parts import base_of, layers_of
from memfit.planner.given_model import Collate, given_model, is_built_from_config
from memfit.planner.values import Workload
from memfit.runtime.effective import effective_rows
from memfit.runtime.lengths import longest_row, row_lengths

_HALF = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def workload_of_run(
    config: RunConfig,
    settings: PretrainedConfig,
    args: TrainingArguments,
    labels: LabelSpace,
    lengths: Sequence[int],
    *,
    eval_rows: int = 0,
) -> Workload:
    """A run of the command line: no weights are needed, only the model's settings."""
    model = config.model
    settings = copy.deepcopy(settings)
    if model.attn_implementation is not None:
        settings._attn_implementation = model.attn_implementation
    return Workload(
        config=settings,
        lengths=tuple(lengths),
        args=args,
        user_set=user_set_of(config),
        num_labels=labels.num_labels,
        problem_type=labels.problem_type,
        freeze=model.freeze,
        lora=model.lora,
        dtype=model.dtype or "float32",
        stock_loss=args.label_smoothing_factor == 0,
        eval_rows=eval_rows,
        skips_bad_steps=config.on_nan == "skip",
    )


def workload_of_model(
    model: Any,
    args: TrainingArguments,
    train_dataset: Any,
    *,
    user_set: frozenset[str] | None = None,
    own_optimizer: str = "",
    stock_loss: bool = True,
    eval_rows: int = 0,
    skips_bad_steps: bool = False,
    collate: Collate | None = None,
) -> Workload:
    """A Trainer's model and arguments, before anything was done to them.

    Rows that cannot be looked at (a stream) are taken to be as long as the model can read.
    `own_optimizer` names one that was made outside: it stays, and is priced like AdamW. `collate`
    makes a batch of rows, for models that are more than their configuration says.
    """
    inner, rank = _without_adapters(model)
    given = None
    if not is_built_from_config(inner):
        if rank is not None:
            raise TraceError(
                Message("adapters in {name} cannot be traced", name=type(inner).__name__)
            )
        given, lengths = given_model(inner, train_dataset, collate)
    else:
        lengths = row_lengths(train_dataset)
    settings: Any = inner.config
    if not lengths:
        lengths = [longest_row(train_dataset, inner)] * effective_rows(args)
    known = changed_fields(args) if user_set is None else user_set
    if own_optimizer:
        args, known = copy.copy(args), known | {"optim"}
        args.optim = own_optimizer
    return Workload(
        config=copy.deepcopy(settings),
        lengths=tuple(lengths),
        args=args,
        user_set=known,
        num_labels=int(settings.num_labels or 2),
        problem_type=settings.problem_type or "single_label_classification",
        freeze=None if rank else _frozen(inner),
        lora=rank,
        dtype=_HALF.get(inner.dtype, "float32"),
        stock_loss=stock_loss,
        eval_rows=eval_rows,
        skips_bad_steps=skips_bad_steps,
        given=given,
    )


def user_set_of(config: RunConfig) -> frozenset[str]:
    """What was given by name: by flag, in the TOML file or in the call."""
    attention = {"attn_implementation"} if config.model.attn_implementation is not None else set()
    return frozenset(config.training) | attention


def changed_fields(args: TrainingArguments) -> frozenset[str]:
    """The arguments that are not the default: all that can be known of what the user set."""
    return frozenset(
        field.name
        for field in dataclasses.fields(args)
        if field.default is not dataclasses.MISSING
        and _plain(getattr(args, field.name, field.default)) != _plain(field.default)
    )


def _plain(value: Any) -> Any:
    """Enumerations as their text."""
    return getattr(value, "value", value)


def _without_adapters(model: Any) -> tuple[Any, int | None]:
    """The transformers model itself, and the rank of the LoRA adapters around it."""
    if not hasattr(model, "peft_config"):
        return model, None
    ranks = [getattr(config, "r", 8) for config in model.peft_config.values()]
    return model.get_base_model(), max(ranks)


def _frozen(model: Any) -> str | None:
    """The whole encoder, the embeddings and N layers, or nothing.

    Weights frozen in no order are priced as if they learned.
    """

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
