"""Every step stays inside the budget, or is run again until it does.

    look      how much memory is there for us now                            available.py
    choose    micro-batches and recomputed layers for this batch             adjusting.py
    run       the step, under the cap                                        limits.py
    failed    gradients dropped, random state back, memory freed, smaller    here

Smaller micro-batches and recomputed layers are exact: the next step may do without them.

Nothing a step changes outlives its failure: weights, optimizer, schedule and sampler move once
the gradient of the whole effective batch is there. (Where gradients are released inside backward
they move earlier; layer_boundaries.py finishes such a step instead.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from memfit.engine.exchange import Peers
from memfit.engine.executors import GraphedExecutor, SinkExecutor, StepExecutor
from memfit.engine.layer_boundaries import LayerBoundaries
from memfit.engine.micro_batches import Batch, MicroBatch, MicroBatching, lengths_of
from memfit.engine.step_state import Buffers, BufferState, RandomState
from memfit.errors import DoesNotFitError, RunStoppedError
from memfit.i18n import N_, t
from memfit.memory.available import CudaReader, Read, Watch, reader_of
from memfit.memory.cuda_context import take_workspaces
from memfit.memory.device import is_cuda
from memfit.memory.measured import plain_tensors, state_tensors
from memfit.memory.out_of_memory import (
    end_of_training,
    free_memory,
    is_out_of_memory,
    let_go,
    retrying,
    return_large_blocks,
)
from memfit.models.layer_stack import stack_of, stack_problem
from memfit.strategies import ActivationOffload, Checkpointing, Effects
from memfit.training.guard.adjusting import (
    Abilities,
    Adjuster,
    Adjustment,
    Adjustments,
    StepPieces,
    Way,
    pieces_of,
)
from memfit.training.guard.rehearsal import (
    Rehearsal,
    rehearse,
    seconds_between_steps,
    with_exchange,
)
from memfit.training.limits import Cap, CountingCap, CudaCap, SpillWatch
from memfit.training.parts import TrainerParts
from memfit.training.progress import MemfitProgress
from memfit.units import MIB, Budget, format_both
from memfit.waiting import doing

if TYPE_CHECKING:
    from memfit.planner.plans import Plan
    from memfit.strategies import Setup
    from memfit.training.saving import CheckpointSaver


class GuardedTrainer(TrainerParts, Protocol):
    """What the guard and its rehearsal need of a trainer."""

    executor: StepExecutor
    ranks: Peers
    eval_dataset: Any
    budget: Budget | None

    @property
    def plan(self) -> Plan | None:
        """What was planned for the budget."""

    @property
    def checkpoints(self) -> CheckpointSaver:
        """The trainer's checkpoints."""

    def evaluating_executor(self) -> StepExecutor:
        """How a batch is cut to be predicted."""

    def prediction_step(self, model: nn.Module, inputs: Batch, prediction_loss_only: bool) -> Any:
        """Predicts one batch."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Loads what is evaluated."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes a checkpoint."""


class LiveStrategies:
    """What a set-up recomputes and offloads, changed between two steps."""

    def __init__(self, setup: Setup, used: Effects) -> None:
        self._setup = setup
        self._used = used
        self._offload: tuple[int, int] | None = None

    @property
    def recomputed(self) -> int:
        """The layers that are recomputed now."""
        turns = self._setup.recomputed
        return 0 if turns is None else min(turns.limit, self.depth)

    @functools.cached_property
    def depth(self) -> int:
        """How many layers could be recomputed; 0 if that cannot be changed between steps."""
        setup = self._setup
        if setup.recomputed is None and not self._may_recompute():
            return 0
        return 0 if stack_problem(setup.model, None) else stack_of(setup.model).depth

    @property
    def offloads(self) -> bool:
        """Whether activations could be offloaded beside what is used."""
        if self._used.wraps_layers or self._used.graph_bucket_tokens:
            return False
        return not ActivationOffload().unavailable(self._setup)

    def apply(self, way: Way) -> bool:
        """Runs the following steps this way. Returns whether anything changed."""
        changed = False
        if way.recomputed != self.recomputed and self.depth:
            if self._setup.recomputed is None:
                Checkpointing().apply(self._setup)
            assert self._setup.recomputed is not None
            self._setup.recomputed.limit = way.recomputed
            changed = True
        if way.offloaded and self._offload is None and self.offloads:
            self._add_offload()
            changed = True
        elif not way.offloaded and self._offload is not None:
            self._remove_offload()
            changed = True
        return changed

    def _may_recompute(self) -> bool:
        if self._used.wraps_layers:
            return False
        return not Checkpointing().unavailable(self._setup)

    def _add_offload(self) -> None:
        before = len(self._setup.undo), len(self._setup.around_micro_batch)
        ActivationOffload().apply(self._setup)
        self._offload = before

    def _remove_offload(self) -> None:
        assert self._offload is not None
        undone, around = self._offload
        while len(self._setup.undo) > undone:
            self._setup.undo.pop()()
        del self._setup.around_micro_batch[around:]
        self._offload = None


