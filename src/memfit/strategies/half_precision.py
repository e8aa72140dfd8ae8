"""Half precision: matrix products in bfloat16 or float16, weights and their updates in float32.

This is autocast: what is kept for backward is half as large and the products run on tensor cores.
The weights stay in float32. Weights of two bytes without a master copy stall (2e-5 is less than
one bfloat16 step of most weights), so that is not offered; the low-bit optimizers keep the rest of
their bits elsewhere.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch

from memfit.engine.half_on_cpu import half_on_cpu
from memfit.errors import ConfigError
from memfit.i18n import N_, Message, t
from memfit.strategies.base import Fidelity, Half, PlanFigures, Setup, Strategy, change_arguments

_SHORT = {"bfloat16": "bf16", "float16": "fp16"}

_DEVICES = ("cuda", "rocm", "mps", "xpu", "cpu")
"""Where torch and the Trainer have autocast."""


@dataclass(frozen=True, slots=True)
class HalfPrecision(Strategy):
    """The Trainer's own autocast, with loss scaling for float16; set before the Trainer is made."""

    name = "half_precision"
    title = N_("half precision")
    reason = "activations of two bytes instead of four, and products on the faster units"
    shrinks = ("activations", "time")

    dtype: Literal["bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in _SHORT:
            raise ConfigError(
                "half precision is 'bfloat16' or 'float16', not {dtype}", dtype=repr(self.dtype)
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.ROUNDING

    def in_words(self) -> str:
        return t("computed in {dtype}", dtype=self.dtype)

    def explain(self, plan: PlanFigures) -> str:  # noqa: ARG002
        return Message(
            "computes in {dtype} over float32 weights: half the activations, faster products",
            dtype=self.dtype,
        )

    def stock_arguments(self) -> dict[str, Any]:
        return half_arguments(self.dtype)

    def unavailable(self, setup: Setup) -> str:
        return self._chosen_already(setup) or self._missing_on(setup)

    def _chosen_already(self, setup: Setup) -> str:
        for short in _SHORT.values():
            if getattr(setup.args, short):
                return Message("{name}=True is set already", name=short)
        types = {p.dtype for p in setup.model.parameters() if p.is_floating_point()}
        if types - {torch.float32}:
            found = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in types))
            return Message(
                "the weights are {found}; autocast is for weights in float32", found=found
            )
        return ""

    def _missing_on(self, setup: Setup) -> str:
        kind = setup.device_type
        if kind not in _DEVICES:
            return Message("autocast has not been tried on {kind} devices", kind=kind)
        if self.dtype == "float16" and kind == "cpu":
            return Message(
                "float16 has no effect on a CPU: the Trainer runs in float32; take bfloat16"
            )
        if self.dtype == "bfloat16" and setup.lacks_bf16:
            return Message("{reason}; take float16", reason=setup.lacks_bf16)
        return setup.refuses(self.dtype)

    def change(self, setup: Setup) -> None:
        change_arguments(setup, **half_arguments(self.dtype))
        if setup.device_type == "cpu" and not has_fast_bf16():
            warnings.warn(
                t(
                    "this CPU has no bfloat16 instructions: activations shrink, but "
                    "steps take longer"
                ),
                UserWarning,
                stacklevel=2,
            )


def half_arguments(dtype: Half) -> dict[str, Any]:
    """Returns the training arguments that turn autocast on.

    The Trainer makes its Accelerator from `mixed_precision`, which the arguments derived from bf16
    and fp16 when they were made.
    """
    return {_SHORT[dtype]: True, "mixed_precision": _SHORT[dtype]}


def has_fast_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 itself (AVX512-BF16, AMX, ARM BF16)."""
    half_on_cpu()  # torch's question below settles which instructions oneDNN uses
    mkldnn: Any = torch.backends.mkldnn
    return bool(mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
