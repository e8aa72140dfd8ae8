"""The stack of layers of a model, how each call is wrapped, and what the head reads of it.

A call is wrapped by giving that one module a subclass of its own class: `isinstance`, names,
hooks and weights stay as they are, a copy of the model stays a copy, and undoing it is one
assignment. Hooks on the layer run inside the wrapper, as in transformers' own checkpointing:
what a hook notes for its layer must be noted again when the layer is recomputed.

A batch of transformers' own sequence classifiers gives the same logits however wide it is padded,
as long as their attention masks padding and the head reads one token, or a mean over the mask. A
head of the user's own may average over padding, run an LSTM through it or flatten it; question
answering competes with it; token labels lie beside it. For these the width is part of the input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memfit.errors import ModelError
from memfit.i18n import Message
from memfit.models.layers import base_of, layers_of

Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Around = Callable[[Callable[..., Any], nn.Module, Args, Kwargs], Any]
Undo = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Stack:
    """The repeated layers of a model."""

    base: nn.Module
    layers: tuple[nn.Module, ...]
    depth: int
    """How many layers one text passes; more than there are modules where weights are shared."""


def stack_of(model: nn.Module) -> Stack:
    """The layers of a model, inside peft's and torch's wrappers too."""
    inner = unwrap(model)
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(
            "{name} is no transformers model: its layers are unknown", name=type(inner).__name__
        )
    layers = tuple(layers_of(inner))
    if not layers:
        raise ModelError("{name} has no list of layers", name=type(inner).__name__)
    config: Any = inner.config.get_text_config()
    depth = getattr(config, "num_hidden_layers", 0) * getattr(config, "inner_group_num", 1)
    return Stack(base_of(inner), layers, max(len(layers), depth))


def stack_problem(model: nn.Module, layers: int | None) -> str:
    """Why a strategy cannot use this many layers of the model; empty if it can."""
    try:
        stack = stack_of(model)
    except ModelError as error:
        return str(error)
    if layers is not None and layers > stack.depth:
        return Message(
            "the model has {depth} layers, not {layers}", depth=stack.depth, layers=layers
        )
    return ""


def wrap(module: nn.Module, around: Around, method: str = "__call__") -> Undo:
    """Every call of the method becomes `around(call, module, args, kwargs)`; returns the undo."""
    kind = type(module)
    original = getattr(kind, method)

    # The signature is kept: transformers counts the parameters of what it calls in chunks.
    @functools.wraps(original)
    def replaced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(original, self), self, args, kwargs)

    body = {method: replaced, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), body)

    def undo() -> None:
        module.__class__ = kind

    return undo


def keeps_activations(module: nn.Module, args: Args, kwargs: Kwargs) -> bool:
    """Whether autograd would keep anything of this call for a backward pass."""
    if not (module.training and torch.is_grad_enabled()):
        return False
    values = (*args, *kwargs.values())
    if any(isinstance(value, Tensor) and value.requires_grad for value in values):
        return True
    return any(parameter.requires_grad for parameter in module.parameters())


class Turns:
    """Counts the calls in one forward pass, and says which are among the first `limit`.

    The limit may be changed between two steps.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken = 0

    def restart(self, *_: Any) -> None:
        """A forward pass begins; a forward pre-hook of the base model calls this."""
        self._taken = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Turns:
        # A copied model's layers ask the same object as its copied hook restarts.
        return self

    def take(self) -> bool:
        """Whether the call that is made now is among the first."""
        self._taken += 1
        return self._taken <= self.limit


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


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside torch.compile, DDP and peft's wrappers."""
    inner: Any = model
    if hasattr(inner, "_orig_mod"):
        return unwrap(inner._orig_mod)
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        return unwrap(inner.module)
    if hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
        return unwrap(inner.get_base_model())
    return model
