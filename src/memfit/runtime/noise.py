"""NEFTune's noise as large as in the stock Trainer, however a batch is cut and packed.

The Trainer adds noise of up to alpha / sqrt(width x hidden size) to the embeddings and reads the
width from what they return. A packed micro-batch is as wide as all its texts together, and one
without its padding is narrower than its batch: both would get other noise than was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from memfit.packing.families import unwrap

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
