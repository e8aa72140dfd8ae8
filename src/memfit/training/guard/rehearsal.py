"""The largest batch there can be, tried before the first step.

    try       forward and backward of the worst batch, made smaller until it fits
    correct   the plan's line of memory, by what that took; without a plan half of the batch is
              tried too, and the line goes through both
    dress     the whole step as it will be run: graphs captured, the update made with its gate shut
    evaluate  the longest rows of an evaluation
    time      a usual batch, warm

Every rank does it by itself. Nothing of it leaves a trace: no weight and no state moves,
random numbers are put back. After it the process holds all it will hold: kernels are compiled,
libraries loaded, the largest graph captured.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from memfit.engine.executors import StepExecutor
from memfit.engine.micro_batches import Batch, has_rows, lengths_of, row_lengths
from memfit.engine.step_state import preserved_rng
from memfit.errors import DoesNotFitError
from memfit.i18n import t
from memfit.memory.device import is_cuda, synchronize
from memfit.memory.memory_line import MemoryLine, MemoryPoint
from memfit.training.guard.adjusting import Pieces, StepSettings, pieces_of
from memfit.training.limits import LiveBytes
from memfit.training.loaders import of_all_rows

if TYPE_CHECKING:
    from memfit.training.guard.step_guard import Guard
    from memfit.training.trainer import BudgetTrainer

_FORWARD_SHARE = 1 / 3
"""A forward pass against forward and backward, which takes twice as long."""

_UPDATE_BYTES = 40
"""Of a parameter: its gradient is read for the norm, then read and scaled; AdamW reads weight,
gradient and two moments, and writes three of them."""

_SAVED_BYTES_PER_SECOND = 7.5e8
"""Speed of saving: copied to the host, written, read for its checksum and flushed."""


def update_seconds(trainer: BudgetTrainer) -> float:
    """Seconds of the optimizer's update after each backward, by the speed of memory.

    0 if the rehearsed step contains the update, or if it happens elsewhere.
    """
    if trainer.setup.sink is not None or trainer.setup.make_optimizer is not None:
        return 0.0
    learning = [one for one in trainer.model.parameters() if one.requires_grad]
    largest = max(learning, key=torch.Tensor.numel)
    seconds = []
    with torch.no_grad():
        for _ in range(2):  # the first loads the kernel
            started = time.perf_counter()
            largest.mul_(1)  # every bit stays as it is
            synchronize(largest.device)
            seconds.append(time.perf_counter() - started)
    each = min(seconds) / max(2 * largest.nbytes, 1)
    return each * _UPDATE_BYTES * sum(one.numel() for one in learning)


def seconds_between_steps(trainer: BudgetTrainer, found: Rehearsal) -> float:
    """Seconds that evaluations and checkpoints take before the last step."""
    args, state = trainer.args, trainer.state
    steps = state.max_steps - state.global_step
    an_epoch = max(round(state.max_steps / max(state.num_train_epochs, 1)), 1)
    evaluation = found.evaluation_seconds
    if evaluation is None:
        dataset: Any = trainer.eval_dataset
        rows = len(dataset) if hasattr(dataset, "__len__") else 0
        batches = rows / max(args.per_device_train_batch_size, 1)
        evaluation = batches * found.step_seconds * _FORWARD_SHARE
    saving = trainer.checkpoints.size_bytes / _SAVED_BYTES_PER_SECOND
    evaluations = _before_the_last(args.eval_strategy, state.eval_steps, steps, an_epoch)
    saves = _before_the_last(args.save_strategy, state.save_steps, steps, an_epoch)
    return evaluations * evaluation / trainer.ranks.count + saves * saving


def _before_the_last(strategy: Any, every: int | None, steps: int, an_epoch: int) -> int:
    kind = str(getattr(strategy, "value", strategy))
    each = {"epoch": an_epoch, "steps": every or 0}.get(kind, 0)
    return max(steps - 1, 0) // each if each else 0


LONG_SECONDS = 5.0
"""A step that takes this long is not tried a second time."""

_QUICK_SECONDS = 1.0
"""On a CPU, where nothing is compiled or captured, only steps this quick are tried once more."""

_LOOKED_FOR_LABELS = 1000
"""Rows that are looked at for a label that counts, the longest first."""

_MISSED = 1.05
"""A plan that does not fit is taken to need so many times its limit."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Time and memory of the largest and of a usual batch, before the first step."""

    step_seconds: float
    """An average step after warm-up. It contains the update only if there is a sink."""
    peak_bytes: int
    """The highest moment of the largest batch."""
    worst_lengths: tuple[int, ...]
    evaluation_seconds: float | None = None
    """All rows of one evaluation, on one rank; None where none was tried."""
    pieces: int = 1
    """Micro-batches of a usual step."""


