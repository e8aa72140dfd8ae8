"""Fused layers: the small operators of a BERT layer run in a quarter of the passes over memory.

A third of a step on a fast card is not matrix products but bias gradients, GELU, dropout, norms
and additions, each a pass over all activations. Here dense, dropout, addition and norm are one
operator, as is the MLP half, and query, key and value are one product. Masks are drawn again
instead of kept, and so is what GELU gave: 24 bytes a token and unit of width, not 34.

The numbers are the stock layer's up to rounding. Dropout drops with the same probability, but
from another stream: the same seed gives other masks than the stock layer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import ConfigError
from memfit.i18n import N_, Message
from memfit.models.layer_stack import Args, Around, Kwargs, Undo, stack_of, unwrap, wrap
from memfit.strategies.base import Fidelity, PlanFigures, Setup, Strategy
from memfit.strategies.fused.fused_kernels import DTYPES, Drop, Gelu, Seeds
from memfit.strategies.fused.layer_functions import (
    dense_dropout_add_norm,
    mlp_half,
    move_joined,
    project,
    separate_parameters,
)

_FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie")

_GELU: dict[str, Gelu] = {
    "gelu": "erf",
    "gelu_python": "erf",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_accurate": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
}

_PROJECTIONS = ("query", "key", "value")


@dataclass(frozen=True, slots=True)
class FusedLayers(Strategy):
    """Every layer's attention output, MLP half and projections, where they are the stock ones."""

    name = "fused_layers"
    title = N_("fused layers")
    reason = "norms, dropout, GELU and bias gradients share their passes over memory"
    shrinks = ("activations", "time")
    conflicts = frozenset({"half_precision"})

    mlp_pieces: int = 1
    """How many parts of the rows the MLP half runs on in turn: more keep less, and are slower."""

    def __post_init__(self) -> None:
        if self.mlp_pieces < 1:
            raise ConfigError(
                "the MLP half runs in at least 1 piece, not {mlp_pieces}",
                mlp_pieces=self.mlp_pieces,
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def explain(self, plan: PlanFigures) -> str:  # noqa: ARG002
        return Message(
            "the small operators of every layer are fused: fewer passes over memory, less kept"
        )

    def unavailable(self, setup: Setup) -> str:
        if setup.device_type != "cuda":
            return Message(
                "its kernels are for CUDA; on a {device} they would save nothing",
                device=setup.device_type,
            )
        if reason := setup.lacks_triton:
            return reason
        if setup.args.bf16 or setup.args.fp16:
            return Message("under autocast weights and activations are of different types")
        if setup.args.torch_compile:
            return Message("torch_compile is on and fuses in its own way")
        return fusing_problem(setup.model)

    def change(self, setup: Setup) -> None:
        # A loss of one's own may run several forward passes before a backward.
        joined = projecting_layers(setup.model)
        seeds = Seeds(per_call=not setup.stock_loss)
        setup.undo += fuse(setup.model, seeds, self.mlp_pieces)
        setup.before_move.append(lambda device: move_projections(joined, device))


def fusing_problem(model: nn.Module) -> str:
    """Why a model's layers cannot be fused, on any device; empty where some can."""
    inner: Any = unwrap(model)
    name = type(inner).__name__
    config: Any = getattr(inner, "config", None)
    if getattr(config, "model_type", None) not in _FAMILIES:
        return Message("{name} is not built of BERT's layers", name=name)
    if config.is_decoder or config.add_cross_attention:
        return Message("{name} is a decoder", name=name)
    if config.hidden_act not in _GELU:
        return Message("its activation is {name}, and only GELU is fused", name=config.hidden_act)
    if config.chunk_size_feed_forward:
        return Message("chunk_size_feed_forward calls the MLP half in pieces")
    if not any(map(_parts, stack_of(model).layers)):
        return Message(
            "no layer of {name} is a stock layer: adapters, hooks or own classes are in it",
            name=name,
        )
    return ""


def fuse(model: nn.Module, seeds: Seeds, mlp_pieces: int = 1) -> list[Undo]:
    """Fuse what can be fused; returns what gives the model back, to be called last first."""
    if problem := fusing_problem(model):
        raise ConfigError(problem)
    stack = stack_of(model)
    kind = _GELU[unwrap(model).config.hidden_act]  # type: ignore[union-attr, index]
    hook = stack.base.register_forward_pre_hook(_Advance(seeds))
    undo: list[Undo] = [hook.remove]
    for index, layer in enumerate(stack.layers):
        for part in _parts(layer):
            if part == "attention_output":
                handoff = _Handoff()
                around = _attention_output(seeds, 2 * index, handoff)
                undo.append(wrap(layer.attention.output, around, "forward"))  # type: ignore[union-attr, arg-type]
                if _plain_projections(layer):
                    undo += _fuse_projections(layer, handoff)
            else:
                half = _mlp(seeds, 2 * index + 1, kind, mlp_pieces)
                undo.append(wrap(layer, half, "feed_forward_chunk"))
    return undo


class _Advance:
    """A forward pass of the base model begins: a new seed for all its dropouts."""

    def __init__(self, seeds: Seeds) -> None:
        self._seeds = seeds

    def __call__(self, module: nn.Module, args: Args) -> None:
        del args
        if module.training or torch.is_grad_enabled():
            self._seeds.advance(next(module.parameters()).device)


# ------------------------------------------------------------------------ the halves


def _attention_output(seeds: Seeds, site: int, handoff: _Handoff) -> Around:
    def around(call: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        own: Any = module
        hidden, residual = _two(args, kwargs)
        dense, norm, p = own.dense, own.LayerNorm, _share(own.dropout)
        if p >= 1 or not _ready(hidden, residual, *dense.parameters(), *norm.parameters()):
            return call(*args, **kwargs)
        residual = handoff.passed_for(residual)
        drop = Drop(p, seeds.take(hidden.device), site) if p else None
        return dense_dropout_add_norm(
            hidden, dense.weight, dense.bias, residual, norm.weight, norm.bias, norm.eps, drop
        )

    return around


def _mlp(seeds: Seeds, site: int, kind: Gelu, pieces: int) -> Around:
    def around(call: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        own: Any = module
        (x,) = (*args, *kwargs.values())
        up, down, norm = own.intermediate.dense, own.output.dense, own.output.LayerNorm
        p = _share(own.output.dropout)
        parameters = (*up.parameters(), *down.parameters(), *norm.parameters())
        if p >= 1 or not _ready(x, *parameters):
            return call(*args, **kwargs)
        drop = Drop(p, seeds.take(x.device), site) if p else None
        weights = (up.weight, up.bias, down.weight, down.bias, norm.weight, norm.bias)
        return mlp_half(x, *weights, norm.eps, kind, drop, pieces)

    return around


# ---------------------------------------------------------------- query, key and value


@dataclass(slots=True)
class _Handoff:
    """What one call of an attention computed at its start, until its parts ask for it."""

    hidden: Tensor | None = None
    pieces: dict[str, Tensor] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Handoff:
        return self  # empty between calls

    def give(self, hidden: Tensor, found: tuple[Tensor, ...]) -> None:
        self.hidden = hidden
        self.pieces = dict(zip((*_PROJECTIONS, "passed"), found, strict=True))

    def take(self, name: str, hidden: Tensor) -> Tensor | None:
        return self.pieces.pop(name, None) if hidden is self.hidden else None

    def passed_for(self, residual: Tensor) -> Tensor:
        """The attention's input as its projections passed it on, where the residual is that."""
        passed = self.take("passed", residual)
        return residual if passed is None else passed

    def clear(self) -> None:
        self.hidden, self.pieces = None, {}


def _fuse_projections(layer: Any, handoff: _Handoff) -> Iterator[Undo]:
    own = layer.attention.self
    yield lambda: _separate(own)
    for name in _PROJECTIONS:
        yield wrap(getattr(own, name), _handed_out(name, handoff), "forward")
    yield wrap(layer.attention, _projecting(handoff), "forward")


def _projecting(handoff: _Handoff) -> Around:
    def around(call: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        own: Any = module
        hidden = args[0] if args else kwargs["hidden_states"]
        linears = [getattr(own.self, name) for name in _PROJECTIONS]
        weights, biases = [one.weight for one in linears], [one.bias for one in linears]
        if _ready(hidden, *weights, *biases) and (found := project(hidden, weights, biases)):
            handoff.give(hidden, found)
        try:
            return call(*args, **kwargs)
        finally:
            handoff.clear()

    return around


def _handed_out(name: str, handoff: _Handoff) -> Around:
    def around(call: Callable[..., Any], _: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        (hidden,) = (*args, *kwargs.values())
        found = handoff.take(name, hidden)
        return call(*args, **kwargs) if found is None else found

    return around


def projecting_layers(model: nn.Module) -> list[nn.Module]:
    """The layers, not fused yet, whose query, key and value can be one product."""
    return [
        layer
        for layer in stack_of(model).layers
        if "attention_output" in _parts(layer) and _plain_projections(layer)
    ]


def move_projections(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Put query, key and value of these layers on the device as neighbours."""
    for layer in layers:
        for parts in _projection_parameters(layer.attention.self):  # type: ignore[union-attr]
            move_joined(parts, device)


def _separate(own: Any) -> None:
    for parts in _projection_parameters(own):
        separate_parameters(parts)


def _projection_parameters(own: Any) -> tuple[list[Tensor], list[Tensor]]:
    linears = [getattr(own, name) for name in _PROJECTIONS]
    return [one.weight for one in linears], [one.bias for one in linears]


# -------------------------------------------------------------------- what is stock


def _parts(layer: nn.Module) -> list[str]:
    """The halves of a layer that are the stock ones."""
    own: Any = layer
    output, up, down = own.attention.output, own.intermediate, own.output
    found = []
    if _is_stock(own.attention, output) and _is_dense_norm(output):
        found.append("attention_output")
    if _is_stock(layer, up, down) and _is_plain(up.dense) and _is_dense_norm(down):
        found.append("mlp")
    return found


def _plain_projections(layer: Any) -> bool:
    """Whether query, key and value are plain, of one shape, and all learn (or none does)."""
    own = layer.attention.self
    linears = [getattr(own, name) for name in _PROJECTIONS]
    if not _is_stock(own) or not all(map(_is_plain, linears)):
        return False
    learns = {p.requires_grad for one in linears for p in one.parameters()}
    shapes = {one.weight.shape for one in linears}
    return learns == {True} and shapes == {(linears[0].in_features,) * 2}


def _is_dense_norm(output: Any) -> bool:
    norm = output.LayerNorm
    return (
        _is_plain(output.dense)
        and type(norm) is nn.LayerNorm
        and norm.bias is not None
        and len(norm.normalized_shape) == 1
        and type(output.dropout) is nn.Dropout
        and not _is_hooked(norm, output.dropout)
    )


def _is_plain(linear: nn.Module) -> bool:
    return type(linear) is nn.Linear and linear.bias is not None and not _is_hooked(linear)


def _is_stock(*modules: nn.Module) -> bool:
    """Whether their forward is transformers' own, not a subclass's that does something else."""
    return all(
        getattr(type(module).forward, "__module__", "").startswith("transformers.models.")
        for module in modules
    )


def _is_hooked(*modules: Any) -> bool:
    """Somebody wants to see a module's own input or output, which fused ones do not have."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for module in modules for name in names)


def _two(args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
    first, second = (
        *args,
        *(kwargs[name] for name in ("hidden_states", "input_tensor")[len(args) :]),
    )
    return first, second


def _share(dropout: Any) -> float:
    """How much is dropped now."""
    return float(dropout.p) if dropout.training else 0.0


def _ready(*tensors: Tensor) -> bool:
    """One device, one supported type, and no autocast that would change it."""
    first = tensors[0]
    if first.dtype not in DTYPES or torch.is_autocast_enabled(first.device.type):
        return False
    return all(one.dtype == first.dtype and one.device == first.device for one in tensors)
