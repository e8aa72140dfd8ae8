"""Every step stays inside the budget, or is run again until it does.

    look      how much memory is there for us now                            available.py
    choose    cut or recomputed as far as the line of memory says            adjusting.py
    run       the step, under the cap                                        limits.py
    failed    gradients dropped, random state back, memory freed, smaller    here

Smaller micro-batches and recomputed layers are exact: the next step may do without them.

Nothing a step changes outlives its failure: weights, optimizer, schedule and sampler move once
the gradient of the whole effective batch is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from memfit.engine.executors import GraphedExecutor, StepExecutor
from memfit.engine.micro_batches import Batch, MicroBatch, MicroBatching, lengths_of
from memfit.engine.step_state import Buffers, BufferState, RandomState
from memfit.errors import RunStoppedError, StepMemoryError
from memfit.i18n import N_, t
from memfit.memory.available import CudaReader, Read, Watch, reader_of
from memfit.memory.cuda_context import take_workspaces
from memfit.memory.device import is_cuda
from memfit.memory.measured import plain_tensors, state_tensors
from memfit.memory.memory_line import MemoryLine
from memfit.memory.out_of_memory import (
    end_of_training,
    free_memory,
    is_out_of_memory,
    let_go,
    retrying,
    return_large_blocks,
)
from memfit.models.layer_stack import stack_of, stack_problem
from memfit.strategies import (
    ActivationOffload,
    Checkpointing,
    CudaGraphs,
    Strategy,
    copies_beside,
    find,
    wraps_layers,
)
from memfit.training.guard.adjusting import (
    Adjustment,
    Adjustments,
    Dials,
    Pieces,
    StepSettings,
    pieces_of,
)
from memfit.training.guard.rehearsal import (
    Rehearsal,
    rehearse,
    seconds_between_steps,
)
from memfit.training.limits import Cap, CountingCap, CudaCap, SpillWatch
from memfit.training.progress import MemfitProgress
from memfit.units import MIB, Budget, format_both
from memfit.waiting import doing

if TYPE_CHECKING:
    from memfit.strategies import Setup
    from memfit.training.trainer import BudgetTrainer


Outcome = TypeVar("Outcome")


class LiveStrategies:
    """What a set-up recomputes and offloads, changed between two steps."""

    def __init__(self, setup: Setup, used: Sequence[Strategy]) -> None:
        self._setup = setup
        self._wraps_layers = wraps_layers(used)
        self._captures = find(used, CudaGraphs) is not None
        self._offloaded = False

    @property
    def recomputed(self) -> int:
        """The layers that are recomputed now."""
        turns = self._setup.recomputed
        return 0 if turns is None else min(turns.limit, self.depth)

    @functools.cached_property
    def depth(self) -> int:
        """How many layers could be recomputed; 0 if that cannot be changed between steps."""
        setup = self._setup
        if setup.recomputed is None and (self._wraps_layers or Checkpointing().unavailable(setup)):
            return 0
        return 0 if stack_problem(setup.model, None) else stack_of(setup.model).depth

    @property
    def offloads(self) -> bool:
        """Whether activations could be offloaded beside what is used."""
        if self._wraps_layers or self._captures:
            return False
        return not ActivationOffload().unavailable(self._setup)

    def apply(self, settings: StepSettings) -> bool:
        """Runs the following steps with these settings. Returns whether anything changed."""
        changed = False
        if settings.recomputed != self.recomputed and self.depth:
            if self._setup.recomputed is None:
                Checkpointing().apply(self._setup)
            assert self._setup.recomputed is not None
            self._setup.recomputed.limit = settings.recomputed
            changed = True
        if settings.offloaded and not self._offloaded:
            ActivationOffload().apply(self._setup)
            self._offloaded = changed = True
        return changed


_WAIT_SECONDS = 0.5
"""The pause before a step is tried again unchanged; another process may free memory by then."""

_FLOOR_TRIES = 3
"""How often a step is tried with nothing left to change: other processes may free memory."""

_SMALLER_BUDGET = 0.85
"""What several ranks go on with of a budget in which a step ran out of memory."""

_WITHOUT_GAPS = 0.97
"""The share of reserved memory that torch's allocator fills when tensor sizes change."""

