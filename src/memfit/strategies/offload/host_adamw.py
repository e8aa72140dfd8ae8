"""AdamW in host memory: gradients go there as backward makes them, new weights come back.

Two ways were weighed. Streaming the state (12 bytes a parameter, down and up again every step)
leaves the update to the card but fills the bus; updating on the CPU sends the gradient and the
weight, 4 bytes a parameter in bf16 and 8 in fp32. Small cards sit on narrow buses, so the CPU
does it, with torch's fused AdamW. And only this way gradients need no memory on the card, while
the global norm and the sum over micro-batches stay what they are: the update is AdamW's own.

Only the slots that copies pass through are pinned. State and gradients never travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.utils.hooks import RemovableHandle

from memfit.engine.step_state import on_gradient
from memfit.memory.tracing import traced_device
from memfit.strategies.offload.host_memory import Link, Staging

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_BUCKET_ELEMENTS = 1 << 22
"""Parameters are updated in groups of about this size: one travels while the next is computed."""


class Masters:
    """fp32 weights of parameters that were stored in fewer bits, until an update takes them."""

    def __init__(self) -> None:
        self._kept: dict[Tensor, tuple[int, Tensor]] = {}

    def keep(self, p: Tensor, master: Tensor) -> None:
        """Keeps the parameter's master, valid until the parameter is changed from outside."""
        self._kept[p] = (p._version, master)

    def forget(self, p: Tensor) -> None:
        """Its own weights are all there is to know."""
        self._kept.pop(p, None)

    def of(self, p: Tensor) -> Tensor | None:
        """Its fp32 weights; None where another value was loaded into it meanwhile."""
        version, master = self._kept.get(p, (-1, None))
        return master if version == p._version else None


class Hosted:
    """One parameter's fp32 weights and gradient on the host; both flat."""

    def __init__(self, parameter: Tensor, master: Tensor | None, home: Tensor | None) -> None:
        self.parameter = parameter
        self.home = home
        """Where the weights live, if that is the host as well."""
        self.weights = self._own_weights() if master is None else master.flatten()
        self.gradient: Tensor | None = None
        self.has_gradient = False
        self._seen = self._fingerprint()

    def _fingerprint(self) -> tuple[int, int]:
        # Weights that live on the host are somewhere else on the device each time.
        is_here = self.home is None and traced_device.device() is None
        address = self.parameter.data_ptr() if is_here else 0
        return address, self.parameter._version

    def _own_weights(self) -> Tensor:
        if self.home is not None and self.home.dtype == torch.float32:
            return self.home  # updated where they are
        source = self.parameter.detach() if self.home is None else self.home
        return source.to("cpu", torch.float32, copy=True).flatten()

    def add(self, first: bool, start: int, piece: Tensor) -> None:
        """Take in a piece of a gradient that has arrived."""
        if self.gradient is None:
            with traced_device.on_host():
                self.gradient = torch.empty_like(self.weights)
        target = self.gradient[start : start + piece.numel()]
        if first:
            target.copy_(piece)
        else:
            target.add_(piece)

    @property
    def is_current(self) -> bool:
        """Whether the parameter has not been changed from outside since the last step."""
        return self._fingerprint() == self._seen

    def refresh(self) -> None:
        """Takes over weights that were changed from outside, as by a loaded checkpoint."""
        if not self.is_current:
            source = self.parameter.detach().flatten() if self.home is None else self.home
            self.weights.copy_(source)
            self._seen = self._fingerprint()

    def return_to(self, staging: Staging) -> None:
        """Bring the new weights to where the model reads them."""
        if self.home is not None:
            if self.weights is not self.home:
                self.home.copy_(self.weights)
            return
        parameter = self.parameter.detach()
        if parameter.is_contiguous():
            staging.up(self.weights, parameter.view(-1))
        else:
            parameter.copy_(self.weights.view(parameter.shape))

    def settle(self) -> None:
        """Ends the step; later changes of the weights come from outside."""
        self.has_gradient = False
        self._seen = self._fingerprint()