_WAIT_SECONDS = 0.5
"""The pause before a step is tried again unchanged; another process may free memory by then."""

_WITHOUT_GAPS = 0.97
"""The share of reserved memory that torch's allocator fills when tensor sizes change."""

_PAGES_BYTES = 2 * 20 * MIB
"""Lost beside these gaps: the last page is never full, and the next is requested whole."""

_WITHOUT_ERROR = 0.98
"""Left where every byte is counted: the line through two measurements has a small error."""

_WITHIN_PLAN = 1.02
"""How far a batch may exceed its plan's prediction before it runs in smaller pieces."""

_LAUNCHED_TOKENS = 40_000
"""What a launched step costs above a replayed one, in tokens computed. Recomputation never costs as
much."""


class Guard:
    """Runs the steps of one trainer."""

    def __init__(
        self,
        trainer: GuardedTrainer,
        used: Effects,
        *,
        keeps_plan: bool = False,
    ) -> None:
        self.trainer = trainer
        self._device: torch.device = trainer.args.device
        self._used = used
        self.live = LiveStrategies(trainer.setup, used)
        self.adjustments = Adjustments(lambda: trainer.state.log_history)
        self.planned_way = self._planned()
        """How the plan runs its worst batch."""
        self.adjuster = Adjuster(self.planned_way, self._abilities())
        self.adjuster.keeps_plan = keeps_plan
        self.may_plan_again = False
        """Whether a plan whose rehearsal fails is given up, not adjusted: another can be made."""
        self.rehearsal: Rehearsal | None = None
        """What the largest batch showed before the first step."""
        self.watch: Watch | None = None
        self.cap: Cap | None = None
        """In force, while the process is held to a budget."""
        self.budget_cap: Cap | None = None
        """The cap of the budget, made when it is first needed."""
        self.spill = SpillWatch()
        self.worst_lengths: list[int] | None = None
        """Lengths of the longest rows, for steps whose shape may not change from batch to batch."""
        self.when_squeezed: Callable[[], None] | None = None
        """Called when the limit has fallen: the rehearsal may have to measure more."""
        self.boundaries: LayerBoundaries | None = None
        """Where gradients are released: how far backward has come."""
        self.used: MicroBatching | None = None
        """The limits of the last step that went well."""
        self.tokens = 0
        """Trained on so far, padding left out where it is known."""
        self._evaluated: int | None = None
        self._squeezed = False
        """Whether the largest batch, run as planned, no longer fits the limit."""
        self._graphs = 0
        self._buffers = Buffers()
        self._before: BufferState | None = None

    # ---- what the trainer calls ----

    def replan(self) -> None:
        """The micro-batching was changed from outside."""
        self.planned_way = self._planned()
        self.adjuster.replan(self.planned_way)

    @property
    def micro_batching(self) -> MicroBatching:
        """The limits in force: the planned ones, or those an adjustment put in their place."""
        planned, now = self.adjuster.plan.micro_batching, self.adjuster.widest.micro_batching
        return self.trainer.executor.micro_batching if now == planned else now

    def prepare(self, loader: Any) -> None:
        """Measures memory, starts watching it and rehearses, before the first step."""
        trainer = self.trainer
        if is_cuda(self._device):
            trainer.executor.drop()
            with trainer.executor.on_stream():
                take_workspaces(self._device)
            self.measure()
        self.watch_layers()
        callbacks = trainer.callback_handler.callbacks
        bars = [bar for bar in callbacks if isinstance(bar, MemfitProgress)]
        if bars:
            self.adjustments.say = bars[0].say
        if trainer.budget is None or trainer.args.torch_compile:
            return  # a compiled step wants the same shapes
        if not trainer.executor.runs_alone:
            return
        missed: DoesNotFitError | None = None
        with doing(t("compiling, capturing and trying the largest batch …")):
            try:
                with trainer.ranks.apart():
                    self.rehearsal = rehearse(self, loader)
            except DoesNotFitError as error:
                missed = error
            trainer.ranks.raised(missed)
            if self.rehearsal is not None:
                self.rehearsal = with_exchange(trainer, self.rehearsal)
        found = self.rehearsal
        for bar in bars:
            if found is not None and bar.step_seconds is None:
                between = seconds_between_steps(trainer, found)
                bar.step_seconds = found.step_seconds
                bar.between_seconds = between + found.capture_seconds

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

    @contextlib.contextmanager
    def held_to(self, limit_bytes: int) -> Iterator[None]:
        """Inside, the process keeps to this limit. A limit above the budget's changes nothing."""
        cap = self.cap
        if cap is None or limit_bytes >= self.limit_bytes:
            yield
            return
        cap.move(limit_bytes)
        try:
            yield
        finally:
            cap.move(self.limit_bytes)

    def limits(self) -> tuple[Cap | None, Watch]:
        """The cap where a budget was given; what is free is watched in any case."""
        budget, on_cuda = self.trainer.budget, is_cuda(self._device)
        if budget is not None and self.budget_cap is None:
            tensors = self.standing_tensors
            if self._device.type == "cpu" and budget != Budget():
                return_large_blocks()
            self.budget_cap = (
                CudaCap(self.reader()) if on_cuda else CountingCap(tensors, self._device)
            )
        read: Read
        if self.budget_cap is not None:
            read = self.budget_cap.read
        else:
            read = self.reader() if on_cuda else reader_of(self._device, lambda: 0)
        return self.budget_cap, Watch(budget or Budget(), read, every_step=budget == Budget())

    def reader(self) -> CudaReader:
        """Says what the card has free and what the context takes."""
        plan = self.trainer.plan
        expected_bytes = None if plan is None else plan.context_bytes
        graphs = bool(self._used.graph_bucket_tokens)
        return CudaReader(self._device, expected_bytes, copies=self._used.copies, graphs=graphs)

    def room_bytes(self) -> int | None:
        """What is left of the budget now; None where only counting would tell."""
        return None if self.cap is None else self.cap.room_bytes()

    def retrying(self) -> contextlib.AbstractContextManager[None]:
        """Inside, an operator that runs out of memory runs again; in the end without graphs."""
        return retrying(self._device, last_resort=self.drop_graphs)

    def drop_graphs(self) -> None:
        """Gives back memory that is only held to save time."""
        with contextlib.suppress(RuntimeError):  # of a card that no longer answers
            self.trainer.executor.drop()

    def make_room(self) -> None:
        """Give back the graphs and what the allocator keeps."""
        self.drop_graphs()
        free_memory(self._device)

    def run(self, model: nn.Module, batch: Batch) -> Tensor:
        """The gradient of one effective batch, in whatever pieces fit; its mean loss."""
        self.look()
        self.trainer.ranks.begin_step()
        executor = self.trainer.executor
        with retrying(self._device):  # a stream's batches are on the device already
            lengths = lengths_of(batch, executor.trim)
        if not lengths:  # a rank whose share of the rows is nothing
            return executor.run(model, batch)
        way = self.way_for(lengths)
        start = RandomState.now(self._device)
        while True:
            pieces = pieces_of(lengths, way.micro_batching, packed=executor.packed)
            loss, failed = self._attempt(lambda e: e.run(model, batch), way, pieces)
            if loss is not None:
                self.tokens += sum(lengths)
                self.used = self.micro_batching
                self._went_well()
                return loss
            self.clear(model)
            start.restore(self._device)
            way = self._smaller(model, way, pieces, failed)

    def evaluate(self, batch: Batch, predict: Callable[[list[MicroBatch]], Any]) -> Any:
        """Predictions for a batch, in smaller pieces where they do not fit."""
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
                if not is_out_of_memory(error) or smallest or not executor.runs_alone:
                    raise
                let_go(error)
            pieces = pieces_of(lengths_of(batch, executor.trim), limits, packed=executor.packed)
            # A row may be longer than the limit: it is then a piece by itself.
            largest = min(pieces.tokens, limits.max_tokens or pieces.tokens)
            self._evaluated = max(largest // 2, 1)
            tried, smaller = Way(pieces.tokens), Way(self._evaluated)
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
            self._note_move(
                before, now, squeezed=holds_more or self._needed_bytes > self.usable_bytes
            )
            if now < before and self.when_squeezed is not None:
                self.when_squeezed()
        else:
            self._keep_limit()
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

    @property
    def _needed_bytes(self) -> int:
        """The highest moment of the largest batch, run as planned; 0 where nothing is known."""
        rehearsal = self.rehearsal
        return 0 if rehearsal is None else rehearsal.peak_bytes

    def _keep_limit(self) -> None:
        """Measure the context whenever another graph was captured: the driver keeps part of it."""
        assert self.cap is not None
        graphs = self.trainer.executor.captured_graphs
        grown = self.cap.measure() if graphs != self._graphs else self.cap.keep()
        self._graphs = graphs
        if grown:
            self.make_room()

    def measure(self) -> None:
        """Re-apply the limit with the context as it is now."""
        if self.cap is not None and self.cap.measure():
            free_memory(self._device)

    def note(self, why: str, before: str, after: str) -> None:
        """Write a change down."""
        step = self.trainer.state.global_step + 1
        self.adjustments.note(Adjustment(step, why, before, after))

    # ---- one attempt ----

    def attempt(self, run: Callable[[StepExecutor], None], way: Way, pieces: StepPieces) -> str:
        """Tries something before the first step. Returns the error's text, or an empty one."""

        def done(executor: StepExecutor) -> Tensor:
            run(executor)
            return torch.zeros(())

        return self._attempt(done, way, pieces)[1]

    def _attempt(
        self, run: Callable[[StepExecutor], Tensor], way: Way, pieces: StepPieces
    ) -> tuple[Tensor | None, str]:
        executor = self.executor_for(way)
        with self._copying_buffers():
            before = self._before = self._buffers.now(self.trainer.model)
        counting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.cap is not None:
            counting = self.cap.counting(pieces.tokens, (way.recomputed, way.offloaded))
        try:
            with counting:
                outcome = run(executor)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None, let_go(error)
        with self._copying_buffers():
            self._buffers.learn(before)
        return outcome, ""

    def _copying_buffers(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a copy that finds no memory runs again, and the step does not count as failed."""
        may_move = self._buffers.may_move
        return retrying(self._device) if may_move else contextlib.nullcontext()

    def executor_for(self, way: Way) -> StepExecutor:
        """The trainer's executor, running this way."""
        executor = self.trainer.executor
        if self.live.apply(way):
            executor.drop()  # what was captured recomputes other layers
        around = tuple(self.trainer.setup.around_micro_batch)
        changes: dict[str, Any] = {"micro_batching": way.micro_batching, "around": around}
        if isinstance(executor, SinkExecutor):
            changes["boundaries"] = self.boundaries
        if isinstance(executor, GraphedExecutor) and way.max_tokens is not None:
            largest = min(executor.buckets.largest or way.max_tokens, way.max_tokens)
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

    def way_for(self, lengths: list[int]) -> Way:
        """How a batch of rows of these lengths is run."""
        by_batch = self.adjuster.abilities.by_batch or not self.worst_lengths
        shown = lengths if by_batch else self.worst_lengths
        assert shown is not None
        limit = None if self.cap is None else min(self.judged_bytes, self._planned_bytes)
        return self.adjuster.way_for(shown, limit, packed=self.trainer.executor.packed)

    @property
    def context_bytes(self) -> int | None:
        """What the process holds outside of torch's allocator; None on a CPU."""
        return getattr(getattr(self.cap, "read", None), "context_bytes", None)

    @property
    def usable_bytes(self) -> int:
        """What tensors may take: the context and the gaps between blocks left out."""
        context_bytes = self.context_bytes
        if context_bytes is None:
            return int(self.limit_bytes * _WITHOUT_ERROR)
        return max(int((self.limit_bytes - context_bytes) * _WITHOUT_GAPS) - _PAGES_BYTES, 0)

    @property
    def _planned_bytes(self) -> int:
        """What the plan's tensors need, if it may be adjusted: more room alone changes nothing."""
        plan = self.trainer.plan
        if plan is None or plan.price is None or self.adjuster.keeps_plan:
            return self.judged_bytes
        return int(plan.price.peak.allocated_bytes * _WITHIN_PLAN)

    @property
    def judged_bytes(self) -> int:
        """The memory that a failed or successful step had available."""
        return self.limit_bytes if self.cap is None else self.usable_bytes

    def standing_tensors(self) -> Iterator[Tensor]:
        """What is there between two steps: weights, gradients, the optimizer's state."""
        model, optimizer = self.trainer.model, self.trainer.optimizer
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            yield from plain_tensors(tensor)
            if tensor.grad is not None:
                yield from plain_tensors(tensor.grad)
        yield from state_tensors(optimizer)

    def _smaller(self, model: nn.Module, way: Way, pieces: StepPieces, failed: str) -> Way:
        if not self.trainer.executor.runs_alone:
            raise RunStoppedError(
                t(
                    "out of memory in step {step}: {failed}; the weights are divided among the "
                    "processes, so that none can run its rows again by itself; use smaller "
                    "micro-batches, a shorter --max-length or more processes",
                    step=self.trainer.state.global_step + 1,
                    failed=failed,
                ),
                self.trainer.checkpoints.last_good,
            )
        smaller = self.adjuster.failed(way, pieces, self.judged_bytes)
        if smaller is None:
            self._stop(model, way, failed)
        assert smaller is not None
        after = t("once more") if smaller == way else str(smaller)
        before = str(replace(way, max_tokens=pieces.tokens))
        self.note(t("out of memory ({failed})", failed=failed), before, after)
        if smaller == way and is_cuda(self._device):
            time.sleep(_WAIT_SECONDS)
        return smaller

    def _went_well(self) -> None:
        before = self.adjuster.widest
        if wider := self.adjuster.succeeded(self.judged_bytes):
            self.note(t("there is room"), str(before), str(wider))

    def _stop(self, model: nn.Module, way: Way, failed: str) -> None:
        trainer = self.trainer
        step = trainer.state.global_step
        last = trainer.checkpoints.last_good
        alone = trainer.ranks.world_size == 1  # the others are inside the step
        if alone and step > 0 and (last is None or last.name != f"checkpoint-{step}"):
            trainer._save_checkpoint(model, None)
        raise RunStoppedError(
            t(
                "out of memory in step {step}, with nothing left to make smaller ({way}): "
                "{failed}; give it a larger --budget, a shorter --max-length or a smaller "
                "model",
                step=step + 1,
                way=way,
                failed=failed,
            ),
            trainer.checkpoints.last_good,
        )

    # ---- what there is to change ----

    def _planned(self) -> Way:
        limits = self.trainer.executor.micro_batching
        return Way(limits.max_tokens, limits.max_rows, self.live.recomputed)

    def _abilities(self) -> Abilities:
        on_cuda = is_cuda(self._device)
        setup = self.trainer.setup
        captured = isinstance(self.trainer.executor, GraphedExecutor)
        return Abilities(
            splits=not setup.single_micro_batch,
            depth=self.live.depth,
            offloads=self.live.offloads,
            captured=captured,
            piece_tokens=512 if on_cuda else 32,
            cut_tokens=_LAUNCHED_TOKENS if captured and setup.make_sink is None else 0,
        )

    def watch_layers(self) -> None:
        """Records how far backward has come, if it moves weights (layer_boundaries.py)."""
        setup = self.trainer.setup
        sink: Any = setup.sink
        if self.boundaries is not None or not getattr(sink, "updates_in_backward", False):
            return
        if not self.live.depth and stack_problem(setup.model, None):
            return
        self.boundaries = LayerBoundaries(setup.model, sink, self._device, self._go_on_smaller)
        setup.undo.append(self.boundaries.remove)

    def _go_on_smaller(self, tries: int) -> None:
        """Recomputes all layers, then waits, before a failed backward pass continues."""
        turns = self.trainer.setup.recomputed
        if turns is not None:
            turns.limit = self.live.depth
        free_memory(self._device)
        if tries and is_cuda(self._device):
            time.sleep(_WAIT_SECONDS)
