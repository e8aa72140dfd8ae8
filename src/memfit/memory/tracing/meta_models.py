"""Models without weights: built from a configuration alone, on the meta device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.errors import ModelError
from memfit.i18n import t
from memfit.memory.stock_step import StepSpec
from memfit.memory.tracing.attention_kernels import FLASH_NAME, check_flash, is_flash
from memfit.models.layers import add_lora, freeze


def model_config(spec: StepSpec) -> Any:
    """A transformers configuration of our own, with the head the step asks for."""
    from transformers import AutoConfig

    config: Any
    if isinstance(spec.config, Mapping):
        values = dict(spec.config)
        kind = values.pop("model_type", None)
        if kind is None:
            raise ModelError("the model's config.json has no model_type")
        try:
            config = AutoConfig.for_model(kind, **values)
        except ValueError as error:
            raise ModelError(
                "transformers knows no model_type {kind}: {error}", kind=repr(kind), error=error
            ) from None
    else:
        config = copy.deepcopy(spec.config)
    config.num_labels = spec.num_labels
    # Left open, the loss looks at the labels' type, and DeBERTa at their values.
    config.problem_type = spec.problem_type
    config.use_cache = False
    text = config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:
        # Decoders find the end of a text by its padding.
        text.pad_token_id = config.pad_token_id = 0
    return config


# The last ones are what numbers and names that cannot be in a config.json end in.
_CANNOT_BUILD = (ValueError, ImportError, RuntimeError, KeyError, TypeError, ZeroDivisionError)


def build_on_meta(spec: StepSpec, config: Any) -> Any:
    """The classifier with shapes only, adapted and frozen as the step asks."""
    from transformers import AutoModelForSequenceClassification
    from transformers.initialization import no_init_weights

    options: dict[str, Any] = {"dtype": getattr(torch, spec.dtype)}
    if spec.attn_implementation is not None:
        flash = is_flash(spec.attn_implementation)
        options["attn_implementation"] = FLASH_NAME if flash else spec.attn_implementation
    try:
        # Filling weights costs time and, on fake tensors, asks for values (ModernBERT).
        # A model's code is imported here, and what it still uses of old torch is its affair.
        with warnings.catch_warnings(), torch.device("meta"), no_init_weights():
            warnings.simplefilter("ignore", DeprecationWarning)
            auto: Any = AutoModelForSequenceClassification
            model = auto.from_config(config, **options)
        model.tie_weights()  # left out where no weight is filled: BART's, T5's embeddings
    except _CANNOT_BUILD as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        none = "Unrecognized configuration class" in lines[0]
        said = {"kind": config.model_type, "reason": t("it has none") if none else lines[0]}
        raise ModelError("cannot build a classifier of {kind}: {reason}", **said) from None
    if is_flash(spec.attn_implementation):
        check_flash(model, spec.dtype, autocast=spec.autocast)
    return adapted(model, spec)


def adapted(model: Any, spec: StepSpec) -> Any:
    """The model with adapters, frozen parts and recomputation as the step asks."""
    if spec.lora is not None:
        model = add_lora(model, spec.lora, dropout=spec.lora_dropout, on_meta=True)
    elif spec.freeze is not None:
        freeze(model, spec.freeze)
    if spec.gradient_checkpointing:
        enable_checkpointing(model)
    return model.train()


def enable_checkpointing(model: Any) -> None:
    """As the stock Trainer does it, which some architectures refuse."""
    try:
        model.gradient_checkpointing_enable()
    except ValueError as error:
        raise ModelError("{error} Leave gradient checkpointing out.", error=error) from None


def materialize(model: torch.nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Give every parameter and buffer its place on the device, in the order `to` does it."""
    made: dict[int, Any] = {}
    kept: list[Any] = []  # an id is only a name while its owner lives
    for module in children_first(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                kept.append(parameter)
                if id(parameter) not in made:
                    fresh = torch.nn.Parameter(make(parameter), parameter.requires_grad)
                    made[id(parameter)] = fresh
                module._parameters[name] = made[id(parameter)]
        # Rotary embeddings keep a second, plain reference to a buffer.
        plain = {k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}
        for place, tensors in ((module._buffers, module._buffers), (vars(module), plain)):
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    kept.append(tensor)
                    if id(tensor) not in made:
                        made[id(tensor)] = make(tensor)
                    place[name] = made[id(tensor)]


def children_first(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Every module once, after those inside it."""
    seen: dict[int, torch.nn.Module] = {}

    def visit(module: torch.nn.Module) -> None:
        for child in module.children():
            visit(child)
        seen.setdefault(id(module), module)

    visit(model)
    return list(seen.values())


def has_bias(module: torch.nn.Module) -> bool:
    """Whether it is a linear layer with one: these run through another library."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return weight is not None and weight.dim() == 2 and bias is not None


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """A place for the tensor, on fake tensors: no memory is taken."""
    if not tensor.is_floating_point():  # indices, which a trace may follow
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def small_random(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor with values a training step survives."""
    if tensor.is_floating_point():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").normal_(std=0.02)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
