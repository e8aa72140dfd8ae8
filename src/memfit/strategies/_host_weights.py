"""Layers whose weights live in host memory and are on the device only while they compute.

forward     layer i computes   |  layer i+1 is fetched   |  the others are on the host
backward    layer i computes   |  layer i-1 is fetched   |  the others are on the host

A layer's weights are one flat tensor on the device, of which the parameters are views. To let it
go its storage is emptied and to have it back filled again, as torch's FSDP does: autograd keeps
views of weights for backward, and these stay valid only if the storage remains the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memfit import traced
from memfit.memory.trace import tensors_in
from memfit.strategies._hosted import Link
from memfit.strategies._layers import Args, Kwargs, wrap

# As the CUDA allocator aligns tensors: a matrix product may choose its kernel by it.
_ALIGNMENT = 512


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
        step = _ALIGNMENT // dtype.itemsize
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
        """Have the weights brought to the device, if they are not there or on their way."""
        if self.is_here:
            return
        for host, flat in self._flats:
            flat.untyped_storage().resize_(host.nbytes)
            traced.resized(flat)
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
    traced.resized(flat)


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
