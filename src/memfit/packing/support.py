"""Whether a model can be packed: by the table of families, and by trying it on two texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memfit.messages import Message
from memfit.packing.attention import count_packed_calls
from memfit.packing.families import FAMILIES, REFUSED, attention_modules, unwrap
from memfit.packing.heads import sees_padding
from memfit.packing.model import packed

_PROBE_LENGTHS = (5, 9, 3)
# Packed against padded, of the largest logit: what the precision leaves after a whole model.
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_HALF_TOLERANCE = 5e-2


@dataclass(frozen=True, slots=True)
class PackingSupport:
    """Whether a model can be packed, and why (not), in plain words."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def can_pack(model: nn.Module) -> PackingSupport:
    """Decides by family, then compares packed with padded logits on the model itself.

    A model without real weights (meta or fake tensors) is judged by its family alone.
    """
    inner = unwrap(model)
    if refusal := _refusal(model, inner):
        return PackingSupport(False, refusal)
    assert isinstance(inner, PreTrainedModel)
    name = type(inner).__name__
    if not _has_values(inner):
        return PackingSupport(
            True, Message("{name}: a known family; not tried, as it has no weights yet", name=name)
        )
    try:
        refusal = _probe(model, inner)
    except Exception as error:
        # A model the table knows but whose class was changed can fail in any way.
        refusal = Message(
            "a packed trial batch failed: {kind}: {error}",
            kind=type(error).__name__,
            error=str(error),
        )
    if refusal:
        return PackingSupport(False, Message("{name}: {refusal}", name=name, refusal=refusal))
    return PackingSupport(True, Message("{name}: packed and padded logits agree", name=name))


def _refusal(model: nn.Module, inner: nn.Module) -> str:
    """Why the rules say no; empty when they say yes."""
    if not isinstance(inner, PreTrainedModel):
        return Message("{name} is no transformers model", name=type(inner).__name__)
    config: Any = inner.config
    kind = config.model_type
    parents = [parent.__name__ for parent in type(inner).__mro__]
    if not any(name.endswith("ForSequenceClassification") for name in parents):
        return Message(
            "{name} has no sequence classification head that reads one vector a text",
            name=parents[0],
        )
    if kind in REFUSED:
        return Message(REFUSED[kind])
    if kind not in FAMILIES:
        if _is_causal(inner):
            return Message("{kind} is a decoder; only encoders are packed so far", kind=kind)
        return Message("there is no packing rule for the model type {kind}", kind=repr(kind))
    if getattr(config, "is_decoder", False):
        return Message("its config says is_decoder; only encoders are packed so far")
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            return Message("prompt and prefix tuning put tokens of their own before each text")
    if seen := sees_padding(model):
        return seen
    expected = FAMILIES[kind].attention
    found = attention_modules(inner, FAMILIES[kind])
    if not found:
        return Message("no {expected} module was found in it", expected=expected)
    if not all(hasattr(module, "config") for module in found):
        return Message(
            "{expected} does not look its attention function up by name", expected=expected
        )
    return ""


def _is_causal(model: PreTrainedModel) -> bool:
    return any(getattr(module, "is_causal", False) is True for module in model.modules())


def _probe(model: nn.Module, inner: PreTrainedModel) -> str:
    """Two ways through the model with three short texts; empty when they agree."""
    device, dtype = inner.device, inner.dtype
    padded = _probe_batch(inner)
    with _evaluating(model), torch.no_grad():
        expected = model(**{name: column.to(device) for name, column in padded.items()}).logits
        with packed(model) as packer, count_packed_calls() as calls:
            batch = packer.pack(padded).to(device)
            logits: Tensor = model(**batch.inputs()).logits
    config: Any = inner.config
    layers = config.num_hidden_layers * getattr(config, "inner_group_num", 1)
    if calls[0] != layers:
        return Message(
            "text boundaries reached the attention in {count} of {layers} layers, so "
            "texts would read each other",
            count=calls[0],
            layers=layers,
        )
    if logits.shape != expected.shape:
        return Message(
            "packed logits have shape {shape} and not {expected}",
            shape=list(logits.shape),
            expected=list(expected.shape),
        )
    difference = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not difference <= _PROBE_TOLERANCE.get(dtype, _HALF_TOLERANCE):
        return Message(
            "packed and padded logits differ by {difference:.1e} of the largest",
            difference=difference,
        )
    return ""


def _probe_batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Three texts of different lengths and tokens, padded on the right."""
    config: Any = model.config
    pad = config.pad_token_id or 0
    width = max(_PROBE_LENGTHS)
    mask = torch.arange(width) < torch.tensor(_PROBE_LENGTHS)[:, None]
    # Spread over the vocabulary and never the padding token.
    ids = torch.arange(len(_PROBE_LENGTHS) * width).view(mask.shape) * 97 % config.vocab_size
    ids = torch.where(ids == pad, (ids + 1) % config.vocab_size, ids)
    return {"input_ids": torch.where(mask, ids, pad), "attention_mask": mask.long()}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, with each module's own mode put back (some may be frozen in eval)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _has_values(model: nn.Module) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return not any(p.is_meta or isinstance(p, FakeTensor) for p in model.parameters())
