"""Overrides the Trainer methods that must run under the guard, the optimizer's step included.

State. torch's own optimizers make it in `_init_group` when they first see a gradient; here they see
one that takes no memory, so it is the same state, made by the same code, only earlier.

Update. An operator that finds no memory has written nothing, so it is run again after memory was
given back (out_of_memory.Retrying): what is half done is never left. What the update needs for
itself is as large as the gradients it is given at once; where that much is not free, it is given
fewer at a time. Each parameter's update knows nothing of the others, so the numbers are the same.
That is known of torch's own optimizers; another one may count its steps, or hear of them by hooks,
and is given all gradients in one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel, TrainerCallback
from transformers.optimization import Adafactor
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from memfit.engine.executors import StepExecutor
from memfit.memory.available import CpuReader, CudaReader, Read, Watch
from memfit.memory.cuda_context import take_workspaces
from memfit.memory.out_of_memory import free_memory, retrying
from memfit.text import doing, t
from memfit.training.export import FullPrecisionExport
from memfit.training.guard.rehearsal import Rehearsal, rehearse, seconds_between_steps
from memfit.training.guard.step_guard import Guard
from memfit.training.limits import Cap, CpuCap, CudaCap
from memfit.training.progress import MemfitProgress
from memfit.training.saving import check_savable
from memfit.units import Budget

if TYPE_CHECKING:
    from memfit.planner.plans import Plan

_MARK = "_memfit_careful"

_TEMPORARIES = 2
"""An update makes at most so many tensors as large as the gradients (torch's own: one)."""


def allocate_state(optimizer: Optimizer) -> bool:
    """Make the state that the first step would make; whether this kind can be asked for it."""
    if callable(own := getattr(optimizer, "init_state", None)) and _takes_nothing(own):
        own()
        if (sink := getattr(optimizer, "sink", None)) is not None:
            sink.allocate()
        return True
    initialise = getattr(optimizer, "_init_group", None)
    if initialise is None or type(optimizer).__module__.split(".")[0] != "torch":
        return False
    lists = len(inspect.signature(initialise).parameters) - 1
    for group in optimizer.param_groups:
        with _gradients_of_nothing(group["params"]):
            initialise(group, *([] for _ in range(lists)))
    return True


def _takes_nothing(method: Callable[..., Any]) -> bool:
    return not inspect.signature(method).parameters


class _gradients_of_nothing:  # noqa: N801 - reads as a context
    """Zero gradients that all share one element, for parameters that learn and have none."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._given = [p for p in parameters if p.requires_grad and p.grad is None]

    def __enter__(self) -> None:
        for p in self._given:
            p.grad = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)

    def __exit__(self, *_: object) -> None:
        for p in self._given:
            p.grad = None


def careful(
    optimizer: Optimizer,
    device: torch.device,
    room_bytes: Callable[[], int | None],
    last_resort: Callable[[], None] | None = None,
) -> None:
    """Have this optimizer's step finished once begun; `room_bytes` is what is free for it.

    `last_resort` gives back what is only held to be faster (out_of_memory.retrying).
    """
    if isinstance(optimizer, AcceleratedOptimizer):  # of a trainer that has trained before
        optimizer = optimizer.optimizer
    if hasattr(optimizer, _MARK):
        return
    # A bound method, as the learning rate's schedule wants to find it.
    plain = optimizer.step

    @functools.wraps(plain)
    def step(self: Optimizer, closure: Any = None, **named: Any) -> Any:
        # A closure wants all gradients at once. A fused kernel needs nothing for itself.
        whole = closure is not None or self.defaults.get("fused") or not _splits(self)
        with retrying(device, last_resort=last_resort):
            parts = [] if whole else list(_parts(self, room_bytes()))
            if len(parts) <= 1:
                return plain(closure, **named) if closure is not None else plain(**named)
            for shown in parts:
                with _only(shown, parts):
                    plain(**named)
            return None

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    setattr(optimizer, _MARK, True)


def _splits(optimizer: Optimizer) -> bool:
    """Whether several calls of its step, each on some parameters, make the same update as one."""
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim.") or kind is Adafactor
    heard = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return known and not heard


def _parts(optimizer: Optimizer, room_bytes: int | None) -> Iterator[list[Tensor]]:
    """The parameters to update together, so that what this needs is free."""
    ready = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if room_bytes is None:
        yield ready
        return
    part: list[Tensor] = []
    size_bytes = 0
    for p in ready:
        needs = _TEMPORARIES * p.numel() * max(p.element_size(), 4)
        if part and size_bytes + needs > room_bytes:
            yield part
            part, size_bytes = [], 0
        part.append(p)
        size_bytes += needs
    yield part


class _only:  # noqa: N801 - reads as a context
    """Hides the gradients of all other parts: an optimizer leaves parameters without one alone."""

    def __init__(self, shown: list[Tensor], parts: list[list[Tensor]]) -> None:
        self._hidden = [(p, p.grad) for part in parts if part is not shown for p in part]

    def __enter__(self) -> None:
        for p, _ in self._hidden:
            p.grad = None

    def __exit__(self, *_: object) -> None:
        for p, gradient in self._hidden:
            p.grad = gradient


class GuardedTraining(FullPrecisionExport):
    """What BudgetTrainer adds around steps, updates and evaluations."""

    model: PreTrainedModel
    guard: Guard
    executor: StepExecutor
    budget: Budget | None
    plan: Plan | None
    may_plan_again: bool = False
    """Whether a plan whose rehearsal fails is to be given up, not adjusted: another can be made."""
    rehearsal: Rehearsal | None = None
    """What the largest batch showed before the first step."""
    checkpoint_bytes: int = 0
    """What a checkpoint takes on the disk, known before the first step; 0 where none is written."""
    _cap: Cap | None = None

    def evaluating_executor(self) -> StepExecutor:
        """How a batch is cut to be predicted."""
        return self.executor

    def guard_training(self) -> None:
        """Begin, once the executor is made."""
        # First of all callbacks: what it finds out is what the others announce.
        self.callback_handler.callbacks.insert(0, _BeforeTraining(self))
        # Imported here: it reads the progress bar's meter, and stands beside the runtime.
        from memfit.training import progress

        progress.register_memory_logging(self, self.budget)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As the Trainer's, inside the budget."""
        with contextlib.ExitStack() as around:
            for context in self.setup.around_training:
                around.enter_context(context())
            around.enter_context(self.guard.held(*self._limits()))
            # Graphs hold the libraries' workspaces by their addresses, and memory.
            around.callback(self._drop_graphs)
            return super().train(*args, **kwargs)

    def _drop_graphs(self) -> None:
        with contextlib.suppress(RuntimeError):  # of a card that no longer answers
            self.executor.drop()

    def make_room(self) -> None:
        """Give back the graphs and what the allocator keeps."""
        self._drop_graphs()
        free_memory(self.args.device)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As the Trainer's, inside the budget."""
        loader: Any = kwargs.get("dataloader", args[0] if args else None)
        rows = len(loader.dataset) if hasattr(getattr(loader, "dataset", None), "__len__") else 0
        said = t("evaluating {rows} rows …", rows=f"{rows:,}")
        with self.guard.held(*self._limits()), doing(said):
            return super().evaluation_loop(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As the Trainer's; a step that has begun is finished."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        # A trainer that trains once more has the one that accelerate wrapped.
        inner = getattr(optimizer, "optimizer", optimizer)
        careful(inner, self.args.device, self._room_bytes, self._drop_graphs)
        return optimizer

    def _clip_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        with retrying(self.args.device, last_resort=self._drop_graphs):
            return super()._clip_grad_norm(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        with retrying(self.args.device, last_resort=self._drop_graphs):
            return super()._get_grad_norm(*args, **kwargs)

    def prepare_steps(self, loader: Any) -> None:
        """All that is done between loading and the first step."""
        optimizer: Any = self.optimizer
        if optimizer is not None:
            allocate_state(getattr(optimizer, "optimizer", optimizer))
        if self.args.should_save:
            self.checkpoint_bytes = check_savable(self)
        if self.args.device.type == "cuda":
            self.executor.drop()
            with self.executor.on_stream():
                take_workspaces(self.args.device)
            self.guard.measure()
        self.guard.watch_layers()
        bars = [bar for bar in self.callback_handler.callbacks if isinstance(bar, MemfitProgress)]
        if bars:
            self.guard.adjustments.say = bars[0].say
        if self.budget is None or self.args.torch_compile or self.args.world_size > 1:
            return  # a compiled step wants the same shapes, and ranks want to fail together
        with doing(t("compiling, capturing and trying the largest batch …")):
            self.rehearsal = rehearse(self, loader)
        for bar in bars:
            if self.rehearsal is not None and bar.step_seconds is None:
                bar.step_seconds = self.rehearsal.step_seconds
                bar.between_seconds = (
                    seconds_between_steps(self, bar.step_seconds) + self.rehearsal.capture_seconds
                )

    def _room_bytes(self) -> int | None:
        return None if self.guard.cap is None else self.guard.cap.room_bytes()

    def _limits(self) -> tuple[Cap | None, Watch]:
        """The cap where a budget was given; what is free is watched in any case."""
        on_cuda = self.args.device.type == "cuda"
        if self.budget is not None and self._cap is None:
            tensors = self.guard.standing_tensors
            self._cap = CudaCap(self._reader()) if on_cuda else CpuCap(tensors)
        read: Read
        if self._cap is not None:
            read = self._cap.read
        else:
            read = self._reader() if on_cuda else CpuReader(lambda: 0)
        is_auto = self.budget == Budget()
        return self._cap, Watch(self.budget or Budget(), read, every_step=is_auto)

    def _reader(self) -> CudaReader:
        expected_bytes = None if self.plan is None else self.plan.context_bytes
        return CudaReader(self.args.device, expected_bytes, self.guard.used_strategies)


class _BeforeTraining(TrainerCallback):
    """Rehearses when everything is loaded and nothing has begun."""

    def __init__(self, trainer: GuardedTraining) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **parts: Any) -> None:
        """Called by the Trainer."""
        self._trainer.prepare_steps(parts.get("train_dataloader"))
