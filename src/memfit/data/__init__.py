"""Tables of texts and labels: read, clean, split, tokenize."""

from __future__ import annotations

from memfit.data.reading import read_labelled, read_table, read_texts
from memfit.data.tokens import tokenize, tokenize_dataset
from memfit.data.values import (
    DataCounts,
    LabelSpace,
    LengthBin,
    LengthSummary,
    TextData,
    TokenizedData,
)

__all__ = [
    "DataCounts",
    "LabelSpace",
    "LengthBin",
    "LengthSummary",
    "TextData",
    "TokenizedData",
    "read_labelled",
    "read_table",
    "read_texts",
    "tokenize",
    "tokenize_dataset",
]
