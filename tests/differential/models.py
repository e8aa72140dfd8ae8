"""Tiny models of fifteen families with every head, without dropout, always of the same weights."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

VOCABULARY, LABELS, LONGEST = 100, 3, 20
MAX_LENGTH = 24
"""What a collator pads to that pads all batches alike."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 40,
    "pad_token_id": 0,
}  # fmt: skip
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = {**_SHAPE, **_NO_DROPOUT}
_SPECIAL = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
_RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": -1,
             "max_relative_positions": 8}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _ENCODER),
    "roberta": ("Roberta", {**_ENCODER, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", {**_ENCODER, "pad_token_id": 1}),
    "camembert": ("Camembert", {**_ENCODER, "pad_token_id": 1}),
    "electra": ("Electra", {**_ENCODER, "embedding_size": 8}),
    "ernie": ("Ernie", _ENCODER),
    "albert": ("Albert", {**_ENCODER, "embedding_size": 8, "classifier_dropout_prob": 0.0}),
    "distilbert": ("DistilBert", {
        "vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32,
        "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "qa_dropout": 0.0,
        "max_position_embeddings": 40,
    }),
    "modernbert": ("ModernBert", {**_SHAPE, **_SPECIAL, "local_attention": 8}),
    "mpnet": ("MPNet", {**_ENCODER, "pad_token_id": 1}),
    "deberta-v2": ("DebertaV2", {**_ENCODER, **_RELATIVE}),
    "qwen3": ("Qwen3", {**_SHAPE, "num_key_value_heads": 1, "head_dim": 8}),
    "llama": ("Llama", {**_SHAPE, "num_key_value_heads": 1}),
    "gpt2": ("GPT2", {
        "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0,
        "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
    }),
    "opt": ("OPT", {
        **_SHAPE, "ffn_dim": 32, "dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0,
        "word_embed_proj_dim": 16, "bos_token_id": 2, "eos_token_id": 3,
    }),
}  # fmt: skip
WIDE = {
    **dict.fromkeys(("hidden_size", "dim", "n_embd", "word_embed_proj_dim"), 136),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim"), 160),
    "head_dim": 68,
}
"""Sizes whose matrices are large to the low-bit optimizer, which leaves small ones in float32."""
DECODERS = frozenset({"qwen3", "llama", "gpt2", "opt"})
WITHOUT_OWN_HEAD = frozenset({"gpt2", "opt"})
"""Decoders whose language-model head is their embeddings."""

_AUTO = {
    "single": "SequenceClassification",
    "multi": "SequenceClassification",
    "regression": "SequenceClassification",
    "token": "TokenClassification",
    "masked_lm": "MaskedLM",
    "question": "QuestionAnswering",
    "choice": "MultipleChoice",
    "causal_lm": "CausalLM",
}
TASKS = tuple(_AUTO)
CLASSIFIER_HEADS = ("mean", "masked_mean", "max", "bilstm", "flatten", "branches", "module")
"""Heads people write themselves, above a BERT; `module` is no transformers model at all."""


def has_task(family: str, task: str) -> bool:
    """Whether transformers has this family with this head."""
    if (task == "causal_lm") != (family in DECODERS) and task in ("causal_lm", "masked_lm"):
        return False
    config = getattr(transformers, f"{FAMILIES[family][0]}Config")
    auto: Any = getattr(transformers, f"AutoModelFor{_AUTO[task]}")
    return config in auto._model_mapping


def model_of(task: str, family: str, head: str, *, wide: bool = False) -> nn.Module:
    """A model of its own, of the same weights every time."""
    return copy.deepcopy(_built(task, family, head, wide))


@functools.cache
def _built(task: str, family: str, head: str, wide: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _made(task, family, head, wide)
        for parameter in model.parameters():
            # Initialised weights are so small that heads return zeros, and biases are zero.
            scale = 0.1 * (16 / max(parameter.shape[-1], 16)) ** 0.5
            parameter.data.add_(torch.randn_like(parameter) * scale)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # some heads have no setting for it
        padding = getattr(module, "padding_idx", None)
        if isinstance(module, nn.Embedding) and padding is not None:
            module.weight.data[padding].zero_()
    # The heads of sequence classifiers take num_items_in_batch and ignore it
    # (transformers#47688): the reference must not believe them.
    model.accepts_loss_kwargs = False  # type: ignore[assignment]
    return model


def _made(task: str, family: str, head: str, wide: bool) -> nn.Module:
    prefix, settings = FAMILIES[family]
    if wide:
        settings = {name: WIDE.get(name, value) for name, value in settings.items()}
    labels = {"regression": 1, "question": 2}.get(task, LABELS)
    problem = {"multi": "multi_label_classification", "regression": "regression",
               "single": "single_label_classification"}.get(task)  # fmt: skip
    config = getattr(transformers, f"{prefix}Config")(
        **settings, num_labels=labels, problem_type=problem
    )
    if head == "module":
        return Plain(labels, task)
    if head != "own":
        return Headed(config, head, labels, task)
    auto: Any = getattr(transformers, f"AutoModelFor{_AUTO[task]}")
    model: nn.Module = auto.from_config(config)
    return model


def classification_loss(task: str, logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers' heads compute it."""
    if task == "regression":
        return F.mse_loss(logits.squeeze(-1), labels)
    if task == "multi":
        return F.binary_cross_entropy_with_logits(logits, labels)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class Headed(nn.Module):
    """An encoder with a head people write themselves; all but masked_mean see padding."""

    def __init__(self, config: Any, head: str, labels: int, task: str) -> None:
        super().__init__()
        self.config = config
        self.encoder = transformers.AutoModel.from_config(config)
        self.head, self.task = head, task
        width = config.hidden_size
        self.lstm = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.score = nn.Linear(width * (MAX_LENGTH if head == "flatten" else 1), labels)
        if head != "bilstm":
            del self.lstm
        if head != "branches":
            del self.branches

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None, **_: Any
    ) -> SequenceClassifierOutput:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.score(self._pooled(hidden, input_ids, attention_mask))
        loss = None if labels is None else classification_loss(self.task, logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def _pooled(self, hidden: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
        if self.head == "mean":
            return hidden.mean(dim=1)
        if self.head == "masked_mean":
            weight = torch.ones_like(ids) if mask is None else mask
            weight = weight.unsqueeze(-1).to(hidden.dtype)
            return (hidden * weight).sum(dim=1) / weight.sum(dim=1)
        if self.head == "max":
            return hidden.max(dim=1).values
        if self.head == "bilstm":
            return self.lstm(hidden)[0].mean(dim=1)
        if self.head == "flatten":
            return hidden.flatten(1)
        # Which branch a text takes is its own affair; one may go unused in a micro-batch.
        first, taken = hidden[:, 0], ids[:, 0] % 2
        pooled = torch.zeros_like(first)
        for index, branch in enumerate(self.branches):
            rows = (taken == index).nonzero().squeeze(1)
            if len(rows):
                pooled = pooled.index_put((rows,), branch(first[rows]).to(pooled.dtype))
        return pooled


class Plain(nn.Module):
    """No transformers model: its loss comes first in a tuple."""

    def __init__(self, labels: int, task: str) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.mix = nn.GRU(16, 16, batch_first=True)
        self.score = nn.Linear(16, labels)
        self.task = task

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None
    ) -> tuple[Tensor, ...]:
        del attention_mask  # it reads the padding as text
        logits = self.score(self.mix(self.words(input_ids))[0][:, -1])
        if labels is None:
            return (logits,)
        return classification_loss(self.task, logits, labels), logits
