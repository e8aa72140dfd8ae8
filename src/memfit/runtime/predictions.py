"""The predictions of micro-batches, put together as if the batch had been run whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers.trainer_pt_utils import nested_concat
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

from memfit.runtime.batching import IGNORED_LABEL, MicroBatch

Prediction = tuple[torch.Tensor | None, Any, Any]
"""Loss, logits and labels as `Trainer.prediction_step` returns them."""


def merged(
    parts: Sequence[MicroBatch], weights: Sequence[float], predictions: Sequence[Prediction]
) -> Prediction:
    """One prediction in the batch's own row order; the loss is the mean over all rows."""
    order = [row for part in parts for row in part.rows]
    position = {row: index for index, row in enumerate(order)}
    back = [position[row] for row in range(len(order))]
    losses, logits, labels = zip(*predictions, strict=True)
    return _mean(losses, weights), _joined(logits, back), _joined(labels, back)


def to_cpu(prediction: Prediction) -> Prediction:
    """The same off the device: an evaluation of any size keeps one batch there."""
    loss, logits, labels = (send_to_device(part, "cpu") for part in prediction)
    return loss, logits, labels


def logits_and_labels(output: EvalLoopOutput | PredictionOutput) -> tuple[Any, Any]:
    """Without the hidden states that some heads return after the logits."""
    logits = output.predictions
    return logits[0] if isinstance(logits, tuple) else logits, output.label_ids


def _mean(losses: Sequence[torch.Tensor | None], weights: Sequence[float]) -> torch.Tensor | None:
    counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight > 0]
    total = sum(weight for _, weight in counted)
    terms = [loss * (weight / total) for loss, weight in counted if loss is not None]
    return torch.stack(terms).sum() if terms else losses[0]


def _joined(pieces: Sequence[Any], back: list[int]) -> Any:
    whole = pieces[0]
    for piece in pieces[1:]:
        if piece is not None:
            whole = nested_concat(  # type: ignore[no-untyped-call]
                whole, piece, padding_index=IGNORED_LABEL
            )
    return _reordered(whole, back)


def _reordered(value: Any, back: list[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return value[back] if value.dim() > 0 and len(value) == len(back) else value
    if isinstance(value, Mapping):
        return {name: _reordered(part, back) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_reordered(part, back) for part in value)
    return value
