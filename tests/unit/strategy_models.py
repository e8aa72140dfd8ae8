"""Small real models of many families, and one training step on them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from memfit.memory.components import Component
from memfit.memory.trace import Tracker
from memfit.strategies.base import Setup

DEPTH = 4
SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "num_labels": 3,
    "hidden_size": 32,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
DISTILBERT = {"dim": 32, "n_layers": DEPTH, "n_heads": 2, "hidden_dim": 64, "dropout": 0.2}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8}
SPECIAL = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**SHAPE, **DROPOUT}),
    "roberta": ("Roberta", {**SHAPE, **DROPOUT, "pad_token_id": 1}),
    "electra": ("Electra", {**SHAPE, **DROPOUT, "embedding_size": 16}),
    "ernie": ("Ernie", {**SHAPE, **DROPOUT}),
    "albert": ("Albert", {**SHAPE, **DROPOUT, "embedding_size": 16}),
    "distilbert": ("DistilBert", {"vocab_size": 101, "num_labels": 3, **DISTILBERT}),
    "modernbert": ("ModernBert", {**SHAPE, **SPECIAL, "mlp_dropout": 0.2, "local_attention": 8}),
    "mpnet": ("MPNet", {**SHAPE, **DROPOUT, "pad_token_id": 1}),
    "deberta-v2": ("DebertaV2", {**SHAPE, **DROPOUT, **DEBERTA}),
    "qwen3": ("Qwen3", {**SHAPE, "num_key_value_heads": 1, "head_dim": 16}),
}


def build(name: str, **changes: Any) -> Any:
    """A classifier in training mode, dropout on, the same weights every time."""
    prefix, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**settings, **changes})
    return getattr(transformers, f"{prefix}ForSequenceClassification")(config).train()


def batch_for(model: Any, rows: int = 3, tokens: int = 16, seed: int = 1) -> dict[str, Tensor]:
    """Texts of which the first is shorter than the others."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[0, tokens - 5 :] = 0
    ids = torch.randint(5, 101, (rows, tokens), generator=generator)
    return {
        "input_ids": torch.where(mask.bool(), ids, model.config.pad_token_id),
        "attention_mask": mask,
        "labels": torch.arange(rows) % 3,
    }


def setup_for(model: nn.Module, **training: Any) -> Setup:
    """What strategies are applied to."""
    args = transformers.TrainingArguments("unused", use_cpu=True, report_to=[], **training)
    return Setup(model=model, args=args, device=torch.device("cpu"))


def undo(setup: Setup) -> None:
    """Last change first, as the Trainer does."""
    while setup.undo:
        setup.undo.pop()()


def step(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits and all gradients as one vector, with the same random numbers every time."""
    model.zero_grad()
    torch.manual_seed(7)
    output = model(**inputs)
    output.loss.backward()
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return output.logits.detach(), torch.cat(found)


def peak_bytes(model: Any, tracker: Tracker | None = None, rows: int = 8, tokens: int = 32) -> int:
    """What one step needs at most, beside the weights; its inputs count."""
    model.zero_grad()
    inputs = batch_for(model, rows, tokens)
    tracker = tracker or Tracker()
    tracker.adopt(iter(model.parameters()), Component.WEIGHTS)
    weights = tracker.live_bytes
    with tracker:
        model(**inputs).loss.backward()
    return tracker.peak_bytes - weights
