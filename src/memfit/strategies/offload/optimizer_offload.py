"""Optimizer offload: AdamW's state, gradients, master weights, and layers in host memory.

forward     layer i computes   |  layer i+1 is fetched   |  the others are on the host
backward    layer i computes   |  layer i-1 is fetched   |  the others are on the host

A layer's weights are one flat tensor on the device, of which the parameters are views. To let it
go its storage is emptied and to have it back filled again, as torch's FSDP does: autograd keeps
views of weights for backward, and these stay valid only if the storage remains the same one.

On the device remain the weights the model computes with; with `weights` only about two layers
of them at a time, and what is outside the layers. The update is AdamW's own in fp32, with the
true global norm, however many micro-batches a step has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from memfit.errors import ConfigError
from memfit.i18n import N_, Message, t
from memfit.memory.tracing import traced_device
from memfit.memory.tracing.tracker import tensors_in
from memfit.models.layer_stack import Args, Kwargs, stack_of, stack_problem, unwrap, wrap
from memfit.strategies.base import Fidelity, PlanFigures, Setup, Strategy, host_shortage
from memfit.strategies.half_precision import half_arguments
from memfit.strategies.lowbit.lowbit_adamw import TORCH_ADAMW, LowBitAdamW
from memfit.strategies.offload.host_adamw import HostAdamW, Masters
from memfit.strategies.offload.host_memory import ALIGNMENT_BYTES, Link, link_to
from memfit.units import gb

if TYPE_CHECKING:
    from transformers import TrainingArguments


class LayerWeights:
    """One layer's weights: on the host always, on the device between `fetch` and `leave`."""

    def __init__(self, parameters: Sequence[Tensor], link: Link, device: torch.device) -> None:
        self.homes: dict[Tensor, Tensor] = {}
        self.is_here = False
        self.has_backward = False
        self._link = link
        self._mark: Any = None
        self._flats: list[tuple[Tensor, Tensor]] = []
        for dtype in {p.dtype: None for p in parameters}:
            self._move([p for p in parameters if p.dtype == dtype], dtype, device)

    def _move(self, parameters: list[Tensor], dtype: torch.dtype, device: torch.device) -> None:
        step = ALIGNMENT_BYTES // dtype.itemsize
        starts = [0]
        for p in parameters:
            starts.append(starts[-1] + -(-p.numel() // step) * step)
        host = self._link.take(starts[-1], dtype)
        flat = torch.empty(starts[-1], dtype=dtype, device=device)
        for start, p in zip(starts, parameters, strict=False):
            home = host[start : start + p.numel()]
            home.copy_(p.detach().flatten())
            self.homes[p] = home
            p.data = flat[start : start + p.numel()].view(p.shape)
        self._flats.append((host, flat))
        _empty(flat)

    @property
    def nbytes(self) -> int:
        """What the layer takes on the device while it is there."""
        return sum(host.nbytes for host, _ in self._flats)

    def fetch(self) -> None:
        """Brings the weights to the device, unless they are there or on their way."""
        if self.is_here:
            return
        for host, flat in self._flats:
            flat.untyped_storage().resize_(host.nbytes)
            traced_device.resized(flat)
        self._link.follow()
        for host, flat in self._flats:
            self._link.copy(flat, host)
        self._mark, self.is_here = self._link.mark(), True

    def arrive(self) -> None:
        """What is computed from here on may read the weights."""
        self.fetch()
        if self._mark is not None:
            self._link.wait(self._mark)
            self._mark = None

    def leave(self) -> None:
        """What was asked to compute may still read the weights, nothing after it."""
        if not self.is_here:
            return
        self.arrive()
        for _, flat in self._flats:
            _empty(flat)
        self.is_here = False

    def write_back(self) -> None:
        """The weights on the device were changed: they are the ones to keep."""
        self._link.follow()
        for host, flat in self._flats:
            self._link.copy(host, flat)
        self._link.finish(self._link.mark())
        self.leave()


def _empty(flat: Tensor) -> None:
    flat.untyped_storage().resize_(0)
    traced_device.resized(flat)


class HostWeights:
    """All layers of a stack, fetched in time for forward and backward."""

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], link: Link, device: torch.device
    ) -> None:
        self._link = link
        self._device = device
        self._undo: list[Callable[[], None]] = []
        # What several modules share is needed when its layer is not, and stays.
        owners = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
        self._layers = [
            LayerWeights([p for p in layer.parameters() if owners[p] == 1], link, device)
            for layer in layers
        ]
        for index, layer in enumerate(layers):
            self._undo += self._attach(index, layer)

    @property
    def homes(self) -> dict[Tensor, Tensor]:
        """Where each parameter's weights live: flat, on the host."""
        return {p: home for layer in self._layers for p, home in layer.homes.items()}

    @property
    def resident_bytes(self) -> int:
        """What is on the device now, or on its way there."""
        return sum(layer.nbytes for layer in self._layers if layer.is_here)

    def release(self) -> None:
        """All weights leave the device, and no copy reads the host's any more."""
        for layer in self._layers:
            layer.leave()
        self._link.finish(self._link.mark())

    def remove(self) -> None:
        """All weights back to the device for good, the layers as they were."""
        self.release()
        while self._undo:
            self._undo.pop()()
        for p, home in self.homes.items():
            p.data = home.view(p.shape).to(self._device, copy=True)

    def _attach(self, index: int, layer: nn.Module) -> Iterator[Callable[[], None]]:
        yield wrap(layer, partial(self._around, index))
        weights = self._layers[index]
        module: Any = layer  # torch's hooks are not typed

        def saved(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
            for name, p in layer.named_parameters():
                if p in weights.homes and prefix + name in state:
                    state[prefix + name] = weights.homes[p].view(p.shape).clone()

        yield module.register_state_dict_post_hook(saved).remove
        yield module.register_load_state_dict_pre_hook(lambda *_: weights.arrive()).remove
        yield module.register_load_state_dict_post_hook(lambda *_: weights.write_back()).remove

    def _around(
        self, index: int, call: Callable[..., Any], _: nn.Module, args: Args, kwargs: Kwargs
    ) -> Any:
        weights = self._layers[index]
        weights.arrive()
        is_last = index == len(self._layers) - 1
        if not is_last:
            self._layers[index + 1].fetch()
        output = call(*args, **kwargs)
        result: Any = next((x for x in tensors_in(output) if x.requires_grad), None)
        weights.has_backward = result is not None
        if result is not None:
            result.register_hook(partial(self._before_backward, index))
        # Backward begins with the last layer: its weights stay for it.
        if not (is_last and weights.has_backward):
            weights.leave()
        return output

    def _before_backward(self, index: int, gradient: Tensor) -> None:
        """The gradient of a layer's output is there, so all layers above are through."""
        del gradient
        for above in self._layers[index + 1 :]:
            above.leave()
        self._layers[index].arrive()
        if index > 0 and self._layers[index - 1].has_backward:
            self._layers[index - 1].fetch()


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
                "weights are stored as they are or in bfloat16, not {dtype}",
                dtype=repr(self.dtype),
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT if self.dtype is None else Fidelity.ROUNDING

    def in_words(self) -> str:
        return (
            t("weights and update in host memory")
            if self.weights
            else t("the update in host memory")
        )

    def explain(self, plan: PlanFigures) -> str:
        # Against the same weights with their state on the card.
        here: tuple[Strategy, ...] = () if self.dtype is None else (LowBitAdamW(dtype=self.dtype),)
        fields = {"host": gb(plan.host_bytes), **plan.saves(self, here)}
        if self.weights:
            return Message(
                "AdamW runs on the CPU and layers' weights come from host memory two at "
                "a time, {host} there: saves {saved}, costs {cost} of the step",
                **fields,
            )
        return Message(
            "AdamW runs on the CPU with its state in host memory, {host} there: "
            "saves {saved}, costs {cost} of the step",
            **fields,
        )

    def stock_arguments(self) -> dict[str, Any]:
        return {} if self.dtype is None else half_arguments(self.dtype)

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
        if optim not in TORCH_ADAMW:
            return Message("you chose optim={optim}, and this is AdamW", optim=optim)
        if args.fp16:
            return Message("fp16's loss scaling looks for gradients on the device; use bf16")
        if setup.ranks > 1:
            return Message("gradients of several processes would be used before they are summed")
        if self.dtype is not None and args.bf16:
            return Message("it stores the weights themselves in bfloat16; leave bf16 off")
        if not any(p.requires_grad for p in setup.model.parameters()):
            return Message("no weight is trainable, so there is no optimizer state")
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
