"""The parts of a classifier: its layers, its positions, which weights learn.

Works on the structure, not on a list of model names, and so also on a model on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from memfit.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

POSITION_TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")

# peft names targets for few encoders (none for ERNIE, DistilBERT, ALBERT, ModernBERT, MPNet),
# so the attention's query and value are looked up under the names the families give them.
LORA_TARGETS = (
    ("query", "value"),  # BERT, RoBERTa, ELECTRA, ALBERT, ERNIE
    ("query_proj", "value_proj"),  # DeBERTa-v2 and v3
    ("q_proj", "v_proj"),  # Qwen, Llama, Gemma
    ("q_lin", "v_lin"),  # DistilBERT, XLM
    ("Wqkv",),  # ModernBERT
    ("in_proj",),  # DeBERTa
    ("query_key_value",),  # GPT-NeoX, BLOOM
    ("c_attn",),  # GPT-2
    ("q", "v"),  # MPNet, T5
)


def base_of(model: PreTrainedModel) -> nn.Module:
    """The pre-trained part beneath the head: `model.bert` and its cousins."""
    base = getattr(model, model.base_model_prefix, None)
    return base if base is not None else model.base_model


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The stack of layers, lowest first: the longest list of modules in the base model."""
    from torch import nn

    lists = [list(item) for item in base_of(model).modules() if isinstance(item, nn.ModuleList)]
    return max(lists, key=len, default=[])


def position_limit(model: PreTrainedModel) -> int | None:
    """The most tokens a text may have; None where positions are relative and unlimited.

    RoBERTa and its family start counting at the padding index + 1, BART and OPT at an offset,
    so that fewer positions are usable than the table has rows.
    """
    from torch import nn

    for name, module in base_of(model).named_modules():
        if name.rpartition(".")[2] in POSITION_TABLES and isinstance(module, nn.Embedding):
            if module.padding_idx is not None:
                return module.num_embeddings - module.padding_idx - 1
            offset = getattr(module, "offset", 0)
            return module.num_embeddings - int(offset)
    if any("rotary" in name for name, _ in model.named_modules()):
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        return int(limit) if limit else None
    return None


def freeze(model: PreTrainedModel, what: str) -> int:
    """Stops weights from learning and returns how many parameters that are.

    `encoder` is the whole base model, its pooler included; `embeddings` the embedding tables;
    a number that many layers from below, with the embeddings under them.
    """
    frozen = 0
    for part in _frozen_parts(model, what):
        for parameter in part.parameters():
            frozen += parameter.numel() if parameter.requires_grad else 0
            parameter.requires_grad = False
    if not frozen:
        raise ConfigError(
            "--freeze {what} froze nothing: {model} has no such part that learns",
            what=what,
            model=type(model).__name__,
        )
    return frozen


def _frozen_parts(model: PreTrainedModel, what: str) -> Iterable[nn.Module]:
    base = base_of(model)
    if what == "encoder":
        return [base]
    embeddings = getattr(base, "embeddings", None) or model.get_input_embeddings()
    if what == "embeddings":
        return [embeddings]
    layers, count = layers_of(model), int(what)
    if count > len(layers):
        said = {"count": count, "layers": len(layers), "model": type(model).__name__}
        raise ConfigError(
            "--freeze {count} is more than the {layers} layers of {model}; write encoder "
            "to freeze all of it",
            **said,
        )
    return [embeddings, *layers[:count]]


def lora_targets(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of the attention's query and value projections."""
    leaves = {name.rpartition(".")[2] for name, _ in base_of(model).named_modules()}
    for names in LORA_TARGETS:
        if leaves.issuperset(names):
            return names
    raise ConfigError(
        "--lora does not know the attention projections of {model}; give BudgetTrainer a "
        "model prepared with peft",
        model=type(model).__name__,
    )


def add_lora(
    model: PreTrainedModel,
    rank: int,
    *,
    alpha: int | None = None,
    dropout: float = 0.05,
    fresh: Iterable[str] = (),
    on_meta: bool = False,
) -> Any:
    """The model with LoRA adapters of this rank; what was never pre-trained learns in full.

    `fresh` names weights that were initialised at random, such as a pooler the checkpoint
    lacks: low-rank steps away from random weights would leave them random.
    """
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError:
        raise ConfigError("--lora needs peft; install it with: pip install memfit[lora]") from None
    base_name = model.base_model_prefix
    whole = {
        name
        for name, part in model.named_children()
        if name != base_name and next(part.parameters(), None) is not None
    }
    whole |= {"pooler" for name in fresh if ".pooler." in f".{name}"}
    settings = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=list(lora_targets(model)),
        modules_to_save=sorted(whole),
    )
    return get_peft_model(model, settings, low_cpu_mem_usage=on_meta)
