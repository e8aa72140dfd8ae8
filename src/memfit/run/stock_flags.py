"""From the flags of a stock Trainer run to the step that is priced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memfit._compat import modernize
from memfit.config import ModelConfig
from memfit.config.training_fields import DEFAULTS, SHORT_NAMES, training_fields
from memfit.data import LabelSpace
from memfit.errors import ConfigError, nearest
from memfit.i18n import t

if TYPE_CHECKING:
    from memfit.memory.cards import CardPlace, DeviceProfile
    from memfit.memory.stock_step import StepSpec

DEFAULT_GPU = "H200 141GB"
"""Assumed where there is no GPU and none is named: the card whose context was measured."""

# These change what the step allocates in ways the trace does not follow.
_NOT_PRICED = (
    "auto_find_batch_size", "bf16_full_eval", "deepspeed", "fp16_full_eval", "fsdp",
    "neftune_noise_alpha", "optim_target_modules", "parallelism_config", "torch_compile",
    "use_liger_kernel",
)  # fmt: skip


def step_spec(model: ModelConfig, options: Mapping[str, Any]) -> StepSpec:
    """The stock Trainer's step with these flags; `options` are TrainingArguments' and ours."""
    from memfit.memory.stock_step import StepSpec
    from memfit.models.loading import load_config

    given, own = _sorted_options(options)
    rows = int(given.get("per_device_train_batch_size", DEFAULTS["per_device_train_batch_size"]))
    task = own.get("task") or "single_label"
    if task not in ("single_label", "multi_label", "regression"):
        raise ConfigError(
            "task is {task}; it is one of single_label, multi_label, regression", task=repr(task)
        )
    labels = 1 if task == "regression" else int(own.get("num_labels") or 2)
    optim = str(getattr(given.get("optim"), "value", given.get("optim") or "adamw_torch_fused"))
    settings: Any = load_config(model)
    spec = StepSpec(
        config=settings,
        rows=rows,
        length=int(own.get("max_length") or 128),
        num_labels=labels,
        problem_type=LabelSpace(task, ()).problem_type,
        precision=_precision(model.dtype, given),
        optim={"adamw_8bit": "adamw_bnb_8bit"}.get(optim, optim),
        gradient_accumulation_steps=int(given.get("gradient_accumulation_steps", 1)),
        gradient_checkpointing=bool(given.get("gradient_checkpointing", False)),
        freeze=model.freeze,
        lora=model.lora,
        attn_implementation=model.attn_implementation,
        padded=own.get("padding"),
        max_grad_norm=float(given.get("max_grad_norm", 1.0)),
        eval_rows=given.get("per_device_eval_batch_size"),
    )
    _check_length(spec, model.model)
    return spec


def _sorted_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """TrainingArguments' fields under today's names, and our own."""
    own_names = ("task", "num_labels", "max_length", "padding")
    training: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in options.items():
        if value is None:
            continue
        (own if key in own_names else training)[SHORT_NAMES.get(key, key)] = value
    fields, _ = modernize(training)
    for key, value in fields.items():
        if key not in training_fields():
            known = [*own_names, *SHORT_NAMES, *training_fields()]
            raise ConfigError(
                "unknown option {key}.{hint}", key=repr(key), hint=nearest(key, known)
            )
        if key in _NOT_PRICED and value:
            raise ConfigError(
                "{name} changes the memory of a step in ways that are not priced yet", name=key
            )
    return fields, own


def _precision(dtype: str | None, given: Mapping[str, Any]) -> str:
    """Autocast by --bf16 or --fp16; --dtype loads the weights themselves in half precision."""
    autocast = [name for name in ("bf16", "fp16") if given.get(name)]
    if len(autocast) > 1:
        raise ConfigError("--bf16 and --fp16 exclude each other; choose one")
    pure = {"bfloat16": "pure_bf16", "float16": "pure_fp16"}.get(dtype or "")
    if autocast and pure:
        raise ConfigError(
            "--{name} computes in half precision over float32 weights and --dtype {dtype} "
            "has none; choose one",
            name=autocast[0],
            dtype=dtype,
        )
    return pure or (autocast[0] if autocast else "fp32")


def _check_length(spec: StepSpec, name: str) -> None:
    from memfit.memory.tracing.meta_models import build_on_meta, model_config
    from memfit.models.layers import position_limit

    # Positions do not depend on these, and some can only be built inside a trace.
    plain = spec.replace(
        lora=None, freeze=None, gradient_checkpointing=False, attn_implementation=None
    )
    limit = position_limit(build_on_meta(plain, model_config(plain)))
    if limit is not None and spec.length > limit:
        raise ConfigError(
            "max_length {length} is beyond the {limit} positions of {model}; write "
            "--max-length {limit} or less",
            length=spec.length,
            limit=limit,
            model=name,
        )


def device_for(
    gpu: str | DeviceProfile | None, place: CardPlace | None = None
) -> DeviceProfile | None:
    """The card named, this machine's card, or the one assumed; `cpu` is no card."""
    from memfit.memory.cards import find_card, this_card

    if isinstance(gpu, str):
        return None if gpu.strip().lower() == "cpu" else find_card(gpu, place)
    if gpu is not None:
        return gpu
    return this_card() or find_card(DEFAULT_GPU)


def notes(options: Mapping[str, Any], device: DeviceProfile | None) -> list[str]:
    """What to know before believing the numbers; `options` are the flags under full names."""
    from memfit.models.loading import load_config

    found = []
    dtype, bf16 = options.get("dtype"), bool(options.get("bf16"))
    if not (dtype or bf16 or options.get("fp16")):
        trusted = bool(options.get("trust_remote_code"))
        model = ModelConfig(
            model=str(options["model"]), from_scratch=True, trust_remote_code=trusted
        )
        stored = str(getattr(load_config(model), "dtype", None)).removeprefix("torch.")
        if stored in ("bfloat16", "float16"):
            found.append(
                t(
                    "the checkpoint is {dtype} and transformers loads it so: add --dtype "
                    "{dtype} to price that",
                    dtype=stored,
                )
            )
    if device is not None and not device.has_bf16 and (bf16 or dtype == "bfloat16"):
        instead = "--fp16" if bf16 else "--dtype float16"
        found.append(
            t(
                "{card} has no bf16 units, which came with capability 8.0: use {instead}",
                card=device.name,
                instead=instead,
            )
        )
    return found
