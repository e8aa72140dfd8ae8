"""AdamW in five bytes a parameter (or four): bf16 weights, what they cannot hold, 8-bit moments.

fp32 AdamW takes 16 bytes a parameter with its gradient. Here the weight is split into a bf16
value and an 8-bit correction, so that updates below a bf16 step still add up, and the moments
take a byte each. Which gradients are kept until the update, and how, is gradient_release.py's
choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from memfit.errors import ConfigError, MemfitError
from memfit.i18n import N_, Message, t
from memfit.strategies.base import Fidelity, PlanFigures, Setup, Strategy, is_users
from memfit.strategies.half_precision import half_arguments
from memfit.units import gb

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from memfit.engine.executors import StepExecutor
    from memfit.strategies.lowbit.gradient_sinks import LowBitSink

TORCH_ADAMW = ("adamw_torch", "adamw_torch_fused")

_BYTES_PER_PARAMETER = {24: 5.03, 16: 4.03}
"""Weights and optimizer state; AdamW in fp32 has 12."""


@dataclass(frozen=True, slots=True)
class LowBitAdamW(Strategy):
    """Weights in `dtype`, masters of 24 bits (or 16, rounded stochastically), 8-bit moments."""

    name = "lowbit_adamw"
    title = N_("the low-bit optimizer")
    reason = "AdamW's state and master weights in 3 bytes a parameter instead of 12"
    shrinks = ("weights", "gradients", "optimizer", "activations", "time")
    conflicts = frozenset({"half_precision", "small_state_optimizer", "optimizer_offload"})

    master_bits: Literal[16, 24] = 24
    dtype: Literal["bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.master_bits not in (16, 24):
            raise ConfigError(
                "master_bits is 24 or 16, not {master_bits}", master_bits=self.master_bits
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.ROUNDING

    def in_words(self) -> str:
        return t("{master_bits}-bit masters", master_bits=self.master_bits)

    def explain(self, plan: PlanFigures) -> str:
        size = _BYTES_PER_PARAMETER[self.master_bits]
        return Message(
            "weights in {dtype} with {bits}-bit masters and 8-bit moments: {bytes} "
            "bytes a parameter instead of 12, saves {saved}",
            dtype=self.dtype,
            bits=str(self.master_bits),
            bytes=f"{size:.0f}",
            saved=gb((12 - size) * plan.trainable_parameters),
        )

    def stock_arguments(self) -> dict[str, Any]:
        return half_arguments(self.dtype)

    def unavailable(self, setup: Setup) -> str:
        optim = str(getattr(setup.args.optim, "value", setup.args.optim))
        if is_users(setup, "optim") and optim not in TORCH_ADAMW:
            return Message("you chose optim={optim}, and this is AdamW", optim=optim)
        if setup.args.bf16 or setup.args.fp16:
            return Message(
                "it stores the weights themselves in half precision; leave bf16 and fp16 off"
            )
        if not any(p.requires_grad and p.dtype == torch.float32 for p in setup.model.parameters()):
            return Message(
                "no float32 weight is trainable, so there is nothing to store in fewer bits"
            )
        if self.dtype == "bfloat16" and setup.lacks_bf16:
            return Message("{reason}; take dtype='float16'", reason=setup.lacks_bf16)
        return setup.refuses(self.dtype)

    def change(self, setup: Setup) -> None:
        from memfit.strategies.lowbit.number_formats import to_lowbit
        from memfit.strategies.lowbit.step_scalars import LossScale

        # On the host until training begins: a set-up that comes to nothing leaves no trace.
        whole: dict[nn.Parameter, torch.Tensor | None] = {
            p: p.data.cpu() for p in setup.model.parameters() if p.dtype == torch.float32
        }
        setup.undo.append(_widening(whole))
        there = setup.card is None and setup.device.type == "cuda"
        remainders = to_lowbit(
            setup.model,
            getattr(torch, self.dtype),
            master_bits=self.master_bits,
            device=setup.device if there else None,
        )

        def make(groups: list[dict[str, Any]], args: TrainingArguments) -> torch.optim.Optimizer:
            from memfit.strategies.lowbit.gradient_sinks import KeptGradients
            from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer

            whole.update(dict.fromkeys(whole))
            optimizer = LowBitOptimizer(
                groups,
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
                master_bits=self.master_bits,
                seed=args.seed,
                remainders=remainders,
                state_on_host=setup.state_on_host,
                gradients_on_host=setup.gradients_on_host,
            )
            scale = LossScale(setup.device) if self.dtype == "float16" else None
            sink = setup.make_sink or KeptGradients
            setup.sink = made = sink(
                optimizer,
                max_grad_norm=args.max_grad_norm or 0.0,
                loss_scale=scale,
            )
            if made.hooked:
                setup.undo.append(made.remove)
            return optimizer

        setup.make_optimizer = make
        setup.undo.append(_with_float_logits(setup.model))
        setup.wrap_executor.append(lambda executor: _into_sink(executor, setup))


def _widening(whole: dict[nn.Parameter, torch.Tensor | None]) -> Callable[[], None]:
    """Weights in float32 again: those that were there, or what has been trained."""

    def undo() -> None:
        for p, before in whole.items():
            p.data = p.data.float() if before is None else before.to(p.device)
        whole.clear()

    return undo


def _with_float_logits(model: Any) -> Callable[[], None]:
    """The head answers in float32, so that the loss and what is reported have all their bits."""
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == labels]
    if not heads:
        return lambda: None
    handle = heads[-1].register_forward_hook(lambda _module, _inputs, logits: logits.float())
    return handle.remove


def _into_sink(executor: StepExecutor, setup: Setup) -> StepExecutor:
    # Imported late: the runtime stands above the strategies.
    from memfit.engine.executors import SinkExecutor

    def sink() -> LowBitSink:
        if setup.sink is None:
            raise MemfitError("the low-bit optimizer is not made yet; train() makes it")
        return setup.sink

    def backward(loss: torch.Tensor) -> None:
        scale = sink().loss_scale
        executor.backward(loss if scale is None else scale.apply(loss))

    fields = {**vars(executor), "backward": backward}
    return SinkExecutor(**fields, sink=sink)
