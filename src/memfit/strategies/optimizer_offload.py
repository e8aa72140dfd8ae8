"""Optimizer offload: AdamW's state, the gradients and master weights are in host memory.

On the device remain the weights the model computes with; with `weights` only about two layers
of them at a time, and what is outside the layers. The update is AdamW's own in fp32, with the
true global norm, however many micro-batches a step has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from memfit.errors import ConfigError
from memfit.messages import N_, Message
from memfit.packing.families import unwrap
from memfit.strategies._host_adamw import HostAdamW, Masters
from memfit.strategies._host_weights import HostWeights
from memfit.strategies._hosted import Link, link_to
from memfit.strategies._layers import stack_of, stack_problem
from memfit.strategies.base import Fidelity, Setup, Strategy, host_shortage

if TYPE_CHECKING:
    from transformers import TrainingArguments

_ADAMW = ("adamw_torch", "adamw_torch_fused")
_HOST_BYTES_PER_PARAMETER = 16
"""fp32 weights, gradient and two moments."""


@dataclass(frozen=True, slots=True)
class OptimizerOffload(Strategy):
    """AdamW on the CPU; `dtype` is how weights are stored on the device, None as they are.

    Needs 16 bytes a parameter of host memory, little of it pinned; with `weights`, the layers'
    weights once more, pinned.
    """

    name = "optimizer_offload"
    title = N_("optimizer offload")
    reason = "the optimizer, its state and the gradients are in the computer's own memory"
    shrinks = ("optimizer", "gradients", "weights")
    conflicts = frozenset(
        {"lowbit_adamw", "gradient_release", "small_state_optimizer", "cuda_graphs"}
    )

    weights: bool = False
    dtype: Literal["bfloat16"] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, "bfloat16"):
            raise ConfigError(
                Message(
                    "weights are stored as they are or in bfloat16, not {dtype}",
                    dtype=repr(self.dtype),
                )
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT if self.dtype is None else Fidelity.ROUNDING

    def unavailable(self, setup: Setup) -> str:
        if setup.device_type != "cuda":
            return Message(
                "on a {device} device the optimizer is in host memory already",
                device=setup.device_type,
            )
        # What the host of a card that is not here has free is the planner's to ask.
        return self._unsuited(setup) or ("" if setup.card else self._too_large(setup.model))

    def _unsuited(self, setup: Setup) -> str:
        """What in the model or the arguments stands against it, on any device."""
        args = setup.args
        optim = str(getattr(args.optim, "value", args.optim))
        if optim not in _ADAMW:
            return Message("you chose optim={optim}, and this is AdamW", optim=optim)
        if args.fp16:
            return Message("fp16's loss scaling looks for gradients on the device; use bf16")
        if args.world_size > 1:
            return Message("gradients of several processes would be used before they are summed")
        if self.dtype is not None and args.bf16:
            return Message("it stores the weights themselves in bfloat16; leave bf16 off")
        if not any(p.requires_grad for p in setup.model.parameters()):
            return Message("no weight learns, so there is no optimizer state")
        if self.dtype is not None and setup.lacks_bf16:
            return Message("{reason}; leave dtype out", reason=setup.lacks_bf16)
        return self._weights_stay(setup) if self.weights else ""

    def _weights_stay(self, setup: Setup) -> str:
        if problem := stack_problem(setup.model, None):
            return problem
        stack = stack_of(setup.model)
        name = type(unwrap(setup.model)).__name__
        if stack.depth > len(stack.layers):
            return Message(
                "all layers of {name} share their weights, which are needed all the time", name=name
            )
        if len(stack.layers) < 3:
            return Message(
                "two layers are on the device at a time, and {name} has no more", name=name
            )
        if setup.args.torch_compile:
            return Message("a compiled model holds on to its weights; leave torch_compile off")
        return ""

    def _too_large(self, model: nn.Module) -> str:
        learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
        needed_bytes = _HOST_BYTES_PER_PARAMETER * learning
        if self.weights:
            needed_bytes += sum(p.nbytes for p in model.parameters())
        return host_shortage(needed_bytes)

    def change(self, setup: Setup) -> None:
        # Gradients and weights may cross on the bus, so each has a stream of its own.
        self.attach(setup, link_to(setup.device), link_to(setup.device))

    def attach(self, setup: Setup, link: Link, weights_link: Link) -> HostWeights | None:
        """Offload over these links, whatever the device."""
        if problem := self._unsuited(setup):
            raise ConfigError(problem)
        stored = [p for p in setup.model.parameters() if p.dtype == torch.float32]
        masters = Masters() if self.dtype is None else _halved(setup.model)
        if self.dtype is not None:
            setup.undo.append(lambda: _widen(stored, masters))
        hosted = None
        if self.weights:
            layers = stack_of(setup.model).layers
            hosted = HostWeights(setup.model, layers, weights_link, setup.device)
            setup.undo.append(hosted.remove)

        def make(groups: list[dict[str, Any]], args: TrainingArguments) -> torch.optim.Optimizer:
            optimizer = HostAdamW(
                groups,
                link,
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
                weight_decay=args.weight_decay,
                max_grad_norm=args.max_grad_norm or 0.0,
                masters=masters,
                order=setup.model.parameters(),
                homes=None if hosted is None else hosted.homes,
                before_step=None if hosted is None else hosted.release,
            )
            setup.undo.append(optimizer.remove)
            # It takes the gradients and knows their norm, which is all the Trainer asks a sink.
            setup.sink = cast(Any, optimizer)
            return optimizer

        setup.make_optimizer = make
        return hosted


@torch.no_grad()
def _halved(model: nn.Module) -> Masters:
    """fp32 weights stored as bf16 on the device, themselves kept on the host."""
    masters = Masters()
    for p in model.parameters():
        if p.dtype == torch.float32:
            if p.requires_grad:
                masters.keep(p, p.detach().to("cpu", copy=True))
            p.data = p.data.to(torch.bfloat16)
    return masters


@torch.no_grad()
def _widen(stored: list[nn.Parameter], masters: Masters) -> None:
    """The weights in fp32 again, as they were kept on the host."""
    for p in stored:
        master = masters.of(p)
        p.data = (p.data if master is None else master.view(p.shape)).to(p.device, torch.float32)
