"""Which strategies can be used on a device, each asked itself, on a small model that suits all."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.doctor.environment import Environment
from memfit.messages import shown, t

if TYPE_CHECKING:
    from memfit.memory.cards import DeviceProfile
    from memfit.strategies import Setup, Strategy

# Packages a strategy cannot work without, and those it is only faster with.
_NEEDS = {"lora": "peft", "fused_layers": "triton", "state_offload": "triton"}
_FASTER_WITH = {"lowbit_adamw": "triton", "gradient_release": "triton", "cuda_graphs": "triton"}
_FIRST_WITH_TRITON = (7, 0)


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether one strategy can be used here."""

    strategy: str
    fidelity: str
    reason: str = ""
    """Why it cannot be used, in its own words; empty where it can."""
    note: str = ""
    command: str = ""
    """What installs what it lacks, where that is all it lacks."""

    @property
    def ready(self) -> bool:
        """Whether it can be used."""
        return not self.reason


def readiness(found: Environment, card: DeviceProfile | None = None) -> list[Readiness]:
    """Every strategy of the registry, in its order; on `card` where one is given."""
    from memfit.strategies import ORDER

    return [_judged(kind, found, card) for kind in ORDER]


def strategies_for(kind: type[Strategy], half: str = "bfloat16") -> list[Strategy]:
    """A strategy as one would use it, last, after what it stands on."""
    from memfit.strategies import (
        CudaGraphs,
        Freezing,
        FrozenFeatures,
        GradientRelease,
        HalfPrecision,
        LowBitAdamW,
        Packing,
        StateOffload,
        Truncation,
    )

    dtype: Any = half
    low_bit = LowBitAdamW(dtype=dtype)
    special: dict[type[Strategy], list[Strategy]] = {
        CudaGraphs: [Packing(), low_bit, CudaGraphs()],
        FrozenFeatures: [Freezing("encoder", head_learning_rate=1e-3), FrozenFeatures()],
        GradientRelease: [low_bit, GradientRelease("kept8")],
        HalfPrecision: [HalfPrecision(dtype)],
        LowBitAdamW: [low_bit],
        StateOffload: [low_bit, StateOffload()],
        Truncation: [Truncation(64)],
    }
    return special.get(kind) or [kind()]


def _judged(kind: type[Strategy], found: Environment, card: DeviceProfile | None) -> Readiness:
    setup = _setup(found, card)
    *beneath, strategy = strategies_for(kind, "float16" if setup.lacks_bf16 else "bfloat16")
    for one in beneath:
        if not one.unavailable(setup):
            one.apply(setup)
    reason = shown(strategy.unavailable(setup))
    note = command = ""
    if kind.name in _NEEDS and reason:
        package = found.package(_NEEDS[kind.name])
        command = package.command if package.lacking else ""
        if _NEEDS[kind.name] == "triton" and _is_too_old(setup):
            reason, command = t("its kernels need Triton, which needs compute capability 7.0"), ""
    elif kind.name in _FASTER_WITH and not reason and setup.device_type == "cuda":
        package = found.package(_FASTER_WITH[kind.name])
        if not setup.has_triton and not _is_too_old(setup):
            note, command = t("faster with {package}", package=package.name), package.command
    return Readiness(kind.name, str(strategy.fidelity), reason, note, command)


def _is_too_old(setup: Setup) -> bool:
    """Whether it is the card that keeps Triton's kernels away, so that nothing can be installed."""
    return setup.device_type == "cuda" and setup.capability < _FIRST_WITH_TRITON


def _setup(found: Environment, card: DeviceProfile | None) -> Setup:
    import torch
    from transformers import TrainingArguments

    from memfit.strategies import Setup

    on_gpu = card is None and found.torch.sees_gpu
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, report_to="none", use_cpu=not on_gpu)
    device = torch.device("cuda" if on_gpu else "cpu")
    return Setup(model=_model(), args=args, device=device, card=card)


def _model() -> Any:
    """One layer that every strategy has something to do for."""
    from transformers import BertConfig, BertForSequenceClassification

    config: Any = BertConfig(
        vocab_size=32,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=64,
        max_position_embeddings=32,
        attention_probs_dropout_prob=0.0,
    )
    config._attn_implementation = "eager"
    build: Any = BertForSequenceClassification
    return build(config)
