"""A Trainer whose steps stay inside a budget: guard.py runs them, this puts it in their way."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from memfit.messages import t
from memfit.runtime.cap import Cap, CpuCap, CudaCap
from memfit.runtime.duration import seconds_between_steps
from memfit.runtime.export import FullPrecisionExport
from memfit.runtime.guard import Guard
from memfit.runtime.libraries import take_workspaces
from memfit.runtime.out_of_memory import free_memory, retrying
from memfit.runtime.progress import MemfitProgress
from memfit.runtime.rehearsal import Rehearsal, rehearse
from memfit.runtime.savable import check_savable
from memfit.runtime.step import StepExecutor
from memfit.runtime.updates import allocate_state, careful
from memfit.runtime.watch import CpuReader, CudaReader, Read, Watch
from memfit.units import Budget
from memfit.waiting import doing

if TYPE_CHECKING:
    from memfit.planner.plan import Plan


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

    def guard_training(self, used: frozenset[str], *, keeps_plan: bool) -> None:
        """Begin, once the executor is made; `used` are the names of the strategies."""
        self._used = used
        self.guard = Guard(self, used)
        self.guard.adjuster.keeps_plan = keeps_plan
        # First of all callbacks: what it finds out is what the others announce.
        self.callback_handler.callbacks.insert(0, _BeforeTraining(self))
        # Imported here: it reads the progress bar's meter, and stands beside the runtime.
        from memfit import memory_logging

        memory_logging.register(self, self.budget)

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
        return CudaReader(self.args.device, expected_bytes, self._used)


class _BeforeTraining(TrainerCallback):
    """Rehearses when everything is loaded and nothing has begun."""

    def __init__(self, trainer: GuardedTraining) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **parts: Any) -> None:
        """Called by the Trainer."""
        self._trainer.prepare_steps(parts.get("train_dataloader"))
