"""The set-up a candidate trains in: a model without weights, a card that need not be here."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import torch

from memfit.half_on_cpu import half_on_cpu
from memfit.memory.cards import DeviceProfile
from memfit.memory.models import adapted, build_on_meta, model_config
from memfit.memory.spec import OPTIMIZERS, StepSpec
from memfit.planner.trace_batch import LengthRows
from memfit.planner.values import Candidate, Workload
from memfit.runtime.effective import effective_arguments, leave_out_refused_half
from memfit.strategies import Setup, Strategy, ordered
from memfit.traced import TracedDevice, triton_expected

# These choose what learns; peft can do it only before a model has (fake) weights.
ON_META = ("freezing", "lora")
# Optimizers the trace does not run itself, by one whose state is as large or larger.
_LIKE = {"adamw_8bit": "adamw_bnb_8bit", "paged_adamw_8bit": "adamw_bnb_8bit"}
_LARGEST = "adamw_torch"
_PURE = {"bfloat16": "pure_bf16", "float16": "pure_fp16"}


def traced_device(card: DeviceProfile | None) -> TracedDevice:
    """What the code under trace may ask."""
    if card is None:
        return TracedDevice(cuda=False)
    return TracedDevice(cuda=True, capability=card.capability, triton=triton_expected())


def spec_of(workload: Workload) -> StepSpec:
    """What the builders of models must know of the task."""
    return StepSpec(
        config=workload.config,
        rows=1,
        length=1,
        num_labels=workload.num_labels,
        problem_type=workload.problem_type,
        precision=_precision(workload),
        attn_implementation=getattr(workload.config, "_attn_implementation", None),
        gradient_checkpointing=bool(workload.args.gradient_checkpointing),
        freeze=workload.freeze,
        lora=workload.lora,
    )


def _precision(workload: Workload) -> str:
    if workload.dtype in _PURE:
        return _PURE[workload.dtype]
    return "bf16" if workload.args.bf16 else "fp16" if workload.args.fp16 else "fp32"


def full_config(workload: Workload) -> Any:
    """The configuration with the head the task asks for; models share it, so it is a copy."""
    if workload.given is not None:
        return copy.deepcopy(workload.config)
    return model_config(spec_of(workload))


def build_model(workload: Workload, config: Any, layers: int | None = None) -> Any:
    """The classifier on the meta device; `layers` of its configuration were kept."""
    spec = spec_of(workload)
    if workload.given is not None:
        depth = int(config.get_text_config().num_hidden_layers)
        return adapted(workload.given.build(depth), spec)
    if layers is not None and spec.freeze is not None and spec.freeze.isdecimal():
        spec = spec.replace(freeze=str(min(layers, int(spec.freeze))))
    return build_on_meta(spec, config)


def make_setup(workload: Workload, model: Any, card: DeviceProfile | None) -> Setup:
    """What strategies are applied to: the Trainer's, but for the device, which is traced."""
    with warnings.catch_warnings():
        # Of this machine, or said when the training begins.
        warnings.simplefilter("ignore")
        args = effective_arguments(workload.args)
        if card is None:
            leave_out_refused_half(args)
    return Setup(
        model=model,
        args=args,
        device=torch.device("cpu"),
        card=card,
        stock_loss=workload.stock_loss and args.label_smoothing_factor == 0,
        train_dataset=LengthRows(workload.lengths),
        user_set=workload.user_set,
    )


def apply_on_meta(candidate: Candidate, setup: Setup) -> list[Strategy]:
    """Apply what must come before there are weights; the rest, in order, is returned."""
    chosen = ordered(candidate.strategies)
    for one in chosen:
        if one.name in ON_META:
            apply_one(one, setup)
    return [one for one in chosen if one.name not in ON_META]


def apply_one(strategy: Strategy, setup: Setup) -> None:
    """Apply one strategy, or say in a sentence why it has no use."""
    with warnings.catch_warnings():
        # What it tells the user it tells when the training begins.
        warnings.simplefilter("ignore")
        strategy.apply(setup)


def optimizer_spec(workload: Workload, setup: Setup) -> StepSpec:
    """The stock optimizer of these arguments, or one whose state is as large."""
    optim = str(getattr(setup.args.optim, "value", setup.args.optim))
    optim = _LIKE.get(optim, optim)
    known = optim if optim in OPTIMIZERS else _LARGEST
    return dataclasses.replace(spec_of(workload), optim=known)


def autocast_dtype(workload: Workload, candidate: Candidate, *, cuda: bool) -> torch.dtype | None:
    """What the forward pass computes in, where it is not the weights' own type."""
    half = candidate.get("half_precision")
    if not cuda and not half_on_cpu().bfloat16:
        return None
    if workload.args.bf16 or (half and half.dtype == "bfloat16"):
        return torch.bfloat16
    # A CPU trains in fp32 whatever fp16 says.
    if cuda and (workload.args.fp16 or (half and half.dtype == "float16")):
        return torch.float16
    return None
