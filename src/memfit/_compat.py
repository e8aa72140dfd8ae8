"""What differs between versions of transformers, in one place; imports no torch by itself.

Most of it is names: transformers 5 removed or renamed fields of TrainingArguments that people
still copy from older tutorials. `modernize` translates them. At the end stand the private parts of
torch that memfit uses, each with the reason.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memfit.i18n import N_, t

RENAMED: Mapping[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "push_to_hub_token": "hub_token",
    "push_to_hub_model_id": "hub_model_id",
    "torchdynamo": "torch_compile_backend",
    "xpu_backend": "ddp_backend",
}
"""Old field -> the field that means the same now."""

WITHOUT_EFFECT: Mapping[str, str] = {
    "overwrite_output_dir": N_("nothing is deleted; `train(resume_from_checkpoint=True)` resumes"),
    "save_safetensors": N_("weights are always saved as safetensors"),
    "logging_dir": N_("TensorBoard's folder is the environment variable TENSORBOARD_LOGGING_DIR"),
    "use_mps_device": N_("an Apple GPU is used when there is one"),
    "fp16_backend": N_("torch's own autocast is the only one"),
    "half_precision_backend": N_("torch's own autocast is the only one"),
    "fp16_opt_level": N_("torch's own autocast has no levels"),
    "include_tokens_per_second": N_("set include_num_input_tokens_seen to count tokens"),
    "fsdp_min_num_params": N_("set min_num_params in fsdp_config"),
    "fsdp_transformer_layer_cls_to_wrap": N_("set transformer_layer_cls_to_wrap in fsdp_config"),
    "push_to_hub_organization": N_("write hub_model_id='organization/name'"),
    **dict.fromkeys(
        (
            "jit_mode_eval", "mp_parameters", "past_index", "ray_scope", "sharded_ddp",
            "tpu_metrics_debug", "tpu_num_cores", "use_ipex", "use_legacy_prediction_loop",
        ),
        N_("transformers removed what it switched"),
    ),
}  # fmt: skip
"""Old field -> why it is accepted and does nothing."""

OLD_OPTIMIZERS: Mapping[str, str] = {
    "adamw_hf": "adamw_torch",
    "adamw_apex_fused": "adamw_torch_fused",
}

_REPORT_TO_NOTHING = (None, "None", ["None"], [None])


def _warmup(ratio: float) -> dict[str, Any]:
    # transformers 5 reads warmup_steps below 1 as a share of the steps, so a share of 1 is
    # written as the largest number below it.
    return {"warmup_steps": min(float(ratio), math.nextafter(1.0, 0.0))} if ratio else {}


# old field -> the new fields its value stands for; none when it says what is the default anyway
_TRANSLATED: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "warmup_ratio": _warmup,
    "group_by_length": lambda on: {"train_sampling_strategy": "group_by_length"} if on else {},
    "adafactor": lambda on: {"optim": "adafactor"} if on else {},
    "evaluate_during_training": lambda on: {"eval_strategy": "steps"} if on else {},
    "include_inputs_for_metrics": lambda on: {"include_for_metrics": ["inputs"]} if on else {},
    "dispatch_batches": lambda value: {"accelerator_config": {"dispatch_batches": value}},
    "split_batches": lambda value: {"accelerator_config": {"split_batches": value}},
}

OLD_FIELDS = frozenset({*RENAMED, *WITHOUT_EFFECT, *_TRANSLATED})
"""Every field that older transformers had and that memfit still takes."""


def modernize(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields under today's names, and one sentence for each that was spelt the old way.

    A field given under its new name too keeps that value.
    """
    fields = {name: value for name, value in given.items() if name not in OLD_FIELDS}
    notes: list[str] = []
    for name, value in given.items():
        if new := RENAMED.get(name):
            fields.setdefault(new, value)
            notes.append(t("{name} is now called {new}", name=name, new=new))
        elif reason := WITHOUT_EFFECT.get(name):
            notes.append(t("{name} has no effect any more: {reason}", name=name, reason=t(reason)))
        elif translate := _TRANSLATED.get(name):
            new_fields = translate(value)
            for new, new_value in new_fields.items():
                fields[new] = _merged(new_value, fields.get(new, new_value))
            spelling = ", ".join(f"{new}={new_value!r}" for new, new_value in new_fields.items())
            notes.append(
                t("{name} is gone; write {spelling}", name=name, spelling=spelling)
                if spelling
                else t("{name} is gone; leave it out", name=name)
            )
    notes += _old_values(fields)
    return fields, notes


def _merged(translated: Any, given: Any) -> Any:
    """What was given under the new name; two dictionaries become one."""
    if isinstance(translated, dict) and isinstance(given, dict):
        return {**translated, **given}
    return given


def _old_values(fields: dict[str, Any]) -> list[str]:
    """Replace values that were valid once; one sentence each."""
    notes = []
    optimizer = fields.get("optim")
    if isinstance(optimizer, str) and optimizer in OLD_OPTIMIZERS:
        fields["optim"] = OLD_OPTIMIZERS[optimizer]
        notes.append(
            t("optim={old} is gone; {new} is used", old=repr(optimizer), new=repr(fields["optim"]))
        )
    if "report_to" in fields and fields["report_to"] in _REPORT_TO_NOTHING:
        notes.append(
            t("report_to={value} is now written report_to='none'", value=repr(fields["report_to"]))
        )
        fields["report_to"] = "none"
    return notes


def without_num_items(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """A `compute_loss` written before transformers passed `num_items_in_batch` still works."""
    parameters = inspect.signature(compute_loss).parameters
    if "num_items_in_batch" in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        return compute_loss

    @functools.wraps(compute_loss)
    def call(model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return compute_loss(model, inputs, return_outputs)

    return call


def is_in_bad_fork() -> bool:
    """Whether this process is a fork of one that had called CUDA, so that it cannot use it.

    `torch.cuda.is_initialized()` is no answer: asking how many GPUs there are is enough.
    """
    import torch

    return bool(torch.cuda._is_in_bad_fork())


def fsdp_weights(part: Any) -> Iterator[Any]:
    """What `fully_shard` keeps of each parameter of this part.

    It empties and fills storages, which no operator shows; who counts live tensors must be told.
    Older versions have one group of parameters.
    """
    state = part._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group is not None:
            yield from group.fsdp_params
