"""AdamW in five bytes a parameter, or four: a `torch.optim.Optimizer`, saved bit for bit.

    master_bits   weight + correction + m + v      bytes a parameter
    24            2 + 1 + 1 + 1                    5.03   updates far below a bf16 step add up
    16            2 + 0 + 1 + 1                    4.03   the weight is rounded stochastically

The 0.03 are the moments' scales. Small parameters keep fp32 state (small_parameters.py). Where
gradients come from and when the update runs is the sink's business (gradient_sinks.py); without
one, `.step()` reads `.grad` like any optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.strategies.lowbit.lowbit_kernels import (
    BLOCK,
    SMALL_NUMEL,
    SMALL_STATE_BYTES,
    CodedGradient,
    LowBitState,
    StepScalars,
    blocks_of,
    flat,
    pick_kernels,
)
from memfit.strategies.lowbit.number_formats import PIECE, Remainders, join_master
from memfit.strategies.lowbit.small_parameters import SmallParameters, fp32_of
from memfit.strategies.lowbit.step_scalars import StepClock
from memfit.strategies.offload.host_memory import HostMemory, apart

if TYPE_CHECKING:
    from memfit.strategies.lowbit.gradient_sinks import LowBitSink

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_VERSION = 1
"""Of the saved state."""


class LowBitOptimizer(Optimizer):
    """AdamW with split master weights and 8-bit moments.

    Everything that changes from step to step (learning rate, step count, clipping, noise)
    is read from the device, so a captured CUDA graph of the step replays right as long as
    `prepare_step()` is called before each replay.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 2e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        master_bits: int = 24,
        block: int = BLOCK,
        small_numel: int = SMALL_NUMEL,
        seed: int = 0,
        remainders: Remainders | None = None,
        backend: str = "auto",
        state_on_host: bool = False,
        gradients_on_host: bool = False,
    ) -> None:
        if master_bits not in (16, 24):
            raise ValueError(f"master_bits must be 24 or 16, not {master_bits}")
        if block < 16 or block > 1024 or block & (block - 1):
            raise ValueError(f"block must be a power of two from 16 to 1024, not {block}")
        if remainders is not None and remainders.small_numel != small_numel:
            raise ValueError("to_lowbit and LowBitAdamW were given different small_numel")
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"lr {lr}, betas {betas}, eps {eps}, weight_decay {weight_decay}?")
        self.master_bits, self.block, self.small_numel = master_bits, block, small_numel
        self.backend = backend
        self.state_on_host, self.gradients_on_host = state_on_host, gradients_on_host
        self._host_memory: HostMemory | None = None
        self.seed = seed
        self._remainders = remainders
        self._clock: StepClock | None = None
        self._rows: list[dict[str, int]] = []
        self._row_of: dict[Tensor, int] = {}
        self._stream_of: dict[Tensor, int] = {}
        self._small: list[SmallParameters] = []
        self._small_set: set[Tensor] = set()
        self._complete = False
        self.stepping = False
        self.is_shut = False
        """Whether steps are computed without effect now."""
        self.sink: LowBitSink | None = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    # -------------------------------------------------------------------- building state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the new parameters' state is made before their first step."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dtype not in _DTYPES:
                raise ValueError(f"cannot train a parameter of dtype {p.dtype}")
            self._stream_of[p] = len(self._stream_of)
        self._complete = False

    def init_state(self) -> None:
        """Make the state of every trained parameter that has none yet, on its device."""
        if self._complete:
            return
        born = None if self._rows else 0  # a latecomer's moments are as young as it is
        for index, group in enumerate(self.param_groups):
            fresh = [p for p in group["params"] if p.requires_grad and p not in self._row_of]
            if fresh:
                self.init_group(index, fresh, born)
        self._complete = True

    def init_group(self, index: int, params: list[Tensor], born: int | None = None) -> None:
        clock = self.clock
        if born is None:
            born = int(clock.counters[0]) - self.stepping if self._rows else 0
        row = clock.add_row(born)
        self._rows.append({"group": index, "born": born})
        small: dict[torch.dtype, list[Tensor]] = {}
        for p in params:
            self._row_of[p] = row
            if p.numel() <= self.small_numel:
                small.setdefault(p.dtype, []).append(p)
            else:
                self._init_large(p)
        for members in small.values():
            self._init_small(members, row)

    def _init_large(self, p: Tensor) -> None:
        blocks = blocks_of(p.numel(), self.block)
        state: dict[str, Tensor] = {}
        kept = None if self._remainders is None else self._remainders.pop_correction(p)
        if self.master_bits == 24 and p.dtype != torch.float32:
            state["correction"] = self._zeros(p, torch.int8)
            if kept is not None:
                state["correction"].copy_(kept.view(-1))
        state["moment1"] = self._zeros(p, torch.int8)
        state["scale1"] = torch.zeros(blocks, device=p.device)
        state["moment2"] = self._zeros(p, torch.uint8)
        state["scale2"] = torch.zeros(blocks, device=p.device)
        self.state[p].update(state)

    def _zeros(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        """State for every element of a parameter, where this optimizer's state lies."""
        if self.state_on_host:
            if self._host_memory is None:
                self._host_memory = HostMemory(p.device)
            return self._host_memory.zeros(p.numel(), dtype)
        return torch.zeros(p.numel(), dtype=dtype, device=p.device)

    def born_of(self, p: Tensor) -> int | None:
        """After which step a parameter's state was made, if it was."""
        return self._rows[self._row_of[p]]["born"] if p in self._row_of else None

    def _init_small(self, params: list[Tensor], row: int) -> None:
        arena = SmallParameters(params, row)
        for index, p in enumerate(params):
            self.state[p].update(arena.state_of(index))
            kept = None if self._remainders is None else self._remainders.pop_small(p)
            if kept is not None:
                self.state[p]["remainder"].copy_(kept.view(p.shape))
        self._small.append(arena)
        self._small_set.update(params)

    @property
    def clock(self) -> StepClock:
        """The step's numbers, made on the parameters' device when first needed."""
        if self._clock is None:
            devices = {p.device for g in self.param_groups for p in g["params"]}
            if len(devices) > 1:
                raise ValueError(f"parameters lie on several devices: {sorted(map(str, devices))}")
            device = devices.pop()
            self._clock = StepClock(device, self.seed)
            self.grad_scale = torch.ones((), device=device)
            self.gate = torch.ones((), dtype=torch.bool, device=device)
            self.open = torch.ones((), dtype=torch.bool, device=device)
        return self._clock

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Inside, whole steps are computed and change no weight and no state.

        The gate is read on the device, so this holds for steps that graphs replay, too.
        """
        counters = self.clock.counters.clone()
        self.is_shut = True
        self.open.fill_(False)
        self.gate.fill_(False)
        try:
            yield
        finally:
            self.is_shut = False
            self.open.fill_(True)
            self.gate.fill_(True)
            self.clock.counters.copy_(counters)

    # ------------------------------------------------------------------------- stepping

    def prepare_step(self, *, first: bool = True) -> None:
        """Bring what the host decides (learning rates, decay) to the device.

        A sink's `prepare` calls it, before each replay of a captured graph; while one is
        captured it does nothing. `first`: the step's first micro-batch follows.
        """
        if self.clock.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        self.init_state()
        rows = [self.param_groups[row["group"]] for row in self._rows]
        self.clock.write(rows, first=first)

    def begin_step(self) -> None:
        """Count the step (or one micro-batch of it) on the device, before its first update."""
        self.clock.advance()
        self.stepping = True

    def ensure_state(self, p: Tensor) -> None:
        """Make the state of a parameter that was frozen when the others' was made."""
        if p not in self._row_of:
            self._complete = False
            self.prepare_step()
            if self.stepping:
                self.clock.derive()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Finish the step; what that means is the sink's business."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.sink is None:
            from memfit.strategies.lowbit.gradient_sinks import KeptGradients

            KeptGradients(self)
        assert self.sink is not None
        self.sink.finish()
        self.stepping = False
        return loss

    def scalars(self) -> StepScalars:
        """What the kernels read from the device."""
        return StepScalars(self.clock.hyper, self.clock.key, self.grad_scale, self.gate)

    @property
    def small(self) -> list[SmallParameters]:
        """The small parameters, flat."""
        return self._small

    @property
    def large(self) -> list[Tensor]:
        """The parameters with 8-bit state, in order."""
        return [p for p in self._row_of if p not in self._small_set]

    def is_small(self, p: Tensor) -> bool:
        """Whether this parameter keeps fp32 state."""
        return p in self._small_set

    def stream_of(self, p: Tensor) -> int:
        """The number of a parameter's noise."""
        return self._stream_of[p]

    def lowbit_state(self, p: Tensor) -> LowBitState:
        """A large parameter and its state, flat."""
        state = self.state[p]
        return LowBitState(
            weight=flat(p),
            correction=state.get("correction"),
            moment1=state["moment1"],
            scale1=state["scale1"],
            moment2=state["moment2"],
            scale2=state["scale2"],
            stream=self._stream_of[p],
            row=self._row_of[p],
            block=self.block,
            hosted=self.state_on_host,
        )

    @torch.no_grad()
    def update(self, p: Tensor, grad: Tensor | CodedGradient, start: int = 0) -> None:
        """Step one large parameter (elements `start` onwards) with this gradient."""
        kernels = pick_kernels(self.backend, p)
        kernels.update(self.lowbit_state(p), grad, self.scalars(), start)

    @torch.no_grad()
    def update_many(self, work: list[tuple[Tensor, Tensor | CodedGradient]]) -> None:
        """Step several large parameters in few launches."""
        if work:
            kernels = pick_kernels(self.backend, work[0][0])
            states = [(self.lowbit_state(p), grad) for p, grad in work]
            kernels.update_many(states, self.scalars())

    # ------------------------------------------------------------ saving and exporting

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, those that do not learn included, in the groups' order."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def _format(self) -> dict[str, int]:
        return {
            "version": _VERSION,
            "master_bits": self.master_bits,
            "block": self.block,
            "small_numel": self.small_numel,
        }

    def state_dict(self) -> dict[str, Any]:
        """torch's, with the clock and the loss scale under "memfit"."""
        self._wait_for_host()
        packed = super().state_dict()
        if self.state_on_host:
            # torch.save takes no two host tensors in one storage.
            packed["state"] = {
                index: {name: apart(one) if one.is_cpu else one for name, one in entry.items()}
                for index, entry in packed["state"].items()
            }
        own: dict[str, Any] = {
            "format": self._format,
            "born": [self.born_of(p) for p in self.parameters],
            "clock": self.clock.state_dict(),
        }
        if self.sink is not None:
            own["sink"] = self.sink.state_dict()
        return {**packed, "memfit": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores groups through torch, state and clock by plain copies that keep every dtype.

        Copies go into the tensors that are there, so that a captured graph stays valid and
        resuming needs no second copy of the state on the device.
        """
        self._wait_for_host()
        own = state_dict.get("memfit")
        if own is None:
            raise ValueError(
                "this optimizer state was not saved by LowBitAdamW; start without it, "
                "or resume with the optimizer that wrote it"
            )
        if own["format"] != self._format:
            raise ValueError(
                f"the saved optimizer state is {own['format']}, this run's is {self._format}; "
                "resume with the settings it was saved with"
            )
        kept = self.state
        rest = {k: v for k, v in state_dict.items() if k != "memfit"}
        super().load_state_dict({**rest, "state": {}})
        self.state = kept
        params = self.parameters
        if [self.born_of(p) for p in params] != own["born"]:
            self._rebuild_state(dict(zip(params, own["born"], strict=True)))
        for index, saved in state_dict["state"].items():
            for name, value in saved.items():
                target = self.state[params[index]][name]
                if target.dtype != value.dtype or target.shape != value.shape:
                    raise ValueError(
                        f"the saved {name!r} is {value.dtype} {tuple(value.shape)}, "
                        f"this model needs {target.dtype} {tuple(target.shape)}"
                    )
                target.copy_(value)
        self.clock.load_state_dict(own["clock"])
        if self.sink is not None and "sink" in own:
            self.sink.load_state_dict(own["sink"])

    def _rebuild_state(self, ages: Mapping[Tensor, int | None]) -> None:
        """Makes state for exactly the parameters that had it, each with its age."""
        self._clock, self._complete, self._host_memory = None, False, None
        for kept in (self.state, self._rows, self._row_of, self._small, self._small_set):
            kept.clear()
        for index, group in enumerate(self.param_groups):
            for age in sorted({a for p in group["params"] if (a := ages[p]) is not None}):
                self.init_group(index, [p for p in group["params"] if ages[p] == age], born=age)

    @torch.no_grad()
    def fp32_state_dict(
        self, model: nn.Module, device: str | torch.device = "cpu"
    ) -> dict[str, Tensor]:
        """The model's state dict with fp32 masters in place of bf16 or fp16 weights."""
        self._wait_for_host()
        device, found = torch.device(device), {}
        for name, param in model.state_dict(keep_vars=True).items():
            state, weight = self.state.get(param, {}), param.detach()
            if param.dtype not in (torch.bfloat16, torch.float16):
                found[name] = weight.to(device)
            elif "correction" in state:
                try:
                    found[name] = _joined(weight, state["correction"], device)
                except torch.OutOfMemoryError:  # another program has taken what was free
                    there = weight.to(device), state["correction"].to(device)
                    found[name] = _joined(*there, device)
            elif "remainder" in state:
                found[name] = fp32_of(weight.to(device), state["remainder"].to(device))
            else:
                found[name] = weight.to(device).float()
        return found

    def _wait_for_host(self) -> None:
        """Kernels write state in host memory whenever they get to it."""
        if self.state_on_host and self.clock.device.type == "cuda":
            torch.cuda.synchronize(self.clock.device)

    def state_bytes(self) -> int:
        """Bytes of the state that exists now; the weights are not counted."""
        arenas = SMALL_STATE_BYTES * sum(arena.grad.numel() for arena in self._small)
        large: list[Tensor] = [t for p in self.large for t in self.state[p].values()]
        return arenas + sum(t.numel() * t.element_size() for t in large)


def _joined(weight: Tensor, correction: Tensor, device: torch.device) -> Tensor:
    """Joined where the weight lies, a piece at a time: the whole crosses to `device` once."""
    master = torch.empty(weight.numel(), dtype=torch.float32, device=device)
    pieces = (torch.split(part, PIECE) for part in (master, flat(weight), correction))
    for full, low, rest in zip(*pieces, strict=True):
        full.copy_(join_master(low, rest.to(low.device)))
    return master.view(weight.shape)
