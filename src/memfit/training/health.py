"""Watches the numbers of a training: losses that are not finite, updates that round to nothing.

In bfloat16 a weight of 0.02 has neighbours 0.00006 away; an update of 2e-5 does not reach the
middle between them, so without fp32 copies of the weights most of them never move. Looked at in
three steps of the run at most, in a few thousand weights.

A GPU is never made to wait for this. Every step leaves one number on its way to the host, and it
is looked at when it has arrived, a step or two later; before a checkpoint is written all of them
have been looked at, so no checkpoint holds what a bad batch made of the weights. On a CPU the
number is there at once, and the weights are still those before the batch.

Skipping, too, is decided where the gradient is. The update is left out as a whole: weights and
optimizer state stay as they are; the step counts, the learning rate's schedule and the order of
the rows go on as if it had been made. How:

    no sink, an optimizer of torch that knows `found_inf`   the kernel looks at it itself
    no sink, any other optimizer                            the host looks, once a step
    a sink of the low-bit optimizer                         its gate, as for an fp16 overflow
    another sink                                            refused before the run

Gradients of fp16 are made of a loss that is multiplied by a scale. That they overflow is nothing
unusual: the update is left out, the scale is halved, and there is no message. Only at a scale of 1
counts such a gradient as not finite.
"""

# ruff: noqa: ARG002 - the Trainer decides what its callbacks are given.

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memfit.config.schema import ON_NAN
from memfit.errors import ConfigError, LossError
from memfit.i18n import N_, t
from memfit.memory.device import is_cuda
from memfit.strategies.fully_sharded import is_divided
from memfit.training.guard.updates import unwrapped

if TYPE_CHECKING:
    from memfit.training.trainer import BudgetTrainer

_LOOKS = 3
"""How many looks must all show it: a single batch may have almost no gradient."""

_STEPS_BETWEEN = 10

_TENSORS, _ELEMENTS = 12, 512

_MOVED_AT_LEAST = 0.5
"""In fp32 practically all weights with a gradient move; in pure bf16 about a quarter do."""

_OF_THE_LARGEST_RATE = 0.25
"""Warm-up and the end of the schedule make small steps on purpose."""


