"""From the flags of a stock Trainer run to the step that is priced, and to its numbers as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from memfit._compat import modernize
from memfit.config import ModelConfig
from memfit.config.training_fields import DEFAULTS, SHORT_NAMES, training_fields
from memfit.data import LabelSpace
from memfit.errors import ConfigError, nearest
from memfit.i18n import t
from memfit.memory.components import Component, MemoryPeak

if TYPE_CHECKING:
    from memfit.memory.cards import CardPlace, DeviceProfile
    from memfit.memory.stock_estimate import MemoryEstimate
    from memfit.memory.stock_step import StepSpec

Verdict = Literal["fits", "barely", "over"]

DEFAULT_GPU = "H200 141GB"
"""Assumed where there is no GPU and none is named: the card whose context was measured."""

BARELY = 0.03
"""A card this nearly full is within what a prediction of device memory may be off."""

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
    labels = 1 if task == "regression" else int(own.get("num_labels") or 2)
    settings: Any = load_config(model)
    spec = StepSpec(
        config=settings,
        rows=rows,
        length=int(own.get("max_length") or 128),
        num_labels=labels,
        problem_type=_problem_type(task),
        precision=_precision(model.dtype, given),
        optim=_optimizer(given),
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


def _problem_type(task: str) -> str:
    if task not in ("single_label", "multi_label", "regression"):
        raise ConfigError(
            "task is {task}; it is one of single_label, multi_label, regression", task=repr(task)
        )
    return LabelSpace(task, ()).problem_type


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


def _optimizer(given: Mapping[str, Any]) -> str:
    name = str(getattr(given.get("optim"), "value", given.get("optim") or "adamw_torch_fused"))
    return {"adamw_8bit": "adamw_bnb_8bit"}.get(name, name)


def _check_length(spec: StepSpec, name: str) -> None:
    from memfit.memory.tracing.meta_models import build_on_meta, model_config
    from memfit.models.layers import position_limit

    # Positions do not depend on these, and some can only be built inside a trace.
    plain = spec.replace(
        lora=None, freeze=None, gradient_checkpointing=False, attn_implementation=None
    )
    limit = position_limit(build_on_meta(plain, model_config(plain)))
    if limit is not None and spec.length > limit:
        said = {"length": spec.length, "limit": limit, "model": name}
        raise ConfigError(
            "max_length {length} is beyond the {limit} positions of {model}; write "
            "--max-length {limit} or less",
            **said,
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


def component_maxima(estimate: MemoryEstimate) -> dict[str, int]:
    """The most each component holds at any moment; their moments differ."""
    live = dict.fromkeys(Component, 0)
    most = dict.fromkeys(Component, 0)
    for event in estimate.events:
        live[event.component] += event.nbytes if event.birth else -event.nbytes
        most[event.component] = max(most[event.component], live[event.component])
    most[Component.CONTEXT] = estimate.peak.components.get(Component.CONTEXT, 0)
    return {str(name): size for name, size in most.items()}


def classic_rules(estimate: MemoryEstimate) -> dict[str, int]:
    """What the four rules say: 4 bytes a parameter, 4 its gradient, 8 AdamW, the rest activations.

    The rest is what the step allocates beyond the first three.
    """
    weights, gradients, optimizer = (estimate.parameters * size for size in (4, 4, 8))
    rest = max(estimate.peak.allocated_bytes - weights - gradients - optimizer, 0)
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": rest,
    }


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


def as_json(
    estimate: MemoryEstimate, device: DeviceProfile | None, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """The numbers as the command prints them with --json."""
    return {
        "parameters": estimate.parameters,
        "trainable_parameters": estimate.trainable_parameters,
        **_peak_json(estimate.peak),
        "steady_bytes": estimate.steady_bytes,
        "component_maxima": component_maxima(estimate),
        "classic_rules": classic_rules(estimate),
        "phases": {name: _peak_json(peak) for name, peak in estimate.phases.items()},
        "device": None
        if device is None
        else {
            "name": device.name,
            "total_bytes": device.total_bytes,
            "usable_bytes": device.usable_bytes,
            "context_measured": device.measured,
        },
        "fits": None if device is None else fits(estimate, device),
        "traced_layers": list(estimate.traced_layers),
        "notes": list(notes),
    }


def fits(estimate: MemoryEstimate, device: DeviceProfile) -> bool:
    """Whether every phase stays within the card."""
    return _highest_bytes(estimate) <= device.usable_bytes


def verdict(estimate: MemoryEstimate, device: DeviceProfile) -> Verdict:
    """`fits`, `over`, or `barely` where the prediction's own error decides."""
    if not fits(estimate, device):
        return "over"
    barely = _highest_bytes(estimate) > (1 - BARELY) * device.usable_bytes
    return "barely" if barely else "fits"


def _highest_bytes(estimate: MemoryEstimate) -> int:
    return max(peak.device_bytes for peak in estimate.phases.values())


def _peak_json(peak: MemoryPeak) -> dict[str, Any]:
    return {
        "components": {str(name): peak.components.get(name, 0) for name in Component},
        "peak_allocated_bytes": peak.allocated_bytes,
        "peak_reserved_bytes": peak.reserved_bytes,
        "device_peak_bytes": peak.device_bytes,
        "peak_module": peak.module,
    }
