"""From a path to clean, labelled, split rows."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from memfit.data.columns import Columns, choose_columns, choose_texts, require_columns
from memfit.data.labels import (
    Coding,
    LabelScan,
    choose_coding,
    coding_for,
    flag_items,
    label_items,
    shorten,
)
from memfit.data.splitting import contradictions, count_shared, numbered, split_rows
from memfit.data.table_files import open_file, open_source
from memfit.data.tables import (
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    DataCounts,
    LabelSpace,
    Row,
    Table,
    TextData,
)
from memfit.data.working_files import new_file, progress_bar, quiet_datasets, room_on_disk
from memfit.errors import DataError
from memfit.i18n import t

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset

    from memfit.config import DataConfig

    Array = np.ndarray[Any, Any]

_BATCH_ROWS = 2000
_BATCH_CHARS = 1 << 22
_LONGEST_TEXT = 1 << 24
"""Characters; what is longer is no text to classify, and a file of it would fill the memory."""


class CleanRows:
    """The rows of a table that have text and label, their labels still as written, with counts."""

    dataset: Dataset
    text_hashes: Array
    """One number a row, so that duplicates are found without keeping the texts."""
    group_hashes: Array
    """Hashes of the --group-column; empty without one."""

    def __init__(self, table: Table, columns: Columns, *, no_tag: bool = False) -> None:
        """Reads, drops, counts and writes the rows; an error where nothing is left.

        `no_tag`: an empty label cell is a row of several labels that has none of them.
        """
        import numpy as np

        self._table, self._columns, self._no_tag = table, columns, no_tag
        self._texts, self._groups = array("q"), array("q")
        self.scan = LabelScan()
        self.rows_read = self.dropped_no_text = self.dropped_no_label = 0
        names = ("text", "text_pair", "label") if columns.text_pair else ("text", "label")
        self.dataset = write_rows(self._read(), names)
        if self.rows_read == 0:
            raise DataError("{where} has a header and no rows; add rows", where=table.where)
        if not self._texts:
            raise DataError(
                "{where}: none of the {rows} rows can be used ({no_text} without text in "
                "{text}, {no_label} without label in {label}); name other columns or fill these",
                where=table.where,
                rows=f"{self.rows_read:,}",
                no_text=f"{self.dropped_no_text:,}",
                no_label=f"{self.dropped_no_label:,}",
                text=repr(columns.text),
                label=repr(", ".join(columns.labels)),
            )
        self.text_hashes = np.array(self._texts, dtype=np.int64)
        self.group_hashes = np.array(self._groups, dtype=np.int64)

    def _read(self) -> Iterator[Row]:
        columns, where = self._columns, self._table.where
        names, count = columns.labels, len(columns.texts)
        bar = progress_bar(f"reading {where}")
        for row in unbroken(self._table.read(columns.all), where):
            self.rows_read += 1
            bar.update(1)
            texts = [as_text(value, where) for value in row[:count]]
            if not all(text.strip() for text in texts):
                self.dropped_no_text += 1
                continue
            values = row[count : count + len(names)]
            several = len(names) > 1
            items = flag_items(values, names, where) if several else label_items(values[0])
            if items is None and self._no_tag and not several:
                items = []
            if items is None:
                self.dropped_no_label += 1
                continue
            self.scan.add(items, is_list=isinstance(values[0], list | tuple))
            self._texts.append(hash(tuple(text.strip() for text in texts)))
            if columns.group is not None:
                group = as_text(row[-1], where).strip()
                self._groups.append(hash(group or (self.rows_read,)))  # without one: alone
            yield (*texts, items)
        bar.close()


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

        def write(batch: list[Row]) -> None:
            columns = zip(zip(*batch, strict=True), schema.types, strict=True)
            arrays = [pyarrow.array(column, kind) for column, kind in columns]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))

        batch: list[Row] = []
        chars = 0
        for row in rows:
            batch.append(row)
            chars += len(row[0])
            if len(batch) == _BATCH_ROWS or chars > _BATCH_CHARS:  # what memory holds
                write(batch)
                batch, chars = [], 0
        if batch:
            write(batch)
    return Dataset.from_file(path)


def encode_labels(rows: CleanRows, coding: Coding) -> Dataset:
    """Returns the rows with `label` as the model learns it, without writing the texts again."""
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
        if len(value) > _LONGEST_TEXT:
            raise DataError(
                "{where}: a text has {chars} characters, and {most} are the most; cut it, or name "
                "another --text-column",
                where=where,
                chars=f"{len(value):,}",
                most=f"{_LONGEST_TEXT:,}",
            )
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, list | dict | tuple | bytes):
        raise DataError(
            "{where}: the text column holds {kind} values; name a column of texts with "
            "--text-column",
            where=where,
            kind=type(value).__name__,
        )
    return str(value)


def unbroken(rows: Iterator[Row], where: str) -> Iterator[Row]:
    """The rows, with one sentence where the file fails under them."""
    try:
        yield from rows
    except (UnicodeDecodeError, OSError) as error:
        # The file was opened and its encoding checked before.
        raise DataError(
            "{path} cannot be read to its end ({reason}); write it again", path=where, reason=error
        ) from None


def _contradicting(*tables: tuple[CleanRows, Dataset], space: LabelSpace) -> dict[str, Any]:
    """How many rows of all tables contradict each other, and how the first one begins."""
    import numpy as np

    hashes = np.concatenate([rows.text_hashes for rows, _ in tables])
    labels = np.concatenate([column_of(dataset, "label") for _, dataset in tables])
    found = contradictions(hashes, labels, space)
    if not len(found):
        return {}
    first, dataset = int(found[0]), tables[0][1]
    if first >= len(dataset):
        first, dataset = first - len(dataset), tables[1][1]
    example = shorten(" ".join(dataset[first]["text"].split()))[1:-1]
    return {"contradicting_rows": len(found), "contradicting_example": example}


def class_counts(labels: Array, space: LabelSpace) -> dict[str, int]:
    """Rows of every class (multi-label: rows that have it); nothing for regression."""
    import numpy as np

    if space.task == SINGLE_LABEL:
        totals = np.bincount(labels, minlength=space.num_labels)
    elif space.task == MULTI_LABEL:
        totals = (labels > 0).sum(axis=0)
    else:
        return {}
    return {name: int(total) for name, total in zip(space.names, totals, strict=True)}


def read_table(config: DataConfig) -> TextData:
    """The rows that train and the rows that validate, with label names and counts."""
    table, validation_table = open_source(config.path, config.encoding, config.header)
    if config.validation_file is not None:
        path = Path(config.validation_file).expanduser()
        if path.is_dir():
            validation_table, _ = open_source(str(path), config.encoding)
        else:
            validation_table = open_file(path, config.encoding, config.header)
    columns = choose_columns(table, config)
    if validation_table is not None and columns.group is not None:
        raise DataError(
            "--group-column keeps groups together when a table is split, and {where} is "
            "validated on as it is; leave it out",
            where=validation_table.where,
        )
    if validation_table is not None:
        require_columns(validation_table, columns, table.where)
    with quiet_datasets():
        rows = CleanRows(table, columns)
        coding = _coding(table, columns, rows, config)
        if coding.space.task == MULTI_LABEL and rows.dropped_no_label:
            rows = CleanRows(table, columns, no_tag=True)
        if validation_table is None:
            return _split(table, columns, rows, coding, config)
        return _with_validation(table, validation_table, columns, rows, coding)


def read_labelled(config: DataConfig, labels: LabelSpace) -> tuple[Dataset, DataCounts]:
    """All rows of a table for a model that exists already, with that model's label ids.

    They are counted as validation rows. Labels are the model's names, its ids, or what
    `config.label_names` translates to its names.
    """
    table, _ = open_source(config.path, config.encoding, config.header)
    columns = choose_columns(table, config)
    with quiet_datasets():
        rows = CleanRows(table, columns, no_tag=labels.task == MULTI_LABEL)
        coding = coding_for(labels, rows.scan, config.label_names, table.where)
        coding.check(rows.scan, table.where, of=t("the model"))
        dataset = encode_labels(rows, coding)
        found = class_counts(column_of(dataset, "label"), labels)
    return dataset, DataCounts(
        rows_read=rows.rows_read,
        dropped_no_text=rows.dropped_no_text,
        dropped_no_label=rows.dropped_no_label,
        train_rows=0,
        validation_rows=len(dataset),
        duplicates_across_split=0,
        validation_class_counts=found,
        **_described(table, columns),
    )


def read_texts(
    path: str,
    text_column: str | None = None,
    text_pair_column: str | None = None,
    encoding: str | None = None,
    header: bool | None = None,
) -> Dataset:
    """All texts of a table in order, labels not needed; an empty text stays, as ''."""
    unnamed = text_column is None and text_pair_column is None
    table, _ = open_source(path, encoding, header, only_texts=unnamed)
    wanted = [name for name in choose_texts(table, text_column, text_pair_column) if name]

    def texts() -> Iterator[Row]:
        for row in unbroken(table.read(wanted), table.where):
            yield tuple(as_text(value, table.where) for value in row)

    with quiet_datasets():
        dataset = write_rows(texts(), ("text", "text_pair")[: len(wanted)])
    if not len(dataset):
        raise DataError("{where} has a header and no rows; add rows", where=table.where)
    return dataset


def _coding(table: Table, columns: Columns, rows: CleanRows, config: DataConfig) -> Coding:
    coding = choose_coding(
        rows.scan,
        task=config.task,
        columns=columns.labels,
        declared=table.class_names.get(columns.labels[0]),
        label_names=config.label_names,
        where=table.where,
    )
    label = repr(",".join(columns.labels))
    if coding.space.task == REGRESSION:
        if len(rows.scan.counts) == 1:
            only = next(iter(rows.scan.counts))
            raise DataError(
                "{where}: every label in {column} is {label}; there is nothing to learn, "
                "name another --label-column",
                where=table.where,
                column=label,
                label=only,
            )
    elif len(coding.key_counts(rows.scan)) < 2 and not coding.multi_hot:
        only = next(iter(coding.key_counts(rows.scan)), t("none at all"))
        said = {"where": table.where, "column": label, "label": shorten(only)}
        raise DataError(
            "{where}: one class only, every label in {column} is {label}; add rows of "
            "another class or name another --label-column",
            **said,
        )
    return coding


def _split(
    table: Table, columns: Columns, rows: CleanRows, coding: Coding, config: DataConfig
) -> TextData:
    import numpy as np

    if coding.space.task == SINGLE_LABEL:
        _check_no_single_rows(table, columns, rows, coding)
    dataset = encode_labels(rows, coding)
    labels = column_of(dataset, "label")
    hashes = rows.text_hashes
    groups = None
    if columns.group is not None:
        groups = numbered(rows.group_hashes)
        groups = np.arange(len(labels)) if groups is None else groups
    train, validation = split_rows(
        labels,
        coding.space,
        config.validation_split,
        config.seed,
        table.where,
        texts=numbered(hashes),
        groups=groups,
    )
    counts = DataCounts(
        rows_read=rows.rows_read,
        dropped_no_text=rows.dropped_no_text,
        dropped_no_label=rows.dropped_no_label,
        train_rows=len(train),
        validation_rows=len(validation),
        duplicates_across_split=count_shared(hashes[train], hashes[validation]),
        **_contradicting((rows, dataset), space=coding.space),
        train_class_counts=class_counts(labels[train], coding.space),
        validation_class_counts=class_counts(labels[validation], coding.space),
        groups=None if groups is None else int(groups.max()) + 1,
        **_described(table, columns),
    )
    return TextData(dataset.select(train), dataset.select(validation), coding.space, counts)


def _with_validation(
    table: Table, validation_table: Table, columns: Columns, rows: CleanRows, coding: Coding
) -> TextData:
    no_tag = coding.space.task == MULTI_LABEL
    other = CleanRows(validation_table, columns, no_tag=no_tag)
    coding.check(other.scan, validation_table.where, of=table.where)
    train, validation = encode_labels(rows, coding), encode_labels(other, coding)
    found = [
        class_counts(column_of(dataset, "label"), coding.space) for dataset in (train, validation)
    ]
    if coding.space.task == SINGLE_LABEL:
        for name, count in found[1].items():
            if count == 0 and found[0][name] > 0:
                raise DataError(
                    "{where}: no row has the label {label}, which {of} has; add some, or "
                    "leave --validation-file out to have it split",
                    where=validation_table.where,
                    label=shorten(name),
                    of=table.where,
                )
    counts = DataCounts(
        rows_read=rows.rows_read + other.rows_read,
        dropped_no_text=rows.dropped_no_text + other.dropped_no_text,
        dropped_no_label=rows.dropped_no_label + other.dropped_no_label,
        train_rows=len(train),
        validation_rows=len(validation),
        duplicates_across_split=count_shared(rows.text_hashes, other.text_hashes),
        **_contradicting((rows, train), (other, validation), space=coding.space),
        train_class_counts=found[0],
        validation_class_counts=found[1],
        **_described(table, columns),
    )
    return TextData(train, validation, coding.space, counts)


def _check_no_single_rows(table: Table, columns: Columns, rows: CleanRows, coding: Coding) -> None:
    counts = coding.key_counts(rows.scan)
    single = [key for key, count in counts.items() if count == 1]
    if not single:
        return
    label = columns.labels[0]
    if len(single) == 1:
        raise DataError(
            "{where}: the class {label} has a single row, which cannot both train and "
            "validate; add rows, remove it, or give a --validation-file",
            where=table.where,
            label=shorten(single[0]),
        )
    raise DataError(
        "{where}: {single} of {classes} classes have a single row ({label} is one), which "
        "cannot both train and validate; add rows, or name another --label-column than "
        "{column}",
        where=table.where,
        single=len(single),
        classes=len(counts),
        label=shorten(single[0]),
        column=repr(label),
    )


def _described(table: Table, columns: Columns) -> dict[str, Any]:
    return {
        "text_column": columns.text,
        "text_pair_column": columns.text_pair,
        "label_column": ",".join(columns.labels),
        "group_column": columns.group,
        "encoding": table.encoding,
    }
