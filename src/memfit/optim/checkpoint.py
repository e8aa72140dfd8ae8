"""Saving and loading the low-bit optimizer bit for bit, and fp32 masters for the final model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memfit.optim.formats import join_master
from memfit.optim.layout import flat
from memfit.optim.pinned import apart
from memfit.optim.small import fp32_of

if TYPE_CHECKING:
    from memfit.optim.adamw import LowBitAdamW

_VERSION = 1


def own_state(optimizer: LowBitAdamW) -> dict[str, Any]:
    """What torch's state dict has no place for."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    own: dict[str, Any] = {
        "format": _format(optimizer),
        "born": [optimizer.born_of(p) for p in params],
        "clock": optimizer.clock.state_dict(),
    }
    if optimizer.sink is not None:
        own["sink"] = optimizer.sink.state_dict()
    return own


def stored_apart(state: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """The same state without a copy, no two host tensors in one storage: torch.save takes it."""
    return {
        index: {name: apart(value) if value.is_cpu else value for name, value in entry.items()}
        for index, entry in state.items()
    }


def _format(optimizer: LowBitAdamW) -> dict[str, int]:
    return {
        "version": _VERSION,
        "master_bits": optimizer.master_bits,
        "block": optimizer.block,
        "small_numel": optimizer.small_numel,
    }


def load(
    optimizer: LowBitAdamW,
    state_dict: Mapping[str, Any],
    load_groups: Callable[[dict[str, Any]], None],
) -> None:
    """Restore groups through torch, state and clock by plain copies that keep every dtype.

    Copies go into the tensors that are there, so that a captured graph stays valid and
    resuming needs no second copy of the state on the device.
    """
    own = state_dict.get("memfit")
    if own is None:
        raise ValueError(
            "this optimizer state was not saved by LowBitAdamW; start without it, "
            "or resume with the optimizer that wrote it"
        )
    if own["format"] != _format(optimizer):
        raise ValueError(
            f"the saved optimizer state is {own['format']}, this run's is {_format(optimizer)}; "
            "resume with the settings it was saved with"
        )
    kept = optimizer.state
    rest = {k: v for k, v in state_dict.items() if k != "memfit"}
    load_groups({**rest, "state": {}})
    optimizer.state = kept
    _match_born(optimizer, own["born"])
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for index, saved in state_dict["state"].items():
        for name, value in saved.items():
            _copy(optimizer.state[params[index]][name], value, name)
    optimizer.clock.load_state_dict(own["clock"])
    if optimizer.sink is not None and "sink" in own:
        optimizer.sink.load_state_dict(own["sink"])


def _match_born(optimizer: LowBitAdamW, born: list[int | None]) -> None:
    """State for exactly the parameters that had it, each with its age."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if [optimizer.born_of(p) for p in params] == born:
        return
    optimizer.forget_state()
    ages = dict(zip(params, born, strict=True))
    for index, group in enumerate(optimizer.param_groups):
        for age in sorted({a for p in group["params"] if (a := ages[p]) is not None}):
            members = [p for p in group["params"] if ages[p] == age]
            optimizer.init_group(index, members, born=age)


def _copy(target: Tensor, value: Tensor, name: str) -> None:
    if target.dtype != value.dtype or target.shape != value.shape:
        raise ValueError(
            f"the saved {name!r} is {value.dtype} {tuple(value.shape)}, "
            f"this model needs {target.dtype} {tuple(target.shape)}"
        )
    target.copy_(value)


@torch.no_grad()
def fp32_state_dict(
    optimizer: LowBitAdamW, model: nn.Module, device: torch.device
) -> dict[str, Tensor]:
    """Masters for trained parameters, plain casts for the rest; joined on `device`, one by one."""
    result: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        tensor = value.detach().to(device)
        if value.dtype in (torch.bfloat16, torch.float16):
            tensor = _master(optimizer, value, tensor, device)
        result[name] = tensor
    return result


def _master(optimizer: LowBitAdamW, param: Tensor, moved: Tensor, device: torch.device) -> Tensor:
    state = optimizer.state.get(param, {})
    if "remainder" in state:
        return fp32_of(moved, state["remainder"].to(device))
    if "correction" in state:
        return join_master(flat(moved), state["correction"].to(device)).view(moved.shape)
    return moved.float()
