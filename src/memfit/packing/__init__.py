"""Padding-free batches for stock transformers classifiers."""

from memfit.packing.batch import (
    PackedBatch,
    PackSpec,
    pack,
    padded_on_the_right,
    text_lengths,
    weighted_loss,
)
from memfit.packing.families import pack_spec
from memfit.packing.model import PackedModel, packed
from memfit.packing.support import PackingSupport, can_pack

__all__ = [
    "PackSpec",
    "PackedBatch",
    "PackedModel",
    "PackingSupport",
    "can_pack",
    "pack",
    "pack_spec",
    "packed",
    "padded_on_the_right",
    "text_lengths",
    "weighted_loss",
]