_PAGES_BYTES = 2 * 20 * MIB
"""Lost beside these gaps: the last page is never full, and the next is requested whole."""

_WITHOUT_ERROR = 0.98
"""Left where every byte is counted: the line of memory has a small error."""


class Guard:
    """Runs the steps of one trainer.

    `line` is the plan's line of memory; where there is none, the rehearsal measures one.
    """

    def __init__(
        self,
        trainer: BudgetTrainer,
        used: Sequence[Strategy],
        *,
        line: MemoryLine | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.trainer = trainer
        self._device: torch.device = trainer.args.device
        self._wraps_layers = wraps_layers(used)
        self._captures = find(used, CudaGraphs) is not None
        self._strategies = used
        self.live = LiveStrategies(trainer.setup, used)
        self.dials = Dials(
            self.live.depth,
            self.live.offloads,
            captured=isinstance(trainer.executor, GraphedExecutor),
        )
        self.adjustments = Adjustments(lambda: trainer.state.log_history, say)
        self.settings = self._planned()
        """The largest settings a step may have: the plan's, or smaller after a failure."""
        if line is not None and not self.dials.depth and not stack_problem(trainer.model, None):
            # Layers cannot be changed here: count them as if all of them were kept.
            per_token = line.bytes_per_token(stack_of(trainer.model).depth)
            line = MemoryLine(line.fixed_bytes, per_token, 0.0)
        self.line = line
        self.rehearsal: Rehearsal | None = None
        """What the largest batch showed before the first step."""
        self.proven: tuple[int, int] | None = None
        """Under which limit the largest batch was rehearsed, and the most its tensors took."""
        self.watch: Watch | None = None
        self.cap: Cap | None = None
        """In force, while the process is held to a budget."""
        self.budget_cap: Cap | None = None
        """The cap of the budget, created when it is first needed."""
        self.spill = SpillWatch()
        self.worst_lengths: list[int] | None = None
        """Lengths of the longest rows, for steps whose shape may not change from batch to batch."""
        self.used: MicroBatching | None = None
        """The limits of the last step that succeeded."""
        self.tokens = 0
        """Trained on so far, padding left out where it is known."""
        self._floor_tries = 0
        self._evaluated: int | None = None
        self._squeezed = False
        """Whether the largest batch, run as planned, no longer fits the limit."""
        self._graphs = 0
        self._buffers = Buffers()
        self._before: BufferState | None = None

    # ---- what the trainer calls ----

    def replan(self) -> None:
        """Takes over a micro-batching that was changed from outside."""
        self.settings = self._planned()

    def _planned(self) -> StepSettings:
        limits = self.trainer.executor.micro_batching
        return StepSettings(limits.max_tokens, limits.max_rows, self.live.recomputed)

    @property
    def micro_batching(self) -> MicroBatching:
        """The limits in force: the planned ones, or those an adjustment put in their place."""
        return self.settings.micro_batching

    def prepare(self, loader: Any) -> None:
        """Measures memory, starts watching it and rehearses, before the first step."""
        trainer = self.trainer
        if is_cuda(self._device):
            trainer.executor.drop()
            with trainer.executor.on_stream():
                take_workspaces(self._device)
            self.measure()
        callbacks = trainer.callback_handler.callbacks
        bars = [bar for bar in callbacks if isinstance(bar, MemfitProgress)]
        if bars:
            self.adjustments.say = bars[0].say
        if trainer.budget is None or trainer.args.torch_compile:
            return  # a compiled step wants the same shapes
        if trainer.executor.in_step or trainer.steps_in_backward:
            return  # a rehearsal there would need the other ranks, or move the weights
        with (
            doing(t("compiling, capturing and trying the largest batch …")),
            trainer.ranks.agreed(),
        ):
            self.rehearsal = rehearse(self, loader)
        if (found := self.rehearsal) is not None:
            for bar in bars:
                bar.expect(found.step_seconds, seconds_between_steps(trainer, found))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the process keeps to the budget."""
        if self.watch is not None:
            yield  # an evaluation inside of a training
            return
        cap, watch = self.cap, self.watch = self.limits()
        if cap is not None:
            cap.move(watch.limit_bytes)
        try:
            yield
        finally:
            if cap is not None:
                cap.release()
            self.cap = self.watch = None
            end_of_training()

    def limits(self) -> tuple[Cap | None, Watch]:
        """Returns the cap, if a budget was given, and the watch of what is free."""
        budget, on_cuda = self.trainer.budget, is_cuda(self._device)
        if budget is not None and self.budget_cap is None:
            if self._device.type == "cpu" and budget != Budget():
                return_large_blocks()
            self.budget_cap = (
                CudaCap(self.reader())
                if on_cuda
                else CountingCap(self.standing_tensors, self._device)
            )
        read: Read
        if self.budget_cap is not None:
            read = self.budget_cap.read
        else:
            read = self.reader() if on_cuda else reader_of(self._device, lambda: 0)
        return self.budget_cap, Watch(budget or Budget(), read, every_step=budget == Budget())

    def reader(self) -> CudaReader:
        """Returns what reads the card's free memory and the size of the context."""
        plan = self.trainer.plan
        expected_bytes = None if plan is None else plan.context_bytes
        graphs = find(self._strategies, CudaGraphs) is not None
        copies = copies_beside(self._strategies)
        return CudaReader(self._device, expected_bytes, copies=copies, graphs=graphs)

    def room_bytes(self) -> int | None:
        """Returns what is left of the budget now; None where only counting would tell."""
        return None if self.cap is None else self.cap.room_bytes()

    def retrying(self) -> contextlib.AbstractContextManager[None]:
        """Inside, an operator that runs out of memory runs again; in the end without graphs."""
        return retrying(self._device, last_resort=self.drop_graphs)

    def drop_graphs(self) -> None:
        """Frees memory that is only held to save time."""
        with contextlib.suppress(RuntimeError):  # of a card that no longer answers
            self.trainer.executor.drop()

    def make_room(self) -> None:
        """Frees the graphs and the blocks that the allocator holds unused."""
        self.drop_graphs()
        free_memory(self._device)

    def run(self, model: nn.Module, batch: Batch) -> Tensor:
        """Computes the gradient of an effective batch in pieces that fit; returns its mean loss."""
        self.look()
        executor = self.trainer.executor
        with retrying(self._device):  # a stream's batches are on the device already
            lengths = lengths_of(batch, executor.trim)
        if not lengths:  # a rank whose share of the rows is nothing
            return executor.run(model, batch)
        settings = self.settings_for(lengths)
        start = RandomState.now(self._device)
        while True:
            pieces = pieces_of(lengths, settings.micro_batching, packed=executor.packed)
            loss, failed = self.attempt(lambda e: e.run(model, batch), settings, pieces)
            if loss is not None:
                self.tokens += sum(lengths)
                self.used = self.micro_batching
                self._floor_tries = 0
                return loss
            self.clear(model)
            start.restore(self._device)
            settings = self._smaller(model, settings, pieces, failed)

    def evaluate(self, batch: Batch, predict: Callable[[list[MicroBatch]], Any]) -> Any:
        """Returns predictions for a batch, computed in smaller pieces where it does not fit."""
        executor = self.trainer.evaluating_executor()
        while True:
            limits = executor.micro_batching
            if self._evaluated is not None:
                limits = MicroBatching(limits.max_rows, self._evaluated)
            parts = replace(executor, micro_batching=limits).split(batch)
            try:
                return predict(parts)
            except Exception as error:
                smallest = max(len(part.rows) for part in parts) == 1
                if not is_out_of_memory(error) or smallest or executor.in_step:
                    raise
                let_go(error)
            pieces = pieces_of(lengths_of(batch, executor.trim), limits, packed=executor.packed)
            # A row may be longer than the limit: it is then a piece by itself.
            largest = min(pieces.tokens, limits.max_tokens or pieces.tokens)
            self._evaluated = max(largest // 2, 1)
            tried, smaller = StepSettings(pieces.tokens), StepSettings(self._evaluated)
            self.note(t("out of memory in evaluation"), str(tried), str(smaller))
            self.make_room()

    def look(self) -> None:
        """Adjusts the limit to what other processes leave, before a step runs out of memory."""
        moved = None if self.watch is None else self.watch.look()
        if self.watch is None or self.cap is None:
            return
        if moved:
            before, now = moved
            holds_more = self.cap.move(now)
            if holds_more:  # captured graphs hold what no tensor does
                self.make_room()
            needed_bytes = 0 if self.rehearsal is None else self.rehearsal.peak_bytes
            self._note_move(before, now, squeezed=holds_more or needed_bytes > self.usable_bytes)
        else:
            # The driver keeps part of every captured graph: the context has grown.
            graphs = self.trainer.executor.captured_graphs
            grown = self.cap.measure() if graphs != self._graphs else self.cap.keep()
            self._graphs = graphs
            if grown:
                self.make_room()
        if spilled := self.spill.spilled_bytes():
            limit = max(self.watch.limit_bytes - spilled, 0)
            why = t("{bytes} were moved to shared memory", bytes=format_both(spilled))
            before_said = t("a limit of {bytes}", bytes=format_both(self.watch.limit_bytes))
            self.note(why, before_said, format_both(limit))
            self.watch.limit_bytes = limit
            self.cap.move(limit)

    def _note_move(self, before: int, now: int, *, squeezed: bool) -> None:
        """Notes a new limit if it changes whether the plan fits; all others change nothing."""
        if squeezed == self._squeezed:
            return
        self._squeezed = squeezed
        on_card = is_cuda(self._device)
        if squeezed:
            why = N_("less memory is free") if on_card else N_("less main memory is free")
        else:
            why = N_("more memory is free") if on_card else N_("more main memory is free")
        self.note(t(why), t("a limit of {bytes}", bytes=format_both(before)), format_both(now))

    def measure(self) -> None:
        """Re-applies the limit with the context as it is now."""
        if self.cap is not None and self.cap.measure():
            free_memory(self._device)

    def note(self, why: str, before: str, after: str) -> None:
        """Writes a change down."""
        step = self.trainer.state.global_step + 1
        self.adjustments.note(Adjustment(step, why, before, after))

    # ---- one attempt ----

    def attempt(
        self, run: Callable[[StepExecutor], Outcome], settings: StepSettings, pieces: Pieces
    ) -> tuple[Outcome | None, str]:
        """Runs something that may find no memory. Returns its outcome, or the error's text."""
        executor = self._executor_for(settings)
        # A copy that finds no memory runs again, and the step does not count as failed.
        copying = retrying if self._buffers.may_move else lambda _: contextlib.nullcontext()
        with copying(self._device):
            before = self._before = self._buffers.now(self.trainer.model)
        counting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.cap is not None:
            counting = self.cap.counting(pieces.tokens, (settings.recomputed, settings.offloaded))
        try:
            with counting:
                outcome = run(executor)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None, let_go(error)
        with copying(self._device):
            self._buffers.learn(before)
        return outcome, ""

    def _executor_for(self, settings: StepSettings) -> StepExecutor:
        """Returns the trainer's executor with these settings."""
        executor = self.trainer.executor
        if self.live.apply(settings):
            executor.drop()  # what was captured recomputes other layers
        around = tuple(self.trainer.setup.around_micro_batch)
        changes: dict[str, Any] = {"micro_batching": settings.micro_batching, "around": around}
        if isinstance(executor, GraphedExecutor) and settings.max_tokens is not None:
            largest = min(executor.buckets.largest or settings.max_tokens, settings.max_tokens)
            changes["buckets"] = replace(executor.buckets, largest=largest)
        return dataclasses.replace(executor, **changes)

    def clear(self, model: nn.Module, *, free: bool = True) -> None:
        """Undoes the step so far, except for the random state."""
        if self._before is not None:
            self._before.restore()
        sink = self.trainer.setup.sink
        if sink is not None and hasattr(sink, "abandon"):
            sink.abandon()
        if self.trainer.optimizer is not None:
            self.trainer.optimizer.zero_grad()
        model.zero_grad()
        if free:
            self.make_room()

    # ---- decisions ----

    @property
    def limit_bytes(self) -> int:
        """What the process may hold; 0 where nothing is known of it."""
        return 0 if self.watch is None else self.watch.limit_bytes

    @property
    def usable_bytes(self) -> int:
        """What tensors may take: the context and the gaps between blocks left out."""
        context_bytes = getattr(getattr(self.cap, "read", None), "context_bytes", None)
        if context_bytes is None:
            return int(self.limit_bytes * _WITHOUT_ERROR)
        return max(int((self.limit_bytes - context_bytes) * _WITHOUT_GAPS) - _PAGES_BYTES, 0)

    def settings_for(self, lengths: list[int]) -> StepSettings:
        """Returns how a batch of rows of these lengths is run, by the line of memory.

        What the rehearsal held may be held again, unless the limit has fallen since.
        """
        settings, line, packed = self.settings, self.line, self.trainer.executor.packed
        if line is None or self.cap is None or self.proven is None:
            return settings
        rehearsed_under_bytes, proven_bytes = self.proven
        limit_bytes = self.usable_bytes
        if self.limit_bytes >= rehearsed_under_bytes:
            limit_bytes = max(limit_bytes, proven_bytes + 1)  # the line's rounding
        if self.dials.captured:  # all batches run with the same layers recomputed
            lengths = self.worst_lengths or lengths
        return self.dials.fitting(settings, lengths, line, limit_bytes, packed=packed)

    def failed(self, used: StepSettings, pieces: Pieces) -> StepSettings | None:
        """Returns the settings for the next try, also for later steps; None if there are none."""
        smaller = self.dials.smaller(used, pieces)
        if smaller is not None:
            self.settings = smaller
        return smaller

    def _smaller(
        self, model: nn.Module, used: StepSettings, pieces: Pieces, failed: str
    ) -> StepSettings:
        """Returns the settings for the next try; RunStoppedError if nothing is left to change."""
        trainer = self.trainer
        if trainer.steps_in_backward:
            raise RunStoppedError(
                t(
                    "out of memory in step {step}: {failed}; the optimizer updates weights inside "
                    "backward, so the step cannot run again in smaller parts; choose a smaller "
                    "batch, a shorter --max-length or another optimizer",
                    step=trainer.state.global_step + 1,
                    failed=failed,
                ),
                trainer.checkpoints.last_good,
            )
        if not trainer.ranks.is_alone:
            raise StepMemoryError(
                t(
                    "out of memory in step {step}: {failed}; of several processes none can run a "
                    "step again by itself",
                    step=trainer.state.global_step + 1,
                    failed=failed,
                ),
                trainer.checkpoints.last_good,
                smaller_budget=f"{self.limit_bytes * _SMALLER_BUDGET / 1e6:.0f}MB",
            )
        smaller = self.failed(used, pieces)
        if smaller is None and self._floor_tries == _FLOOR_TRIES:
            self._stop(model, used, failed)
        after = t("once more") if smaller is None else str(smaller)
        before = str(replace(used, max_tokens=pieces.tokens))
        self.note(t("out of memory ({failed})", failed=failed), before, after)
        if smaller is not None:
            return smaller
        self._floor_tries += 1
        if is_cuda(self._device):
            time.sleep(_WAIT_SECONDS)
        return used

    def _stop(self, model: nn.Module, used: StepSettings, failed: str) -> NoReturn:
        trainer = self.trainer
        step = trainer.state.global_step
        last = trainer.checkpoints.last_good
        if step > 0 and (last is None or last.name != f"checkpoint-{step}"):
            trainer._save_checkpoint(model, None)
        raise RunStoppedError(
            t(
                "out of memory in step {step}, with nothing left to make smaller ({way}): "
                "{failed}; give it a larger --budget, a shorter --max-length or a smaller "
                "model",
                step=step + 1,
                way=used,
                failed=failed,
            ),
            trainer.checkpoints.last_good,
        )

    def standing_tensors(self) -> Iterator[Tensor]:
        """Yields what is there between two steps: weights, gradients, the optimizer's state."""
        model, optimizer = self.trainer.model, self.trainer.optimizer
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            yield from plain_tensors(tensor)
            if tensor.grad is not None:
                yield from plain_tensors(tensor.grad)
        yield from state_tensors(optimizer)