class HostAdamW(Optimizer):
    """AdamW whose state, master weights and gradients are in host memory.

    Its checkpoints are those of `torch.optim.AdamW`, with a `master` where the model's weights
    are not fp32. `measure()` clips and returns the global norm, adding up in the `order` of the
    model; `step()` calls it if nobody did.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        link: Link,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_grad_norm: float = 0.0,
        masters: Masters | None = None,
        homes: Mapping[Tensor, Tensor] | None = None,
        order: Iterable[Tensor] = (),
        before_step: Callable[[], None] | None = None,
    ) -> None:
        self._link = link
        self._staging = Staging(link)
        self._masters = Masters() if masters is None else masters
        self._homes = dict(homes or {})
        self._order = list(order)
        self._before_step = before_step
        self._max_grad_norm = max_grad_norm
        self._hosted: dict[Tensor, Hosted] = {}
        self._handles: list[RemovableHandle] = []
        self.norm: Tensor | None = None
        """The global norm of this step's gradient before clipping, once it is known."""
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    # ---- gradients ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the parameters' gradients go to the host from now on."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dtype not in _DTYPES:
                raise ValueError(f"weights of {p.dtype} have no fp32 master on the host")
            self._handles.append(on_gradient(p, self._arrived))

    def remove(self) -> None:
        """Leave gradients alone from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        # What was trained is what the parameters stand for from here on.
        for p in list(self._hosted):
            if (master := self._master_of(p)) is None:
                self._masters.forget(p)
            else:
                self._masters.keep(p, master)

    @torch.no_grad()
    def _arrived(self, p: Tensor) -> None:
        assert p.grad is not None
        gradient, p.grad = p.grad, None
        hosted = self._host(p)
        first, hosted.has_gradient = not hosted.has_gradient, True
        self.norm = None

        def deliver(start: int, piece: Tensor) -> None:
            hosted.add(first, start, piece)

        self._staging.down(gradient.reshape(-1), deliver)

    def init_state(self) -> None:
        """Make all state on the host, which the first gradients would make."""
        with torch.no_grad():
            for p in self._parameters():
                if p.requires_grad:
                    hosted = self._host(p)
                    with traced_device.on_host():
                        self._state_of(hosted)

    def _host(self, p: Tensor) -> Hosted:
        if p not in self._hosted:
            with traced_device.on_host():
                self._hosted[p] = Hosted(p, self._master_of(p), self._homes.get(p))
        return self._hosted[p]

    def _master_of(self, p: Tensor) -> Tensor | None:
        """The fp32 weights of a parameter; None where its own are all there is to know."""
        if (hosted := self._hosted.get(p)) is not None:
            return hosted.weights if hosted.is_current else None
        loaded = self.state.get(p, {}).get("master")
        if loaded is None:
            return self._masters.of(p)
        home = self._homes.get(p)
        return _standing_for(p.detach().flatten() if home is None else home, loaded.flatten())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; gradients on the host are dropped too."""
        super().zero_grad(set_to_none)
        self._staging.flush()
        for hosted in self._hosted.values():
            hosted.has_gradient = False
        self.norm = None

    @torch.no_grad()
    def measure(self) -> Tensor:
        """All gradients are in: clip them by their global norm, once, and return that norm."""
        if self.norm is None:
            self._staging.flush()
            gradients = list(self._gradients())
            with traced_device.on_host():
                self.norm = torch.nn.utils.get_total_norm(gradients)
                if self._max_grad_norm > 0 and gradients:
                    factor = (self._max_grad_norm / (self.norm + 1e-6)).clamp(max=1.0)
                    torch._foreach_mul_(gradients, factor)
        return self.norm

    def _gradients(self) -> Iterator[Tensor]:
        """In the model's order, where it is known: the norm is then the stock one to the bit."""
        for p in self._order or self._parameters():
            hosted = self._hosted.get(p)
            if hosted is not None and hosted.has_gradient and hosted.gradient is not None:
                yield hosted.gradient

    # ---- the update ----

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """AdamW on the CPU; the new weights travel while the next ones are computed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.measure()
        if self._before_step is not None:
            self._before_step()
        for group in self.param_groups:
            ready = (self._hosted[p] for p in group["params"] if p in self._hosted)
            for bucket in _buckets(hosted for hosted in ready if hosted.has_gradient):
                with traced_device.on_host():
                    self._update(group, bucket)
                for hosted in bucket:
                    hosted.return_to(self._staging)
        # What is computed next reads weights that may still be on their way.
        self._link.wait(self._link.mark())
        for hosted in self._hosted.values():
            if hosted.has_gradient:
                hosted.settle()
        self.norm = None
        return loss

    def _update(self, group: dict[str, Any], bucket: list[Hosted]) -> None:
        states = [self._state_of(hosted) for hosted in bucket]
        for hosted in bucket:
            hosted.refresh()
        beta1, beta2 = group["betas"]
        adamw(
            [hosted.weights for hosted in bucket],
            [hosted.gradient for hosted in bucket],  # type: ignore[misc]
            [state["exp_avg"].view(-1) for state in states],
            [state["exp_avg_sq"].view(-1) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _state_of(self, hosted: Hosted) -> dict[str, Any]:
        p = hosted.parameter
        state: dict[str, Any] = self.state[p]
        if "step" not in state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros(p.shape)
            state["exp_avg_sq"] = torch.zeros(p.shape)
        if p.dtype != torch.float32:
            state["master"] = hosted.weights.view(p.shape)
        return state

    # ---- saving ----

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As in torch, but the state stays fp32 and on the host, whatever the parameter is."""
        saved = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        self.zero_grad()
        for p, hosted in self._hosted.items():
            # Weights in fp32 are their own masters; others may have been loaded just before this.
            if p.dtype != torch.float32 and hosted.is_current:
                self._masters.keep(p, hosted.weights)
        self._hosted.clear()
        self.state.clear()
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, p in zip(numbers, self._parameters(), strict=True):
            values = saved.get(number, {})
            for name, value in values.items():
                tensor = torch.as_tensor(value)
                self.state[p][name] = tensor.detach().to("cpu", torch.float32, copy=True)
            if p.dtype != torch.float32 and values and "master" not in values:
                raise ValueError("the saved optimizer state has no master weights for this model's")

    def fp32_state_dict(
        self, model: nn.Module, device: str | torch.device = "cpu"
    ) -> dict[str, Tensor]:
        """The model's state dict with the fp32 masters in place of weights in half precision."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        result = {}
        for name, value in model.state_dict().items():
            if value.dtype in (torch.bfloat16, torch.float16):
                master = self._master_of(parameters.get(name, value))
                value = (value if master is None else master.view(value.shape)).float()
            result[name] = value.detach().to(device)
        return result

    def _parameters(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)


def _standing_for(weights: Tensor, master: Tensor) -> Tensor:
    """A master where it rounds to the weights that are there, else these weights themselves."""
    weights = weights.cpu()
    agrees = master.to(weights.dtype) == weights
    return master if bool(agrees.all()) else torch.where(agrees, master, weights.float())


def _buckets(members: Iterable[Hosted]) -> Iterator[list[Hosted]]:
    bucket: list[Hosted] = []
    for hosted in members:
        bucket.append(hosted)
        if sum(one.weights.numel() for one in bucket) >= _BUCKET_ELEMENTS:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
