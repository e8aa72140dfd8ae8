"""What a mean loss is a mean of, so that micro-batches add up exactly; NEFTune's noise too.

The loss of an effective batch is  sum_i w_i l_i / sum_i w_i  over its rows. A micro-batch returns
the same formula over its own rows; times its share of sum_i w_i, the micro-batches add up to the
whole. For a plain mean w_i is 1 (0 for an ignored label), for class weights it is the weight of
the row's class; where every token has a label, the terms are tokens.

The Trainer adds noise of up to alpha / sqrt(width x hidden size) to the embeddings and reads the
width from what they return. A packed micro-batch is as wide as all its texts together, and one
without its padding is narrower than its batch: both would get other noise than was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from memfit.engine.micro_batches import Batch, row_count, rows_of
from memfit.engine.packed_batch import IGNORED_LABEL
from memfit.errors import ConfigError
from memfit.models.layer_stack import unwrap

_ANSWER = "start_positions"
_ANSWERS = (_ANSWER, "end_positions")

_SAME_SHARE = 1e-6


def counted_labels(inputs: Any, label_name: str = "labels", *, shifted: bool = False) -> float:
    """How many terms the mean has: labels not ignored, or rows where labels are numbers.

    A causal language model's loss is `shifted`: nothing predicts a row's first token.
    """
    labels = _labels_of(inputs, label_name)
    if labels is None or labels.is_floating_point():
        return row_count(inputs)
    if label_name == _ANSWER and (ids := inputs.get("input_ids")) is not None:
        return int(labels.lt(ids.shape[1]).sum())  # an answer beyond the text is ignored
    return counted_items(inputs, label_name, shifted=shifted)


def counted_items(inputs: Any, label_name: str = "labels", *, shifted: bool = False) -> float:
    """The Trainer's `num_items_in_batch`: every entry of the labels that is not ignored."""
    labels = _labels_of(inputs, label_name)
    if labels is None:
        return row_count(inputs)
    if isinstance(given := inputs.get("shift_labels"), torch.Tensor):
        labels = given
    elif shifted:
        labels = labels[..., 1:]
    return int(labels.ne(IGNORED_LABEL).sum())


def parts_of_loss(
    inputs: Any, label_names: Sequence[str], *, shifted: bool = False
) -> dict[str, float]:
    """The terms of each mean that a head adds up, by the labels it is taken over.

    BertForPreTraining adds a mean over masked tokens and a mean over rows; question answering adds
    a mean over starts and a mean over ends.
    """
    names = [name for name in label_names if _labels_of(inputs, name) is not None]
    answers = _ANSWERS if set(_ANSWERS) <= set(names) else ()
    counts = {}
    for name in names:
        labels = _labels_of(inputs, name)
        assert labels is not None
        if name in answers and (ids := inputs.get("input_ids")) is not None:
            counts[name] = float(labels.lt(ids.shape[1]).sum())  # beyond the text: ignored
        else:
            tokens = shifted and labels.dim() > 1
            counts[name] = counted_labels(inputs, name, shifted=tokens)
    return counts


def share_alike(parts: Sequence[Mapping[str, float]]) -> bool:
    """Whether every micro-batch has the same share in each mean, so that one weight serves all."""
    names = list(parts[0])
    totals = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    for part in parts:
        shares = [part.get(name, 0.0) / totals[name] if totals[name] else -1.0 for name in names]
        if shares and max(shares) - min(shares) > _SAME_SHARE:
            return False
    return True


def only_first_label(inputs: Mapping[str, Any], label_name: str) -> Batch | None:
    """One row with a label for its first token and no other; None where no row has a label.

    The loss of a head that shifts its labels is a mean of nothing then: NaN or zero.
    """
    labels = inputs[label_name]
    counted = labels.ne(IGNORED_LABEL)
    rows = counted.flatten(1).any(1).nonzero().flatten().tolist()
    if not rows:
        return None
    batch: Batch = rows_of(dict(inputs), rows[:1])
    first = torch.full_like(batch[label_name], IGNORED_LABEL)
    first[:, :1] = labels[rows[0]][counted[rows[0]]].flatten()[0]
    return {**batch, label_name: first}


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's name and configuration say that its loss shifts labels."""
    inner: Any = unwrap(model)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        return False
    named = LOSS_MAPPING.get(getattr(inner, "loss_type", None) or "")
    # Those whose class has another name (GPT2LMHeadModel) fall back to that loss.
    causal = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return named is ForCausalLMLoss or (named is None and causal)


def _labels_of(inputs: Any, label_name: str) -> torch.Tensor | None:
    labels = inputs.get(label_name) if isinstance(inputs, Mapping) else None
    return labels if isinstance(labels, torch.Tensor) else None


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
                "class_weights has {count} numbers, the model {classes} classes",
                count=len(self.class_weights),
                classes=classes,
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


_ALPHA = "neftune_noise_alpha"


class BatchNoise(TrainerCallback):
    """Sets the embeddings' alpha for each call, so that the noise is that of the whole batch."""

    def __init__(self) -> None:
        self._alpha = 0.0
        self._width: int | None = None
        self._handle: RemovableHandle | None = None

    def begin_step(self, batch: Any) -> None:
        """Note how wide the collator has made this batch."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        self._width = ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None

    def on_train_begin(self, args: Any, *_: Any, model: Any = None, **__: Any) -> None:
        """Called by the Trainer, which has made the embeddings noisy by now."""
        self._remove()
        if args.neftune_noise_alpha is not None:
            self._alpha = args.neftune_noise_alpha
            inner: Any = unwrap(model)
            self._handle = inner.get_input_embeddings().register_forward_pre_hook(self._rescale)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Called by the Trainer."""
        self._remove()

    def _rescale(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._width and args and args[0].dim() == 2 and hasattr(module, _ALPHA):
            setattr(module, _ALPHA, self._alpha * math.sqrt(args[0].shape[1] / self._width))

    def _remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle, self._width = None, None