@dataclass(frozen=True, slots=True)
class _Tried:
    pieces: Pieces
    all_tokens: int
    peak_bytes: int
    seconds: float


def rehearse(guard: Guard, loader: Any) -> Rehearsal | None:
    """Rehearses the batch of the longest rows. Returns None if rows cannot be read beforehand."""
    dataset: Any = getattr(loader, "dataset", None)
    if not has_rows(dataset):
        return None
    return _Stage(guard, dataset, of_all_rows(loader.collate_fn)).play()


class _Stage:
    def __init__(self, guard: Guard, dataset: Any, collate: Callable[..., Batch]) -> None:
        self._guard = guard
        self._trainer = trainer = guard.trainer
        self._dataset = dataset
        self._collate = collate
        self._device: torch.device = trainer.args.device
        self._packed = trainer.executor.packed
        count = min(trainer.args.per_device_train_batch_size, len(dataset))
        self._by_length = longest_rows(dataset, len(dataset))
        self._longest = self._by_length[:count]
        self._count = count
        self._usual_pieces = 1
        self._was_cut = False
        """Whether the plan's line of memory was used to make the largest batch smaller."""

    def play(self) -> Rehearsal:
        model, guard = self._trainer.model, self._guard
        model.train()
        with preserved_rng():
            worst = self._batch(self._longest)
            lengths = lengths_of(worst, self._trainer.executor.trim)
            guard.worst_lengths = lengths
            tried = self._until_it_fits(worst, lengths)
            self._correct_line(tried)
            if is_cuda(self._device) or tried.seconds <= _QUICK_SECONDS:
                self._until_it_fits(worst, lengths, dressed=1)
            self._dress_fullest()
            evaluating = self._evaluate_beside(worst, lengths) if is_cuda(self._device) else None
            guard.measure()
            seconds = self._usual_seconds(tried) + update_seconds(self._trainer)
        return Rehearsal(seconds, tried.peak_bytes, tuple(lengths), evaluating, self._usual_pieces)

    def _correct_line(self, tried: _Tried) -> None:
        """Makes the line of memory pass through what the largest batch took."""
        guard = self._guard
        if guard.cap is None:
            return
        kept = guard.dials.kept_layers(guard.settings)
        line = guard.line or self._measured_line(tried)
        if line is not None:
            measured = MemoryPoint(tried.pieces.tokens, kept, tried.peak_bytes)
            guard.line = line.corrected(measured)
            guard.proven = guard.limit_bytes, tried.peak_bytes

    def _measured_line(self, tried: _Tried) -> MemoryLine | None:
        """Returns a line through the largest batch and half of it; it knows nothing of layers."""
        tokens, settings = tried.pieces.tokens, self._guard.settings
        if tried.pieces.count > 1:  # half of the rows would be cut into the same pieces
            settings = replace(settings, max_tokens=max(tokens // 2, 1))
        half, _ = self._try(self._batch(self._longest[::2]), settings)
        if half is None or half.pieces.tokens >= tokens:
            return None
        points = ((one.pieces.tokens, one.peak_bytes) for one in (tried, half))
        return MemoryLine.through([MemoryPoint(size, 0, peak) for size, peak in points])

    # ---- trying ----

    def _batch(self, rows: list[int]) -> Batch:
        """Collates these rows; the last gives way to a row with a label where none has one.

        The longest rows of good data may hold ignored labels only, and then have no mean loss.
        """
        batch: Batch = self._collate([self._dataset[row] for row in rows])
        if self._trainer.loss_weight(batch) > 0:
            return batch
        for row in self._by_length[:_LOOKED_FOR_LABELS]:
            if self._trainer.loss_weight(self._collate([self._dataset[row]])) > 0:
                return self._collate([self._dataset[one] for one in (*rows[:-1], row)])
        return batch

    def _until_it_fits(self, batch: Batch, lengths: list[int], *, dressed: int = 0) -> _Tried:
        """Runs a batch, with smaller settings until it fits.

        Dressed, it runs as in training: with its update, and from a graph if steps are.
        """
        guard = self._guard
        while True:
            settings = guard.settings_for(lengths)
            pieces = pieces_of(lengths, settings.micro_batching, packed=self._packed)
            tried, failed = self._try(batch, settings, dressed=dressed)
            if dressed:
                guard.measure()
            if tried is not None:
                return tried
            self._make_smaller(settings, pieces, lengths, failed)

    def _make_smaller(
        self, used: StepSettings, pieces: Pieces, lengths: list[int], failed: str
    ) -> None:
        """Cuts what did not fit: first by the plan's line of memory, then by halves."""
        guard, smaller = self._guard, None
        if guard.line is not None and guard.proven is None and not self._was_cut:
            limit_bytes = guard.usable_bytes
            kept = guard.dials.kept_layers(used)
            missed = MemoryPoint(pieces.tokens, kept, _MISSED * limit_bytes)
            line = guard.line.corrected(missed)
            smaller = guard.dials.fitting(used, lengths, line, limit_bytes, packed=self._packed)
            guard.settings, self._was_cut = smaller, True
        if smaller is None or smaller == used:
            smaller = guard.failed(used, pieces)
        if smaller is None:
            raise DoesNotFitError(
                "the longest row alone does not fit ({way}): {failed}; raise --budget, or "
                "choose a shorter --max-length or a smaller model",
                way=used,
                failed=failed,
            )
        guard.note(
            t("the largest batch was tried and did not fit ({failed})", failed=failed),
            str(replace(used, max_tokens=pieces.tokens)),
            str(smaller),
        )

    def _dress_fullest(self) -> None:
        """Runs the largest micro-batch that is not cut; the worst batch is cut into even parts."""
        lengths = self._guard.worst_lengths
        assert lengths is not None
        limits = self._guard.settings_for(lengths).micro_batching
        parts = pieces_of(lengths, limits, packed=self._packed)
        if not is_cuda(self._device) or parts.count == 1:
            return
        count = next(
            count
            for count in range(len(lengths), 0, -1)
            if count == 1 or pieces_of(lengths[:count], limits, packed=self._packed).count == 1
        )
        batch = self._batch(self._longest[:count])
        lengths = lengths_of(batch, self._trainer.executor.trim)
        if pieces_of(lengths, limits, packed=self._packed).tokens > parts.tokens:
            self._until_it_fits(batch, lengths, dressed=1)

    def _evaluate_beside(self, worst: Batch, lengths: list[int]) -> float | None:
        """Evaluates while the training's graphs are held.

        An evaluation that runs out of memory drops them. They are captured again here: otherwise
        the step that is timed next would capture them.
        """
        graphs = self._trainer.executor.captured_graphs
        seconds = self._evaluate()
        if self._trainer.executor.captured_graphs < graphs:
            self._until_it_fits(worst, lengths, dressed=1)
            self._dress_fullest()
        return seconds

    def _evaluate(self) -> float | None:
        """Predicts the longest rows of an evaluation, in smaller pieces if necessary.

        Returns the seconds of a whole evaluation, by a batch of rows from all over the data.
        """
        trainer = self._trainer
        if trainer.args.eval_strategy == "no":
            return None
        dataset = trainer.eval_dataset
        if isinstance(dataset, dict) or not has_rows(dataset):
            return None
        loader: Any = trainer.get_eval_dataloader(dataset)
        size = len(loader.dataset)
        count = min(trainer.args.per_device_eval_batch_size, size)
        model: Any = trainer.model
        model.eval()
        try:
            self._predict(loader, longest_rows(loader.dataset, count))
            usual = [index * size // count for index in range(count)]
            return self._predict(loader, usual) * size / max(count, 1)
        finally:
            model.train()

    def _predict(self, loader: Any, rows: list[int]) -> float:
        """The seconds that these rows take in an evaluation."""
        started = time.perf_counter()
        batch = loader.collate_fn([loader.dataset[row] for row in rows])
        with torch.no_grad():
            self._trainer.prediction_step(self._trainer.model, batch, prediction_loss_only=False)
        synchronize(self._device)
        return time.perf_counter() - started

    def _try(
        self, batch: Batch, settings: StepSettings, *, dressed: int = 0, metered: bool = True
    ) -> tuple[_Tried | None, str]:
        """Runs forward and backward, or several whole steps. On a CPU counting bytes is slow."""
        model, guard = self._trainer.model, self._guard
        lengths = lengths_of(batch, self._trainer.executor.trim)
        pieces = pieces_of(lengths, settings.micro_batching, packed=self._packed)
        peak = PeakMeter(self._device, guard.standing_tensors)

        def run(executor: StepExecutor) -> None:
            with peak.measuring() if metered else contextlib.nullcontext():
                if dressed:
                    executor.dress(model, batch, dressed)
                else:
                    executor.rehearse(model, batch)

        started = time.perf_counter()
        _, failed = guard.attempt(run, settings, pieces)
        seconds = time.perf_counter() - started
        guard.clear(model, free=bool(failed))
        if failed:
            return None, failed
        if is_cuda(self._device):
            # Steps of other sizes leave gaps that the training's own would be laid around.
            torch.cuda.empty_cache()
        return _Tried(pieces, sum(lengths), peak.bytes, seconds), ""

    def _usual_seconds(self, tried: _Tried) -> float:
        """Seconds of a step on rows from all over the data, after warm-up."""
        size = len(self._dataset)
        usual = self._batch([index * size // self._count for index in range(self._count)])
        lengths = lengths_of(usual, self._trainer.executor.trim)
        on_cuda = is_cuda(self._device)  # where the first try compiled its kernels
        if on_cuda or tried.seconds <= LONG_SECONDS:
            settings = self._guard.settings_for(lengths)
            pieces = pieces_of(lengths, settings.micro_batching, packed=self._packed)
            self._usual_pieces = pieces.count
            if on_cuda:  # its kernels are compiled, its graph is captured when it comes again
                self._try(usual, settings, dressed=2)
            again, _ = self._try(usual, settings, dressed=int(on_cuda), metered=on_cuda)
            if again is not None:
                return again.seconds
        return tried.seconds * sum(lengths) / max(tried.all_tokens, 1)


def longest_rows(dataset: Any, count: int) -> list[int]:
    """The rows with most tokens; any rows if their lengths are unknown."""
    try:
        lengths = row_lengths(dataset)
    except (KeyError, TypeError):  # rows of something else than tokens
        lengths = []
    order = range(len(dataset))
    if len(lengths) == len(dataset):
        order = sorted(order, key=lambda row: -lengths[row])  # type: ignore[assignment]
    return list(order[:count])


class PeakMeter:
    """The most that tensors took while something ran."""

    def __init__(self, device: torch.device, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._device = device
        self._tensors = tensors
        self.bytes = 0

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """On CUDA the allocator's own peak is reset for it."""
        if is_cuda(self._device):
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            torch.cuda.synchronize(self._device)
            self.bytes = torch.cuda.max_memory_allocated(self._device)
            return
        counter = LiveBytes()
        counter.adopt(self._tensors())
        with counter:
            yield
        self.bytes = counter.peak_bytes
