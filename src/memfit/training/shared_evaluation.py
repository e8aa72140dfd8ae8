"""An evaluation shared by several ranks: each predicts some batches, all get all answers.

The batches are those of a single process, dealt to the ranks in turn, so every number is the same.
(accelerate fills the last batches with rows of the first, whose losses then count twice.) Nothing
is gathered on a card, and no rank waits for another before the end. If a metric is computed batch
by batch, the last batch is dropped, or the rows are a stream, every rank evaluates all rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from transformers import EvalPrediction, TrainingArguments
from transformers.trainer_pt_utils import nested_concat, nested_truncate
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from memfit.engine.exchange import Peers


class SharedEvaluation:
    """Runs this rank's part of each evaluation."""

    def __init__(self, ranks: Peers) -> None:
        self._ranks = ranks
        self.rows = 0
        """Rows of the current batch."""
        self._counted = 0

    def _own(self, answers: Any) -> Any:
        """The first entries, one for each row of the batch: the Trainer repeats losses."""
        return nested_truncate(answers, self.rows)  # type: ignore[no-untyped-call]

    def run(
        self, trainer: Any, loader: Any, prefix: str, loop: Callable[[], EvalLoopOutput]
    ) -> EvalLoopOutput:
        """Runs the Trainer's loop; joins and scores the answers if batches were dealt to ranks."""
        if self._ranks.world_size == 1:
            return loop()
        score = trainer.compute_metrics
        dealt = getattr(loader, "dealt_to_ranks", False)
        with self._by_itself(trainer, scores=not dealt):
            own = loop()
        return self._joined(own, trainer.args, prefix, score) if dealt else own

    @contextlib.contextmanager
    def _by_itself(self, trainer: Any, *, scores: bool) -> Iterator[None]:
        """Inside, the Trainer's loop exchanges nothing with the other ranks."""
        self._counted = 0
        accelerator, metrics = trainer.accelerator, trainer.compute_metrics
        accelerator.pad_across_processes = lambda tensor, **_: tensor
        trainer.gather_function = self._own
        trainer.compute_metrics = metrics if scores else None
        try:
            yield
        finally:
            del accelerator.pad_across_processes
            trainer.gather_function = accelerator.gather_for_metrics
            trainer.compute_metrics = metrics

    def _joined(
        self,
        own: EvalLoopOutput,
        args: TrainingArguments,
        prefix: str,
        score: Callable[[EvalPrediction], dict[str, Any]] | None,
    ) -> EvalLoopOutput:
        """The answers of all ranks in the order of the rows, with their metrics."""
        metrics = dict(own.metrics or {})
        loss = metrics.pop(f"{prefix}_loss", None)
        found = self._ranks.gathered((own.predictions, own.label_ids, loss, self._counted))
        how: Any = {
            "batch_rows": args.eval_batch_size,
            "in_batches": not args.eval_do_concat_batches,
        }
        predictions = _in_order([one[0] for one in found], **how)
        labels = _in_order([one[1] for one in found], **how)
        known = [(one[2], one[3]) for one in found if one[2] is not None]
        if known:
            total = sum(count for _, count in known)
            metrics[f"{prefix}_loss"] = sum(loss * count for loss, count in known) / total
        if score is not None and predictions is not None and labels is not None:
            whole = EvalPrediction(predictions=predictions, label_ids=labels)
            scored = denumpify_detensorize(score(whole))  # type: ignore[no-untyped-call]
            metrics |= {
                name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value
                for name, value in scored.items()
            }
        return own._replace(predictions=predictions, label_ids=labels, metrics=metrics)

    def note(self, rows: int) -> None:
        """Records how many rows the next batch has."""
        self.rows = rows
        self._counted += rows


def _in_order(found: Sequence[Any], batch_rows: int, *, in_batches: bool) -> Any:
    """Answers of all ranks in the order of a single process; None if there are none."""
    there = [one for one in found if one is not None]
    if not there:
        return None
    if in_batches:
        rounds = max(len(one) for one in there)
        return [one[turn] for turn in range(rounds) for one in there if turn < len(one)]
    joined, starts, counts = there[0], [0], []
    for one in there:
        counts.append(_rows_of(one))
        starts.append(starts[-1] + counts[-1])
    for one in there[1:]:
        joined = nested_concat(joined, one, padding_index=-100)  # type: ignore[no-untyped-call]
    rows = np.arange(starts[-1])
    batch, ranks = rows // batch_rows, len(found)
    rank = batch % ranks
    order = np.array(starts)[rank] + batch // ranks * batch_rows + rows % batch_rows
    return _taken(joined, order)


def _rows_of(answers: Any) -> int:
    if isinstance(answers, dict):
        return _rows_of(next(iter(answers.values())))
    return _rows_of(answers[0]) if isinstance(answers, list | tuple) else len(answers)


def _taken(answers: Any, order: Any) -> Any:
    if isinstance(answers, dict):
        return {name: _taken(value, order) for name, value in answers.items()}
    if isinstance(answers, list | tuple):
        return type(answers)(_taken(value, order) for value in answers)
    return answers[order]
