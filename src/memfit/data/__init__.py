"""A table of texts and labels becomes clean, split, tokenized rows.

`read_table` and `tokenize` are the way in; `table_files` opens every kind of file, `working_files`
holds the Arrow files while the process lives.
"""

from memfit.data.reading import read_labelled, read_table, read_texts
from memfit.data.tables import (
    DataCounts,
    LabelSpace,
    LengthBin,
    LengthSummary,
    TextData,
    TokenizedData,
)
from memfit.data.tokens import tokenize, tokenize_dataset

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
