"""One pass over a table: rows without text or label drop out, the rest goes to an Arrow file."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from memfit.data.columns import Columns
from memfit.data.labels import Coding
from memfit.data.scan import LabelScan, flag_items, label_items
from memfit.data.tables import Row, Table
from memfit.data.values import MULTI_LABEL, SINGLE_LABEL
from memfit.data.workspace import new_file, progress_bar, room_on_disk
from memfit.errors import DataError
from memfit.messages import t

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset

    Array = np.ndarray[Any, Any]

_BATCH_ROWS = 2000
_BATCH_CHARS = 1 << 22


@dataclass(frozen=True)
class CleanRows:
    """The rows that stay, their labels still as written, and what was counted on the way."""

    dataset: Dataset
    scan: LabelScan
    text_hashes: np.ndarray[Any, Any]
    """One number a row, so that duplicates are found without keeping the texts."""
    rows_read: int
    dropped_no_text: int
    dropped_no_label: int


class _Cleaner:
    """Rows in, rows out, with everything counted on the way."""

    def __init__(self, table: Table, columns: Columns) -> None:
        self.where = table.where
        self.columns = columns
        self.scan = LabelScan()
        self.hashes = array("q")
        self.rows_read = self.no_text = self.no_label = 0

    def clean(self, rows: Iterator[Row]) -> Iterator[Row]:
        names, count = self.columns.labels, len(self.columns.texts)
        bar = progress_bar(f"reading {self.where}")
        for row in unbroken(rows, self.where):
            self.rows_read += 1
            bar.update(1)
            texts = [as_text(value, self.where) for value in row[:count]]
            if not all(text.strip() for text in texts):
                self.no_text += 1
                continue
            values = row[count:]
            several = len(names) > 1
            items = flag_items(values, names, self.where) if several else label_items(values[0])
            if items is None:
                self.no_label += 1
                continue
            self.scan.add(items, is_list=isinstance(values[0], list | tuple))
            self.hashes.append(hash(tuple(text.strip() for text in texts)))
            yield (*texts, items)
        bar.close()


def clean_rows(table: Table, columns: Columns) -> CleanRows:
    """Read, drop, count and write; an error where nothing is left."""
    import numpy as np

    cleaner = _Cleaner(table, columns)
    names = ("text", "text_pair", "label") if columns.text_pair else ("text", "label")
    dataset = write_rows(cleaner.clean(table.read(columns.all)), names)
    if cleaner.rows_read == 0:
        raise DataError(t("{where} has a header and no rows; add rows", where=table.where))
    if not cleaner.hashes:
        said = {
            "where": table.where,
            "rows": f"{cleaner.rows_read:,}",
            "no_text": f"{cleaner.no_text:,}",
            "no_label": f"{cleaner.no_label:,}",
            "text": repr(columns.text),
            "label": repr(", ".join(columns.labels)),
        }
        raise DataError(
            t(
                "{where}: none of the {rows} rows can be used ({no_text} without text in "
                "{text}, {no_label} without label in {label}); name other columns or fill these",
                **said,
            )
        )
    return CleanRows(
        dataset,
        cleaner.scan,
        np.array(cleaner.hashes, dtype=np.int64),
        cleaner.rows_read,
        cleaner.no_text,
        cleaner.no_label,
    )


def write_rows(rows: Iterator[Row], names: tuple[str, ...]) -> Dataset:
    """A dataset in an Arrow file of its own, mapped into memory, never held there."""
    import pyarrow
    from datasets import Dataset

    types = {"label": pyarrow.list_(pyarrow.string())}
    schema = pyarrow.schema([(name, types.get(name, pyarrow.string())) for name in names])
    path = str(new_file())
    with (
        room_on_disk(),
        pyarrow.OSFile(path, "wb") as sink,
        pyarrow.ipc.new_stream(sink, schema) as writer,
    ):
        for batch in _batches(rows):
            columns = zip(*batch, strict=True)
            arrays = [
                pyarrow.array(column, kind)
                for column, kind in zip(columns, schema.types, strict=True)
            ]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
    return Dataset.from_file(path)


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Lists of rows, short ones where the texts are long: a batch is what memory holds."""
    batch: list[Row] = []
    chars = 0
    for row in rows:
        batch.append(row)
        chars += len(row[0])
        if len(batch) == _BATCH_ROWS or chars > _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def encode_labels(rows: CleanRows, coding: Coding) -> Dataset:
    """The same rows with `label` as the model learns it; the texts are not written again."""
    import datasets
    from datasets import Features, Value

    kinds = {SINGLE_LABEL: Value("int64"), MULTI_LABEL: datasets.List(Value("float32"))}
    features = Features({"label": kinds.get(coding.space.task, Value("float32"))})
    with room_on_disk():
        labels = rows.dataset.select_columns(["label"]).map(
            lambda batch: {"label": [coding.encode(items) for items in batch["label"]]},
            batched=True,
            features=features,
            load_from_cache_file=False,
            new_fingerprint=uuid4().hex,  # nothing to hash: no result is ever looked up again
        )
    texts = rows.dataset.remove_columns(["label"])
    return datasets.concatenate_datasets([texts, labels], axis=1)


def column_of(dataset: Dataset, name: str) -> Array:
    """A column of numbers, or of lists of equally many, as an array.

    Through Arrow: a list of Python numbers would take five times the memory, and the formatters
    for numpy and torch import a name that torchvision has dropped (0.26).
    """
    import numpy as np

    column = dataset.with_format("arrow")[name][:]
    values = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if hasattr(values.type, "value_type"):
        return np.asarray(values.flatten()).reshape(len(values), -1)
    return np.asarray(values)


def as_text(value: Any, where: str) -> str:
    """A cell as text; '' where there is none."""
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, list | dict | tuple | bytes):
        raise DataError(
            t(
                "{where}: the text column holds {kind} values; name a column of texts with "
                "--text-column",
                where=where,
                kind=type(value).__name__,
            )
        )
    return str(value)


def unbroken(rows: Iterator[Row], where: str) -> Iterator[Row]:
    """The rows, with one sentence where the file fails under them."""
    try:
        yield from rows
    except (UnicodeDecodeError, OSError) as error:
        # The file was opened and its encoding checked before.
        raise DataError(
            t(
                "{path} cannot be read to its end ({reason}); write it again",
                path=where,
                reason=error,
            )
        ) from None
