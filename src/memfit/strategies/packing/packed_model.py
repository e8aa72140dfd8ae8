"""A stock classifier that takes packed batches: which families can, and how each is changed.

A family is packed when the keyword arguments of its forward reach the attention function and
its head reads one vector a text. `stack` is where that vector is handed over: the module whose
`last_hidden_state` becomes [rows, 1, width].
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from memfit.engine.packed_batch import PackedBatch, PackSpec, pack, padded_on_the_right
from memfit.errors import ModelError
from memfit.i18n import N_, Message
from memfit.models.layer_stack import sees_padding, shows_tokens, unwrap
from memfit.models.layers import base_of
from memfit.strategies.packing.packed_attention import (
    IMPLEMENTATION,
    STOCK_ATTRIBUTE,
    count_packed_calls,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFamily:
    """How one family is packed; paths are below the base model."""

    attention: str
    """Class of the modules that look the attention function up in their config."""
    stack: str = "encoder"
    """The module whose output the head or the pooler reads; '' is the base model itself."""
    layers: str = "encoder.layer"
    """The list of layers; '' where weights are shared between layers."""
    first_token_only: str = ""
    """In the last layer: the module from which on only the tokens the head reads are needed.
    Its inputs are cut to these, which saves most of one layer and changes no number."""
    token_types: bool = True
    positions_skip_padding: bool = False
    masks_by_layer_type: bool = False
    """The base model takes its masks as a mapping; packed, all of them are None."""


def _bert_like(prefix: str, *, roberta: bool = False) -> PackedFamily:
    return PackedFamily(
        attention=f"{prefix}SelfAttention",
        first_token_only="attention.output",
        positions_skip_padding=roberta,
    )


FAMILIES: Mapping[str, PackedFamily] = MappingProxyType(
    {
        "bert": _bert_like("Bert"),
        "ernie": _bert_like("Ernie"),
        "electra": _bert_like("Electra"),
        "roberta": _bert_like("Roberta", roberta=True),
        "xlm-roberta": _bert_like("XLMRoberta", roberta=True),
        "camembert": _bert_like("Camembert", roberta=True),
        "albert": PackedFamily(attention="AlbertAttention", layers=""),
        "distilbert": PackedFamily(
            attention="DistilBertSelfAttention",
            stack="transformer",
            layers="transformer.layer",
            first_token_only="sa_layer_norm",
            token_types=False,
        ),
        "modernbert": PackedFamily(
            attention="ModernBertAttention",
            stack="",
            layers="layers",
            token_types=False,
            masks_by_layer_type=True,
        ),
    }
)

# Why a family people will try is not in the table.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "mpnet": N_("MPNet adds relative position biases and silently ignores text boundaries"),
        "deberta": N_(
            "DeBERTa's attention mixes in relative positions and ignores text boundaries"
        ),
        "deberta-v2": N_(
            "DeBERTa's attention mixes in relative positions and ignores text boundaries"
        ),
    }
)


def attention_modules(model: PreTrainedModel, family: PackedFamily) -> list[nn.Module]:
    """The modules that call the attention function, subclasses included."""
    return [
        module
        for module in base_of(model).modules()
        if any(parent.__name__ == family.attention for parent in type(module).__mro__)
    ]


def pack_spec(model: nn.Module) -> PackSpec:
    """What `pack` must know of this model."""
    config: Any = unwrap(model).config
    family = FAMILIES[config.model_type]
    return PackSpec(
        padding_idx=config.pad_token_id if family.positions_skip_padding else None,
        token_types=family.token_types,
    )


class PackedModel:
    """Holds what was changed in a model; `remove()`, or the end of a with block, undoes it.

    The model then takes both: packed batches (`model(**batch.inputs())`) give one row of
    logits a text, padded batches go the way they always went.
    """

    spec: PackSpec

    def __init__(self, model: nn.Module) -> None:
        inner = unwrap(model)
        family = FAMILIES.get(getattr(getattr(inner, "config", None), "model_type", ""))
        if family is None or not isinstance(inner, PreTrainedModel):
            raise ModelError(
                "{name} cannot be packed; ask packing_problem() for the reason",
                name=type(inner).__name__,
            )
        self.model = model
        self.spec = pack_spec(model)
        self._attention = attention_modules(inner, family)
        if any(hasattr(module, STOCK_ATTRIBUTE) for module in self._attention):
            raise ValueError("this model is packed already; remove() the first one")
        self._configs = [module.config for module in self._attention]
        self._handles: list[RemovableHandle] = []
        self._redirect_attention()
        self._add_hooks(inner, family)

    def pack(self, batch: Any, **shapes: int | None) -> PackedBatch:
        """`pack` with this model's positions and token types."""
        return pack(batch, self.spec, **shapes)

    def inputs_of(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keyword arguments for the model: packed, or the batch itself where padding has a part."""
        return self.pack(batch).inputs() if padded_on_the_right(batch) else batch

    def pack_inside(self) -> None:
        """Pack padded batches as they enter the model: who calls it sees them padded.

        Batches whose outputs show padding (hidden states, attention weights) stay padded, and so
        do those that are padded elsewhere than behind their texts.
        """
        inner = unwrap(self.model)
        self._handles.append(inner.register_forward_pre_hook(self._packed, with_kwargs=True))

    def _packed(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        shown = ("output_hidden_states", "output_attentions", "inputs_embeds")
        if args or shows_tokens(module) or any(kwargs.get(name) is not None for name in shown):
            return None
        if kwargs.get("cu_seq_lens_q") is not None or not isinstance(ids, Tensor):
            return None
        if ids.dim() != 2 or not isinstance(mask, Tensor) or mask.shape != ids.shape:
            return None
        return (), dict(self.inputs_of(kwargs))

    def remove(self) -> None:
        """Give the model back as it was; a second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, config in zip(self._attention, self._configs, strict=True):
            module.config = config
            delattr(module, STOCK_ATTRIBUTE)
        self._attention, self._configs = [], []

    def __enter__(self) -> PackedModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def _redirect_attention(self) -> None:
        """Only the attention modules get another config: a copy, with our attention's name.

        `from_config` lets models share a config object, and the masks of padded batches are
        made by the base model's, so neither must see the change.
        """
        copies: dict[int, Any] = {}
        for module, config in zip(self._attention, self._configs, strict=True):
            if id(config) not in copies:
                copies[id(config)] = copy.deepcopy(config)
                copies[id(config)]._attn_implementation = IMPLEMENTATION
            module.config = copies[id(config)]
            setattr(module, STOCK_ATTRIBUTE, config._attn_implementation)  # type: ignore[union-attr]

    def _add_hooks(self, inner: PreTrainedModel, family: PackedFamily) -> None:
        base = base_of(inner)
        add = self._handles.append
        if family.masks_by_layer_type:
            add(base.register_forward_pre_hook(_no_masks, with_kwargs=True))
        mean = getattr(inner.config, "classifier_pooling", "cls") == "mean"
        cut = bool(family.first_token_only) and not mean
        if cut:
            layer = base.get_submodule(family.layers)[-1]  # type: ignore[index]
            cutter = _FirstTokensOnly()
            add(layer.register_forward_pre_hook(cutter.note, with_kwargs=True))
            target = layer.get_submodule(family.first_token_only)
            add(target.register_forward_pre_hook(cutter.cut))
        hand_over = _HandOver(mean=mean, cut=cut)
        stack = base.get_submodule(family.stack)
        add(stack.register_forward_hook(hand_over, with_kwargs=True))


class _FirstTokensOnly:
    """Cuts the last layer, after its attention, to the tokens the head reads."""

    def __init__(self) -> None:
        self._first: Tensor | None = None

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Noted on every call of the layer, so that a recomputation in backward finds its own.
        del module
        self._first = None
        if kwargs.get("cu_seq_lens_q") is not None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._first = first_tokens(kwargs, hidden.shape[1])

    def cut(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        del module
        if self._first is None:
            return None
        return tuple(hidden.index_select(1, self._first) for hidden in args)


class _HandOver:
    """Replaces the stack's `last_hidden_state` by one vector a text, [rows, 1, width]."""

    def __init__(self, *, mean: bool, cut: bool) -> None:
        self._mean = mean
        self._cut = cut

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        del module, args
        if kwargs.get("cu_seq_lens_q") is None:
            return output
        hidden: Tensor = output[0]
        if self._mean:
            vectors = segment_means(hidden.squeeze(0), kwargs["cu_seq_lens_q"], _rows(kwargs))
        elif self._cut and hidden.shape[1] == _rows(kwargs):
            vectors = hidden.squeeze(0)
        else:
            vectors = hidden.squeeze(0).index_select(0, first_tokens(kwargs, hidden.shape[1]))
        if isinstance(output, tuple):
            return (vectors.unsqueeze(1), *output[1:])
        output.last_hidden_state = vectors.unsqueeze(1)
        return output


def first_tokens(kwargs: dict[str, Any], total_tokens: int) -> Tensor:
    """Index of each row's first token; an empty dummy row points at some token that exists."""
    starts: Tensor = kwargs["cu_seq_lens_q"][: _rows(kwargs)]
    return starts.clamp(max=total_tokens - 1)


def segment_means(hidden: Tensor, cu_seqlens: Tensor, rows: int) -> Tensor:
    """The mean over each row's tokens, as a product: no atomics, no wait for the device."""
    token = torch.arange(hidden.shape[0], device=hidden.device)
    starts, ends = cu_seqlens[:rows, None], cu_seqlens[1 : rows + 1, None]
    member = (token >= starts) & (token < ends)
    # The stock head sums outside autocast's reach, in the precision the last norm gives.
    with torch.autocast(hidden.device.type, enabled=False):
        sums = member.to(hidden.dtype) @ hidden
        return sums / (ends - starts).clamp(min=1)


def _rows(kwargs: dict[str, Any]) -> int:
    rows = kwargs.get("packed_rows")
    return kwargs["cu_seq_lens_q"].shape[0] - 1 if rows is None else int(rows)


def _no_masks(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Keeps the model from building an unused sliding-window mask of T x T."""
    if kwargs.get("cu_seq_lens_q") is None:
        return None
    types = set(module.config.layer_types)  # type: ignore[union-attr, arg-type]
    return args, {**kwargs, "attention_mask": dict.fromkeys(types)}


_PROBE_LENGTHS = (5, 9, 3)

# Packed against padded, of the largest logit: what the precision leaves after a whole model.
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}

_HALF_TOLERANCE = 5e-2


def packing_problem(model: nn.Module) -> str:
    """Why a model cannot be packed, by its family, then by trying; empty where it can.

    Packed and padded logits are compared on the model itself. A model without real weights (meta or
    fake tensors) is judged by its family alone.
    """
    inner = unwrap(model)
    if refusal := _refusal(model, inner):
        return refusal
    assert isinstance(inner, PreTrainedModel)
    if not has_values(inner):
        return ""
    try:
        refusal = _probe(model, inner)
    except Exception as error:
        # A model the table knows but whose class was changed can fail in any way.
        refusal = Message(
            "a packed trial batch failed: {kind}: {error}",
            kind=type(error).__name__,
            error=str(error),
        )
    if not refusal:
        return ""
    return Message("{name}: {refusal}", name=type(inner).__name__, refusal=refusal)


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
        if any(getattr(module, "is_causal", False) is True for module in inner.modules()):
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


def _probe(model: nn.Module, inner: PreTrainedModel) -> str:
    """Two ways through the model with three short texts; empty when they agree."""
    device, dtype = inner.device, inner.dtype
    padded = probe_batch(inner)
    with evaluating(model), torch.no_grad():
        expected = model(**{name: column.to(device) for name, column in padded.items()}).logits
        with PackedModel(model) as packer, count_packed_calls() as calls:
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


def probe_batch(model: PreTrainedModel) -> dict[str, Tensor]:
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
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, with each module's own mode put back (some may be frozen in eval)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def has_values(model: nn.Module) -> bool:
    """Whether the model can be run: its weights are neither on meta nor fake."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not any(p.is_meta or isinstance(p, FakeTensor) for p in model.parameters())
