"""From a path to clean, labelled, split rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.data.columns import Columns, choose_columns, choose_texts, require_columns
from memfit.data.labels import Coding, choose_coding, coding_for
from memfit.data.rows import (
    CleanRows,
    as_text,
    clean_rows,
    column_of,
    encode_labels,
    unbroken,
    write_rows,
)
from memfit.data.scan import shorten
from memfit.data.source import open_file, open_source
from memfit.data.split import check_share, class_counts, count_shared, split_rows
from memfit.data.tables import Row, Table
from memfit.data.values import REGRESSION, SINGLE_LABEL, DataCounts, LabelSpace, TextData
from memfit.data.workspace import quiet_datasets
from memfit.errors import DataError
from memfit.messages import t

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset

    from memfit.config import DataConfig

    Array = np.ndarray[Any, Any]


def read_table(config: DataConfig) -> TextData:
    """The rows that train and the rows that validate, with label names and counts."""
    if config.validation_file is None:
        check_share(config.validation_split)
    table, validation_table = open_source(config.path, config.encoding)
    if config.validation_file is not None:
        path = Path(config.validation_file).expanduser()
        validation_table = open_file(path, config.encoding)
    columns = choose_columns(table, config)
    if validation_table is not None:
        require_columns(validation_table, columns, table.where)
    with quiet_datasets():
        rows = clean_rows(table, columns)
        coding = _coding(table, columns, rows, config)
        if validation_table is None:
            return _split(table, columns, rows, coding, config)
        return _with_validation(table, validation_table, columns, rows, coding)


def read_labelled(config: DataConfig, labels: LabelSpace) -> tuple[Dataset, DataCounts]:
    """All rows of a table for a model that exists already, with that model's label ids.

    They are counted as validation rows. Labels are the model's names, its ids, or what
    `config.label_names` translates to its names.
    """
    table, _ = open_source(config.path, config.encoding)
    columns = choose_columns(table, config)
    with quiet_datasets():
        rows = clean_rows(table, columns)
        coding = coding_for(labels, rows.scan, config.label_names, table.where)
        coding.check(rows.scan, table.where, of="the model")
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
) -> Dataset:
    """All texts of a table in order, labels not needed; an empty text stays, as ''."""
    table, _ = open_source(path, encoding)
    wanted = [name for name in choose_texts(table, text_column, text_pair_column) if name]

    def texts() -> Iterator[Row]:
        for row in unbroken(table.read(wanted), table.where):
            yield tuple(as_text(value, table.where) for value in row)

    with quiet_datasets():
        dataset = write_rows(texts(), ("text", "text_pair")[: len(wanted)])
    if not len(dataset):
        raise DataError(t("{where} has a header and no rows; add rows", where=table.where))
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
                t(
                    "{where}: every label in {column} is {label}; there is nothing to learn, "
                    "name another --label-column",
                    where=table.where,
                    column=label,
                    label=only,
                )
            )
    elif len(coding.key_counts(rows.scan)) < 2 and not coding.multi_hot:
        only = next(iter(coding.key_counts(rows.scan)), t("none at all"))
        said = {"where": table.where, "column": label, "label": shorten(only)}
        raise DataError(
            t(
                "{where}: one class only, every label in {column} is {label}; add rows of "
                "another class or name another --label-column",
                **said,
            )
        )
    return coding


def _split(
    table: Table, columns: Columns, rows: CleanRows, coding: Coding, config: DataConfig
) -> TextData:
    if coding.space.task == SINGLE_LABEL:
        _check_no_single_rows(table, columns, rows, coding)
    dataset = encode_labels(rows, coding)
    labels = column_of(dataset, "label")
    train, validation = split_rows(
        labels, coding.space, config.validation_split, config.seed, table.where
    )
    hashes = rows.text_hashes
    counts = DataCounts(
        rows_read=rows.rows_read,
        dropped_no_text=rows.dropped_no_text,
        dropped_no_label=rows.dropped_no_label,
        train_rows=len(train),
        validation_rows=len(validation),
        duplicates_across_split=count_shared(hashes[train], hashes[validation]),
        train_class_counts=class_counts(labels[train], coding.space),
        validation_class_counts=class_counts(labels[validation], coding.space),
        **_described(table, columns),
    )
    return TextData(dataset.select(train), dataset.select(validation), coding.space, counts)


def _with_validation(
    table: Table, validation_table: Table, columns: Columns, rows: CleanRows, coding: Coding
) -> TextData:
    other = clean_rows(validation_table, columns)
    coding.check(other.scan, validation_table.where, of=table.where)
    train, validation = encode_labels(rows, coding), encode_labels(other, coding)
    found = [
        class_counts(column_of(dataset, "label"), coding.space) for dataset in (train, validation)
    ]
    if coding.space.task == SINGLE_LABEL:
        for name, count in found[1].items():
            if count == 0 and found[0][name] > 0:
                said = {"label": shorten(name), "of": table.where}
                raise DataError(
                    t(
                        "{where}: no row has the label {label}, which {of} has; add some, or "
                        "leave --validation-file out to have it split",
                        where=validation_table.where,
                        **said,
                    )
                )
    counts = DataCounts(
        rows_read=rows.rows_read + other.rows_read,
        dropped_no_text=rows.dropped_no_text + other.dropped_no_text,
        dropped_no_label=rows.dropped_no_label + other.dropped_no_label,
        train_rows=len(train),
        validation_rows=len(validation),
        duplicates_across_split=count_shared(rows.text_hashes, other.text_hashes),
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
            t(
                "{where}: the class {label} has a single row, which cannot both train and "
                "validate; add rows, remove it, or give a --validation-file",
                where=table.where,
                label=shorten(single[0]),
            )
        )
    said = {
        "where": table.where,
        "single": len(single),
        "classes": len(counts),
        "label": shorten(single[0]),
        "column": repr(label),
    }
    raise DataError(
        t(
            "{where}: {single} of {classes} classes have a single row ({label} is one), which "
            "cannot both train and validate; add rows, or name another --label-column than "
            "{column}",
            **said,
        )
    )


def _described(table: Table, columns: Columns) -> dict[str, Any]:
    return {
        "text_column": columns.text,
        "text_pair_column": columns.text_pair,
        "label_column": ",".join(columns.labels),
        "encoding": table.encoding,
    }
