"""A stock model made to read packed batches, and put back as it was."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from memfit.errors import ModelError
from memfit.messages import Message
from memfit.packing.attention import IMPLEMENTATION, STOCK_ATTRIBUTE
from memfit.packing.batch import PackedBatch, PackSpec, pack, padded_on_the_right
from memfit.packing.families import FAMILIES, Family, attention_modules, base_of, pack_spec, unwrap
from memfit.packing.heads import shows_tokens


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
                Message(
                    "{name} cannot be packed; ask can_pack() for the reason",
                    name=type(inner).__name__,
                )
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

    def _add_hooks(self, inner: PreTrainedModel, family: Family) -> None:
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


def packed(model: nn.Module) -> PackedModel:
    """Make a model read packed batches; undo with `remove()` or as a context manager."""
    return PackedModel(model)


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
    """Else a sliding-window mask of T x T would be built, for nobody."""
    if kwargs.get("cu_seq_lens_q") is None:
        return None
    types = set(module.config.layer_types)  # type: ignore[union-attr, arg-type]
    return args, {**kwargs, "attention_mask": dict.fromkeys(types)}
