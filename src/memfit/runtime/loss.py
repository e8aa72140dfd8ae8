"""What a mean loss is a mean of, so that micro-batches can be added up to it exactly.

The loss of an effective batch is  sum_i w_i l_i / sum_i w_i  over its rows. A micro-batch returns
the same formula over its own rows; times its share of sum_i w_i, the micro-batches add up to the
whole. For a plain mean w_i is 1 (0 for an ignored label), for class weights it is the weight of
the row's class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from memfit.errors import ConfigError
from memfit.runtime.batching import IGNORED_LABEL, row_count


def counted_labels(inputs: Mapping[str, Any], label_name: str = "labels") -> float:
    """How many terms the mean has: labels not ignored, or rows where labels are numbers."""
    labels = inputs.get(label_name)
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return row_count(inputs)
    return int(labels.ne(IGNORED_LABEL).sum())


class ClassWeightedLoss:
    """Cross entropy with class weights, or with positive weights for several labels a row.

    The first is a mean weighted by the classes of the rows (as in torch), the second a plain mean.
    """

    def __init__(
        self, class_weights: Sequence[float] | torch.Tensor, label_smoothing: float = 0.0
    ) -> None:
        self.class_weights = torch.as_tensor(class_weights, dtype=torch.float32).cpu()
        if self.class_weights.dim() != 1 or bool(self.class_weights.lt(0).any()):
            raise ConfigError("class_weights must be one number, zero or more, for each class")
        self.label_smoothing = label_smoothing

    def __call__(self, outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        classes = logits.shape[-1]
        if classes != len(self.class_weights):
            raise ConfigError(
                f"class_weights has {len(self.class_weights)} numbers, the model {classes} classes"
            )
        weights = self.class_weights.to(logits)
        if labels.is_floating_point():
            return F.binary_cross_entropy_with_logits(logits, labels.to(logits), pos_weight=weights)
        return F.cross_entropy(
            logits.view(-1, classes),
            labels.view(-1),
            weight=weights,
            label_smoothing=self.label_smoothing,
        )

    def weight_of(self, labels: torch.Tensor) -> float:
        """What the mean is divided by: the class weights of these labels, or their rows."""
        if labels.is_floating_point():
            return len(labels)
        counted = labels[labels.ne(IGNORED_LABEL)]
        return float(self.class_weights.to(counted.device)[counted].sum(dtype=torch.float64))
