"""Fully sharded training (FSDP2): each rank keeps a part of every weight, gradient and moment.

    forward    a layer's weights are gathered from all ranks, and dropped when the layer is done
    backward   gathered again; the layer's gradient is summed, and each rank keeps its part
    update     torch's own optimizer, on the parts

N ranks hold 1/N of weights, gradients and optimizer state each, and one whole layer at a time.
Every layer is a meeting of all ranks. So all of them run the same number of micro-batches in a
step: one with fewer runs a row again whose loss counts nothing. No rank can repeat a part by
itself, rehearse, or evaluate other rows than the others.

Checkpoints are the usual ones: tensors are gathered one by one, on the first rank's host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memfit._compat import forget_fully_shard, fsdp_weights
from memfit.engine.exchange import Peers
from memfit.engine.executors import Share, StepExecutor
from memfit.engine.micro_batches import MicroBatch, rows_of
from memfit.i18n import N_, Message
from memfit.memory.tracing import traced_device
from memfit.models.layer_stack import stack_of, stack_problem, unwrap
from memfit.strategies.base import Fidelity, Setup, Strategy
from memfit.strategies.planning import (
    Axis,
    Combination,
    Effects,
    PlanFigures,
    Tier,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class FullySharded(Strategy):
    """Weights, gradients and optimizer state are divided among the ranks by `fully_shard`.

    Needs several ranks.
    """

    name = "fully_sharded"
    title = N_("sharded weights")
    reason = "each of N ranks keeps an Nth of the weights, gradients and optimizer state"
    shrinks = ("weights", "gradients", "optimizer")
    conflicts = frozenset(
        {
            "lora", "frozen_features", "fused_layers", "activation_offload", "lowbit_adamw",
            "gradient_release", "state_offload", "optimizer_offload", "small_state_optimizer",
            "cuda_graphs",
        }
    )  # fmt: skip
    axis = Axis.OWN
    needs_ranks = True

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    @property
    def effects(self) -> Effects:
        return Effects(divides_weights=True)

    def is_pointless(self, beside: Combination) -> bool:
        # Loss scaling looks at the gradients of this rank alone.
        return beside.effects.few_learn or beside.effects.autocast == "float16"

    def tier(self, beside: Combination) -> Tier:  # noqa: ARG002
        return Tier.WEIGHTS_DIVIDED

    def explain(self, plan: PlanFigures) -> str:
        return Message(
            "each of {ranks} ranks keeps a part of every weight, gradient and moment, and gathers "
            "a layer's weights while it runs: saves {saved}, costs {cost} of the step",
            ranks=str(plan.workload.ranks),
            **plan.saves(self),
        )

    def unavailable(self, setup: Setup) -> str:
        if setup.ranks.world_size == 1:
            return Message(
                "it divides the weights over several processes, and there is one; see --gpus"
            )
        if setup.device_type != "cpu" and setup.args.ddp_backend == "gloo":
            return Message("gloo cannot gather weights on a GPU; NCCL can")
        if setup.device_type != "cpu" and setup.args.fp16:
            return Message(
                "fp16 scales the loss by the gradients it sees, and each rank would see its part"
            )
        if problem := stack_problem(setup.model, None):
            return problem
        types = {parameter.dtype for parameter in setup.model.parameters()}
        if types != {torch.float32}:
            return Message("its weights are not all float32")
        if setup.make_optimizer is not None:
            return Message("another strategy brings its own optimizer")
        return ""

    def change(self, setup: Setup) -> None:
        setup.wrap_executor.append(in_step)
        if traced_device.device() is not None:
            return  # planner/ranks.py divides what the trace finds
        setup.ranks.same_weights(setup.model)  # what is random in them, each rank drew by itself
        sharded = ShardedModel(setup.model, setup.ranks, setup.device)
        setup.sharded = sharded

        def undo() -> None:
            sharded.join()
            setup.sharded = None

        setup.undo.append(undo)


def divided_parts(model: nn.Module) -> tuple[list[nn.Module], Any]:
    """The modules whose weights are gathered together, and which of them embeds words.

    What else the model has is gathered with the model itself.
    """
    words = getattr(unwrap(model), "get_input_embeddings", lambda: None)()
    parts = [part for part in (*stack_of(model).layers, words) if part is not None]
    tied = _tied(model, parts)
    parts = [part for part in parts if tied.isdisjoint(part.parameters())]
    return parts, words if words in parts else None


class ShardedModel:
    """A model whose weights are divided among the ranks, and what it takes to save and load it.

    All ranks call its methods together.
    """

    def __init__(self, model: nn.Module, ranks: Peers, device: torch.device) -> None:
        self._model = model
        self._ranks = ranks
        self._before = {module: _ModuleBefore(module) for module in model.modules()}
        self._device = next(model.parameters()).device
        self._optimizer: Optimizer | None = None
        self._shard(device)
        self._loading = model.register_load_state_dict_pre_hook(self._load)  # type: ignore[no-untyped-call]

    def _shard(self, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        mesh = init_device_mesh(device.type, (self._ranks.world_size,))
        parts, words = divided_parts(self._model)
        for part in (*parts, self._model):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)  # moves it to the device
            for module in part.modules():
                self._before[module].drop()
        if isinstance(words, FSDPModule):
            words.set_unshard_in_backward(False)  # their gradient needs the ids only
        for part in self._model.modules():
            if isinstance(part, FSDPModule):
                # A rank's gradient is its part of the whole batch's mean: the parts are summed.
                # Without `force_sum` a factor is a reduction that gloo does not have.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
                if device.type == "cpu":  # where live tensors are counted
                    _tell_of_weights(part)

    # ---- saving and loading ----

    def model_state(self) -> dict[str, Any] | None:
        """The whole state on the first rank's host; None on the others."""
        whole = {name: self._gathered(one) for name, one in self._model.state_dict().items()}
        return whole if self._ranks.rank == 0 else None

    def divide(self, optimizer: Optimizer) -> None:
        """Have this optimizer load whole tensors, of which it keeps this rank's parts."""
        if optimizer is not self._optimizer:
            self._optimizer = optimizer
            optimizer.register_load_state_dict_pre_hook(_with_parts)

    @contextmanager
    def whole(self, *, sizes_only: bool = False) -> Iterator[None]:
        """Inside, the first rank's optimizer has whole tensors; every rank must come here.

        They are brought to host memory one at a time. `sizes_only`: with no values.
        """
        if self._optimizer is None:
            yield
            return
        state = self._optimizer.state
        parts = {p: dict(values) for p, values in state.items()}
        try:
            for values in state.values():
                for name, value in values.items():
                    values[name] = _sized(value) if sizes_only else self._gathered(value)
            yield
        finally:
            state.update(parts)

    def _gathered(self, value: Any) -> Any:
        """What is divided, whole on the first rank's host."""
        if not is_divided(value):
            return value
        whole = value.full_tensor()
        return whole.cpu() if self._ranks.rank == 0 else None

    def _load(self, _module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if (key := prefix + name) in state:
                state[key] = _part_of(state[key], parameter)

    # ---- the way back ----

    def join(self) -> None:
        """Every rank has the whole model again, in the modules and parameters it had."""
        self._loading.remove()
        whole: dict[Tensor, Tensor] = {}
        for before in self._before.values():
            before.restore(whole, self._device)


def _tell_of_weights(part: Any) -> None:
    """Have `fully_shard` say when it gathers weights and drops them: no operator shows it."""
    for weight in fsdp_weights(part):
        for method in ("alloc_all_gather_outputs", "free_unsharded_param"):
            setattr(weight, method, partial(_telling, weight, getattr(weight, method)))


def _telling(weight: Any, change: Callable[[], None]) -> None:
    change()
    for tensor in weight.all_gather_outputs:
        traced_device.resized(tensor)


class _ModuleBefore:
    """A module before it was sharded. `fully_shard` has no inverse."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kind = type(module)
        self._names = frozenset(vars(module))
        self._hooks = {
            name: dict(hooks) for name, hooks in vars(module).items() if name.endswith(_HOOKS)
        }
        self._parameters = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None
        }

    def drop(self) -> None:
        """Hold no memory of the whole parameters: their parts are somewhere else."""
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)

    def restore(self, whole: dict[Tensor, Tensor], device: torch.device) -> None:
        """As it was; `whole` has the tensors that other modules were given back already."""
        module = self._module
        module.__class__ = self._kind
        for name, parameter in self._parameters.items():
            divided: Any = module._parameters[name]
            if parameter not in whole:
                whole[parameter] = divided.full_tensor().detach().to(device)
                parameter.data = whole[parameter]
            parameter.requires_grad_(divided.requires_grad)
            parameter.grad = None
            module._parameters[name] = parameter
        for name, hooks in self._hooks.items():
            now = vars(module)[name]
            now.clear()
            now.update(hooks)
        for name in set(vars(module)) - self._names:
            if "fsdp" in name or "composable" in name:
                del vars(module)[name]
        forget_fully_shard(module)


def _tied(model: nn.Module, parts: Sequence[nn.Module]) -> set[Tensor]:
    """Parameters that several parts have, or a part and the rest: those are gathered together."""
    owners: dict[Tensor, set[int]] = {}
    inside = {module: number for number, part in enumerate(parts) for module in part.modules()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(inside.get(module, -1))
    return {parameter for parameter, found in owners.items() if len(found) > 1}


_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def is_divided(value: Any) -> bool:
    """Whether this is a tensor of which each rank holds a part."""
    return hasattr(value, "full_tensor")


def with_part(divided: Any, part: Tensor) -> Tensor:
    """A tensor divided like this one, of which this rank holds another part."""
    from torch.distributed.tensor import DTensor

    mesh, places = divided.device_mesh, divided.placements
    shape, stride = divided.shape, divided.stride()
    return DTensor.from_local(part, mesh, places, run_check=False, shape=shape, stride=stride)


def _sized(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype) if is_divided(value) else value


def _with_parts(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Before the optimizer's own `load_state_dict`."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {name: _part_of(value, params[index]) for name, value in values.items()}
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _part_of(value: Any, parameter: Any) -> Any:
    """This rank's part of a whole tensor of a divided parameter's shape.

    Every rank has read the whole one, so nobody sends anything. `fully_shard` divides rows as
    `torch.chunk` does.
    """
    if not isinstance(value, Tensor) or is_divided(value) or value.shape != parameter.shape:
        return value
    mesh, local = parameter.device_mesh, parameter.to_local()
    begin = min(-(-len(value) // mesh.size()) * mesh.get_local_rank(), len(value))
    part = value[begin : begin + len(local)]
    return with_part(parameter, part.to(local.device, copy=True))


def in_step(executor: StepExecutor) -> StepExecutor:
    """The executor as it runs on ranks that meet in every layer."""
    fields = {
        field.name: getattr(executor, field.name) for field in dataclasses.fields(StepExecutor)
    }
    return InStepExecutor(**{**fields, "exchange": None})


@dataclass(frozen=True)
class InStepExecutor(StepExecutor):
    """Runs as many micro-batches as the rank with the most; gradients are summed in backward."""

    runs_alone = False

    def run_parts(self, model: nn.Module, parts: Sequence[MicroBatch]) -> Tensor:
        """As in the base; a rank that is lost is noticed inside a layer."""
        return self.ranks.meeting(lambda: super(InStepExecutor, self).run_parts(model, parts))

    def weighted(self, parts: Sequence[MicroBatch]) -> list[tuple[MicroBatch, Share]]:
        """The micro-batches that count, then some that do not: as many as on the other ranks."""
        own = super().weighted(parts)
        most, lacks = self.ranks.highest([len(own), int(not own)])
        row = self._counted_row(own)
        if lacks:  # fewer rows than ranks, as at the end of an epoch
            row = next(one for one in self.ranks.gathered(row) if one is not None)
        if len(own) == most:
            return own
        assert row is not None
        total = self.ranks.total(0.0)  # of this step, known already
        return own + [(row, Share(0.0, total))] * (most - len(own))

    def _counted_row(self, own: Sequence[tuple[MicroBatch, Share]]) -> MicroBatch | None:
        """A single row whose loss is a number; NaN stays NaN even with a weight of 0."""
        for part, _ in own:
            for row in range(len(part.rows)):
                inputs = rows_of(part.inputs, [row])
                if self.weigh(inputs) > 0:
                    return MicroBatch((part.rows[row],), inputs)
        return None
