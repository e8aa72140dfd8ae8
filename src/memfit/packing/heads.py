"""Which heads are known not to see padding: only these may lose it.

A batch of transformers' own sequence classifiers gives the same logits however wide it is padded,
as long as their attention masks padding and the head reads one token, or a mean over the mask. A
head of the user's own may average over padding, run an LSTM through it or flatten it; question
answering competes with it; token labels lie beside it. For these the width is part of the input.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from memfit.messages import Message
from memfit.packing.families import unwrap

_READ_FIRST = frozenset(
    {
        "albert", "bert", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert",
        "electra", "ernie", "eurobert", "jina_embeddings_v3", "megatron-bert", "mobilebert",
        "modernbert", "mpnet", "nomic_bert", "rembert", "roberta", "roformer", "xlm-roberta",
        "xlm-roberta-xl",
    }
)  # fmt: skip
_READ_LAST = frozenset({"bloom", "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt"})
"""Decoders that find a text's last token by its padding; the others share one class for it."""
_LAST_TOKEN_HEAD = "GenericForSequenceClassification"
_LIBRARIES = ("transformers.", "torch.", "peft.", "memfit.", "bitsandbytes.")
_ACROSS_TOKENS = (nn.Conv1d, nn.Conv2d, nn.RNNBase)


def sees_padding(model: nn.Module) -> str:
    """Why padding may change this model's answers; empty where it is known not to."""
    inner: Any = unwrap(model)
    name = type(inner).__name__
    if not isinstance(inner, PreTrainedModel):
        return Message("{name} is no transformers model", name=name)
    if not type(inner).__module__.startswith("transformers.") or not name.endswith(
        "ForSequenceClassification"
    ):
        return Message("{name} is no sequence classifier of transformers itself", name=name)
    if "forward" in vars(inner) and "_original_forward" not in vars(inner):  # accelerate's
        return Message("the forward of this {name} was replaced", name=name)
    kind = inner.config.model_type
    if kind not in _READ_FIRST and not reads_last_token(model):
        return Message("nobody has tried whether {kind} sees padding", kind=kind)
    if reads_last_token(model) and inner.config.get_text_config().pad_token_id is None:
        return Message("its config has no pad_token_id, so the last column is read")
    for part in inner.modules():
        if not type(part).__module__.startswith(_LIBRARIES):
            return Message("{name} in it is of your own", name=type(part).__name__)
        if isinstance(part, _ACROSS_TOKENS):
            return Message("its {name} mixes neighbouring tokens", name=type(part).__name__)
    return ""


def reads_last_token(model: nn.Module) -> bool:
    """Whether its head reads the last token that is no padding."""
    inner: Any = unwrap(model)
    if getattr(getattr(inner, "config", None), "model_type", "") in _READ_LAST:
        return True
    return any(parent.__name__ == _LAST_TOKEN_HEAD for parent in type(inner).__mro__)


def shows_tokens(model: nn.Module) -> str:
    """Which of its outputs has one entry a token; empty where there is none."""
    config: Any = getattr(unwrap(model), "config", None)
    asked = [
        name for name in ("output_hidden_states", "output_attentions") if getattr(config, name, 0)
    ]
    return asked[0] if asked else ""