class StallWatch(TrainerCallback):
    """Warns once if the weights do not move."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._shares: list[float] = []
        self._next_step = 0
        self._is_done = False

    def on_train_begin(self, *_: Any, **parts: Any) -> None:
        """Starts watching, unless the optimizer keeps the bits that half-precision weights lack."""
        module = type(unwrapped(parts.get("optimizer"))).__module__
        self._shares, self._before, self._next_step = [], [], 0
        self._is_done = not module.startswith(("torch.optim", "transformers."))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Remembers some weights that have a gradient, when the learning rate is near its top."""
        if self._is_done:
            return
        # In a short run the looks are a share of it apart.
        wait = max(min(_STEPS_BETWEEN, state.max_steps // (_LOOKS + 1)), 1)
        self._next_step = self._next_step or state.global_step + wait
        groups = parts["optimizer"].param_groups
        if state.global_step + 1 >= self._next_step and any(
            group["lr"] >= _OF_THE_LARGEST_RATE * group.get("initial_lr", group["lr"]) > 0
            for group in groups
        ):
            self._before = _sample([p for group in groups for p in group["params"]])
            self._next_step = state.global_step + 1 + wait

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Counts how many of these weights have changed."""
        if not self._before:
            return
        moved = sum(int((_picked(p, at) != was).sum()) for p, at, was in self._before)
        count = sum(was.numel() for _, _, was in self._before)
        kind = str(self._before[0][2].dtype).removeprefix("torch.")
        self._before = []
        self._shares.append(moved / count)
        stands = self._shares[-1] < _MOVED_AT_LEAST
        self._is_done = not stands or len(self._shares) == _LOOKS
        if not stands or not self._is_done:
            return
        remedy = t("use a larger learning rate")
        if kind in ("bfloat16", "float16"):
            remedy = t(
                "keep the weights in float32 (--bf16 still computes in bfloat16), or use an "
                "optimizer with master weights"
            )
        warnings.warn(
            t(
                "the run stands still: in step {step} only {share:.0%} of the weights "
                "with a gradient moved; at a learning rate of {rate:.1e} updates round "
                "to nothing in {kind}; {remedy}",
                step=state.global_step + 1,
                share=self._shares[-1],
                rate=max(group["lr"] for group in parts["optimizer"].param_groups),
                kind=kind,
                remedy=remedy,
            ),
            UserWarning,
            stacklevel=2,
        )


def _sample(parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Samples weights of the largest parameters that have a gradient: places and values."""
    learning = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
    taken = []
    for p in sorted(learning, key=lambda p: -p.numel())[:_TENSORS]:
        assert p.grad is not None
        count = _here(p).numel()
        places = torch.arange(0, count, max(count // _ELEMENTS, 1), device=p.device)
        places = places[_picked(p.grad, places) != 0]
        if places.numel():
            taken.append((p, places, _picked(p, places).clone()))
    return taken


def _picked(tensor: Tensor, places: Tensor) -> Tensor:
    return _here(tensor).reshape(-1)[places]


def _here(tensor: Any) -> Tensor:
    """The part of a tensor that this rank holds."""
    part: Tensor = tensor.to_local() if is_divided(tensor) else tensor
    return part.detach()


SKIPS_IN_A_ROW = 20
"""After this many skipped steps in a row the weights themselves are broken."""

_SHOWN_ROWS = 64


class GatedSink(Protocol):
    """A sink whose optimizer leaves a step out when its gradient is not finite."""

    loss_scale: Any


@dataclass(frozen=True, slots=True)
class _Watched:
    step: int
    numbers: Tensor
    """Loss and gradient norm, on the host or on their way there."""
    arrived: Any


class LossWatch:
    """Looks at every step's loss and gradient norm; `rows_of` names the rows of a step."""

    def __init__(
        self,
        on_nan: str = "stop",
        *,
        rows_of: Callable[[int], Sequence[int] | None] = lambda _: None,
        record: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        if on_nan not in ON_NAN:
            raise ConfigError(
                "{flag} is {value}; it is one of {choices}.{hint}",
                flag="on_nan",
                value=repr(on_nan),
                choices=", ".join(ON_NAN),
                hint="",
            )
        self.skips = on_nan == "skip"
        self.rows_of = rows_of
        self.record = record
        self.skipped_steps: list[int] = []
        self._pending: deque[_Watched] = deque()

    def to_log(self, loss: Tensor, usual: Tensor) -> Tensor:
        """What the log adds up: a step that is left out counts as the usual loss."""
        return torch.where(torch.isfinite(loss), loss, usual)

    def after_backward(
        self, step: int, loss: Tensor, norm: Tensor | float | None, optimizer: Any
    ) -> bool:
        """Look at a step before its update; whether the host must leave the update out.

        `norm` is None where a gradient that is not finite is nothing unusual.
        """
        numbers = _numbers(loss, norm)
        if numbers.device.type == "cpu":
            self._judge(step, numbers)
            return bool(self.skipped_steps) and self.skipped_steps[-1] == step
        left_out = False
        if self.skips and optimizer is not None:
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.found_inf = (~torch.isfinite(numbers).all()).float()
            else:
                left_out = not bool(torch.isfinite(numbers).all())
        host = numbers.to("cpu", non_blocking=True)  # pinned: the copy waits for nothing
        arrived = None
        if is_cuda(numbers.device):
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(numbers.device))
        self._pending.append(_Watched(step, host, arrived))
        while self._pending and (arrived := self._pending[0].arrived) and arrived.query():
            first = self._pending.popleft()
            self._judge(first.step, first.numbers)
        return left_out

    def settle(self) -> None:
        """Looks at all numbers that are still on their way; waits for the GPU."""
        while self._pending:
            first = self._pending.popleft()
            if first.arrived is not None:
                first.arrived.synchronize()
            elif torch.accelerator.is_available():
                torch.accelerator.synchronize()
            self._judge(first.step, first.numbers)

    def _judge(self, step: int, numbers: Tensor) -> None:
        loss, norm = numbers.tolist()
        if math.isfinite(loss) and math.isfinite(norm):
            return
        rows = self.rows_of(step) or ()
        what = (
            t("the gradient is {value}", value=norm)
            if math.isfinite(loss)
            else t("the loss is {value}", value=loss)
        )
        where = _place(step, rows)
        if not self.skips:
            raise LossError(t("{what} in {where}", what=what, where=where))
        self.skipped_steps.append(step)
        if self.skipped_steps[-SKIPS_IN_A_ROW:] == [*range(step - SKIPS_IN_A_ROW + 1, step + 1)]:
            raise LossError(
                t(
                    "{what} in {where}, the {count}th step in a row: the weights no longer "
                    "work; try a smaller learning rate",
                    what=what,
                    where=where,
                    count=SKIPS_IN_A_ROW,
                )
            )
        self.record({"step": step, "skipped": what, "rows": list(rows)})
        warnings.warn(
            t(
                "{where} is skipped, {what}: weights and optimizer stay as they were, the "
                "schedule and the order of the rows go on",
                where=where,
                what=what,
            ),
            UserWarning,
            stacklevel=2,
        )


def _place(step: int, rows: Sequence[int]) -> str:
    more = len(rows) - _SHOWN_ROWS
    kind = N_("step {step} (rows {rows} of the training dataset)") if rows else N_("step {step}")
    if more > 0:
        kind = N_("step {step} (rows {rows} and {more} more of the training dataset)")
    return t(kind, step=step, rows=", ".join(map(str, rows[:_SHOWN_ROWS])), more=more)


def gate_sink(sink: GatedSink, device: torch.device) -> None:
    """Makes a low-bit sink skip steps whose gradient is not finite."""
    from memfit.strategies.lowbit.step_scalars import LossScale

    if not hasattr(sink, "loss_scale"):
        raise ConfigError(
            "on_nan='skip' cannot be used here: this optimizer updates weights while "
            "the gradient is still being made; leave it at 'stop'"
        )
    if sink.loss_scale is None:
        # A scale of 1 that stays: only the gate of it is wanted.
        sink.loss_scale = LossScale(device, initial=1.0, largest=1.0)


def rows_of_step(dataloader: Any, step: int) -> list[int] | None:
    """Returns the rows that a step learned from, drawn again from the loader's own sampler.

    The samplers are left as they were. None for a stream, or a sampler of another kind.
    """
    part = batches = getattr(dataloader, "batch_sampler", None)
    before: list[tuple[Any, int, Any]] = []
    try:
        epoch, index = divmod(step - 1, len(dataloader))
        while part is not None:
            if isinstance(getattr(part, "epoch", None), int):
                generator = getattr(part, "generator", None)
                state = generator.get_state() if isinstance(generator, torch.Generator) else None
                before.append((part, part.epoch, state))
                part.epoch = epoch
            part = getattr(part, "batch_sampler", None) or getattr(part, "sampler", None)
        found = next(islice(iter(batches), index, None), None)  # type: ignore[arg-type]
        return None if found is None else [int(row) for row in found]
    except (TypeError, ValueError, AttributeError):
        return None
    finally:
        for sampler, was, state in before:
            sampler.epoch = was
            if state is not None:
                sampler.generator.set_state(state)


def _numbers(loss: Tensor, norm: Tensor | float | None) -> Tensor:
    """Loss and norm as two fp32 numbers on the loss's device."""
    if not isinstance(norm, Tensor):  # a fill carries its number along; a copy would be waited for
        norm = torch.full((), norm or 0.0, device=loss.device)
    other = norm.detach().to(loss.device, torch.float32)
    return torch.stack([loss.detach().float().reshape(()), other.reshape(())])


class Health:
    """Looks at the loss and the gradient norm of every step of one trainer."""

    def __init__(self, trainer: BudgetTrainer, on_nan: str) -> None:
        self._trainer = trainer
        self.watch = LossWatch(
            on_nan,
            rows_of=lambda step: rows_of_step(trainer.callback_handler.train_dataloader, step),
            record=lambda entry: trainer.state.log_history.append(entry),
        )
        self._step_loss: Tensor | None = None

    def prepare(self) -> None:
        """Makes the sink skip bad steps, if asked for; called once the optimizer exists."""
        if self.watch.skips and self._trainer.setup.sink is not None:
            gate_sink(self._trainer.setup.sink, self._trainer.args.device)

    def keep(self, loss: Tensor, usual: Callable[[], Tensor]) -> Tensor:
        """Keep a step's loss until its gradient is there, too; returns what the log adds up."""
        self._step_loss = loss
        return self.watch.to_log(loss, usual()) if self.watch.skips else loss

    def leaves_out(self, norm: Any) -> bool:
        """Look at a step before its update; whether the host must leave the update out."""
        loss, self._step_loss = self._step_loss, None
        if loss is None:
            return False
        trainer = self._trainer
        scaler = getattr(trainer.accelerator, "scaler", None)
        sink: Any = trainer.setup.sink
        if (scale := getattr(sink, "loss_scale", None)) is not None:
            norm = scale.judged(norm)
        return self.watch.after_backward(
            trainer.state.global_step + 1,
            loss,
            # An overflow of scaled gradients is nothing unusual: the scaler skips and scales down.
            norm if scaler is None else None,
            unwrapped(trainer.optimizer) if sink is None and scaler is None else None,
        )

    def check(self) -> None:
        """Raises before a checkpoint would hold weights that a non-finite batch has spoiled."""
        self.watch.settle()
        trainer = self._trainer
        by_place: dict[Any, list[Tensor]] = {}
        for weight in (_here(p) for p in trainer.model.parameters() if p.requires_grad):
            # Weights that wait in host memory have an empty storage here.
            if weight.numel() and weight.untyped_storage().nbytes():
                by_place.setdefault((weight.device, weight.dtype), []).append(weight)
        finite = all(
            bool(torch.isfinite(torch.stack([norm.float() for norm in norms])).all())
            for norms in (torch._foreach_norm(alike, math.inf) for alike in by_place.values())
        )
        if any(trainer.ranks.largest(not finite)):
            raise LossError(
                t(
                    "after step {step} weights of the model are not finite numbers",
                    step=trainer.state.global_step,
                )
            )
