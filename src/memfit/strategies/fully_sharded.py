"""Fully sharded training (FSDP2): each rank keeps a part of every weight, gradient and moment.

    forward    a layer's weights are gathered from all ranks, and dropped when the layer is done
    backward   gathered again; the layer's gradient is averaged, and each rank keeps its part
    update     torch's own optimizer, on the parts

N ranks hold 1/N of weights, gradients and optimizer state each, and a few whole layers at a time.
Every layer is a meeting of all ranks: StepExecutor.in_step says what follows from that. torch's
`fully_shard` is called here because accelerate's own FSDP2 does not run on a CPU, where it is
tested. A model stays divided after its training, as with the stock Trainer. Checkpoints are the
usual ones: tensors are gathered one by one, on the first rank's host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from memfit._compat import fsdp_weights
from memfit.engine.ranks import Ranks
from memfit.i18n import N_, Message
from memfit.memory.tracing import traced_device
from memfit.models.layer_stack import stack_of, stack_problem, unwrap
from memfit.strategies.base import Fidelity, PlanFigures, Setup, Strategy

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

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def explain(self, plan: PlanFigures) -> str:
        return Message(
            "each of {ranks} ranks keeps a part of every weight, gradient and moment, and gathers "
            "a layer's weights while it runs: saves {saved}, costs {cost} of the step",
            ranks=str(plan.task.ranks),
            **plan.saves(self),
        )

    def unavailable(self, setup: Setup) -> str:
        if setup.ranks == 1:
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
        setup.wrap_executor.append(lambda executor: replace(executor, in_step=True))
        if traced_device.device() is not None:
            return  # planner/rank_cost.py divides what the trace finds
        ranks = Ranks.here()
        # What is random in the weights, each rank drew by itself.
        ranks.same([*setup.model.parameters(), *setup.model.buffers()])
        _divide(setup.model, ranks, setup.device)
        setup.sharded = True


def _divide(model: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Calls `fully_shard` on every layer, on the embeddings of words, and on the rest together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (ranks.count,))
    words = getattr(unwrap(model), "get_input_embeddings", lambda: None)()
    parts = [part for part in (*stack_of(model).layers, words) if part is not None]
    tied = _tied(model, parts)
    parts = [part for part in parts if tied.isdisjoint(part.parameters())]
    for part in (*parts, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)  # moves it to the device
    if isinstance(words, FSDPModule):
        words.set_unshard_in_backward(False)  # their gradient needs the ids only
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot average
            if device.type == "cpu":  # where live tensors are counted
                _tell_of_weights(part)
    model.register_load_state_dict_pre_hook(_load_parts)  # type: ignore[no-untyped-call]


def _tell_of_weights(part: Any) -> None:
    """Have `fully_shard` say when it gathers weights and drops them: no operator shows it."""

    def telling(weight: Any, change: Callable[[], None]) -> None:
        change()
        for tensor in weight.all_gather_outputs:
            traced_device.resized(tensor)

    for weight in fsdp_weights(part):
        for method in ("alloc_all_gather_outputs", "free_unsharded_param"):
            setattr(weight, method, partial(telling, weight, getattr(weight, method)))


def _tied(model: nn.Module, parts: Sequence[nn.Module]) -> set[Tensor]:
    """Parameters that several parts have, or a part and the rest: those are gathered together."""
    owners: dict[Tensor, set[int]] = {}
    inside = {module: number for number, part in enumerate(parts) for module in part.modules()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(inside.get(module, -1))
    return {parameter for parameter, found in owners.items() if len(found) > 1}


def is_divided(value: Any) -> bool:
    """Whether this is a tensor of which each rank holds a part."""
    return hasattr(value, "full_tensor")


def gathered(state: Any) -> Any:
    """A state with whole tensors on the first rank's host. All ranks must call it."""

    def whole(value: Any) -> Any:
        if not is_divided(value):
            return value
        found = value.full_tensor()
        return found.cpu() if Ranks.here().is_first else None

    return tree_map(whole, state)


def optimizer_parts(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with this rank's parts of whole tensors."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {name: _part_of(value, params[index]) for name, value in values.items()}
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _load_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a divided model loads whole weights."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if (key := prefix + name) in state:
            state[key] = _part_of(state[key], parameter)


def _part_of(value: Any, parameter: Any) -> Any:
    """This rank's part of a tensor that every rank has read, so that nobody sends anything."""
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(value, Tensor) or is_divided(value) or value.shape != parameter.shape:
        return value
    mesh = parameter.device_mesh
    here = value.to(parameter.device)
    return distribute_tensor(here, mesh, parameter.placements, src_data_rank=None)
