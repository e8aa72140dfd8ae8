"""A table as rows that stream, and what reading makes of it: label names, counts, datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memfit.data.working_files import on_disk

if TYPE_CHECKING:
    from datasets import Dataset

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Table:
    """One split of one source; `read(columns)` streams these columns from the start."""

    where: str
    columns: tuple[str, ...]
    read: Callable[[Sequence[str]], Iterator[Row]]
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Columns whose label names the source itself declares, in the order of their ids."""
    encoding: str | None = None
    numbered: bool = False
    """Whether no line names the columns, so that they are called 1, 2, 3."""
    has_header: bool = False
    """Whether the first line names the columns."""


SINGLE_LABEL, MULTI_LABEL, REGRESSION = "single_label", "multi_label", "regression"
TASKS = (SINGLE_LABEL, MULTI_LABEL, REGRESSION)

# transformers' own spelling of the same three.
_PROBLEM_TYPES = {
    SINGLE_LABEL: "single_label_classification",
    MULTI_LABEL: "multi_label_classification",
    REGRESSION: "regression",
}


@dataclass(frozen=True, slots=True)
class LabelSpace:
    """The task and the label names in the order of their ids.

    Regression has one name, that of the column it predicts.
    """

    task: str
    names: tuple[str, ...]

    @property
    def num_labels(self) -> int:
        """How many outputs the classification head needs."""
        return len(self.names)

    @property
    def id2label(self) -> dict[int, str]:
        """Names by id, as the model's config stores them."""
        return dict(enumerate(self.names))

    @property
    def label2id(self) -> dict[str, int]:
        """Ids by name, as the model's config stores them."""
        return {name: number for number, name in enumerate(self.names)}

    @property
    def problem_type(self) -> str:
        """The task in transformers' spelling."""
        return _PROBLEM_TYPES[self.task]


@dataclass(frozen=True, kw_only=True)
class DataCounts:
    """Where every row went: rows_read = both drops + train_rows + validation_rows."""

    rows_read: int
    dropped_no_text: int
    dropped_no_label: int
    train_rows: int
    validation_rows: int
    duplicates_across_split: int
    """Validation rows whose text also occurs in training; reported, not removed."""
    contradicting_rows: int = 0
    """Rows whose text another row has with another label."""
    contradicting_example: str = ""
    """How the first of these texts begins."""
    train_class_counts: Mapping[str, int] = field(default_factory=dict)
    validation_class_counts: Mapping[str, int] = field(default_factory=dict)
    text_column: str = ""
    text_pair_column: str | None = None
    label_column: str = ""
    group_column: str | None = None
    groups: int | None = None
    """Groups whose rows were kept on one side of the split; None where there are none."""
    encoding: str | None = None
    """How the text file was read; None where the format fixes it (Parquet, the Hub)."""


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Rows of `first_tokens` to `last_tokens` tokens, both included."""

    first_tokens: int
    last_tokens: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class LengthSummary:
    """Tokens per row before cutting, special tokens included; training and validation together."""

    count: int
    mean: float
    p50: int
    p90: int
    p99: int
    max: int
    max_length: int
    cut_rows: int
    """Rows longer than `max_length`, which lose their end."""
    histogram: tuple[LengthBin, ...]
    most_tokens: int | None = None
    """The longest text the model reads; None where that is not known."""
    unknown_share: float = 0.0
    """The share of the training tokens that the vocabulary lacks."""
    unknown_example: str = ""
    """How a training text with most of them begins."""

    @property
    def cut_fraction(self) -> float:
        """The share of rows that `max_length` cuts."""
        return self.cut_rows / self.count if self.count else 0.0


@dataclass(frozen=True)
class TextData:
    """Columns `text`, optional `text_pair`, and `label`.

    `label` is an id, a list of 0.0 and 1.0 (multi-label) or a number (regression).
    """

    train: Dataset
    validation: Dataset
    labels: LabelSpace
    counts: DataCounts


@dataclass(frozen=True)
class TokenizedData:
    """What the tokenizer gives (`input_ids`, `attention_mask`, …) and `labels`; not padded."""

    train: Dataset
    validation: Dataset
    lengths: LengthSummary

    def on_disk(self) -> TokenizedData:
        """The same rows, all in files that other processes of this machine can map."""
        return TokenizedData(on_disk(self.train), on_disk(self.validation), self.lengths)
