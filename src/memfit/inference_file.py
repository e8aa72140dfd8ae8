"""A file of texts to a file of answers, streamed, so that neither has to fit in memory."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from memfit.data.columns import choose_texts
from memfit.data.rows import as_text
from memfit.data.source import open_source
from memfit.data.tables import Row, Table
from memfit.data.workspace import progress_bar, quiet_datasets
from memfit.errors import DataError, OutputError
from memfit.files import atomic_writer, plain
from memfit.messages import t

if TYPE_CHECKING:
    from memfit.inference import Classifier, Prediction

CHUNK_ROWS = 4096
JSON_LINES = (".jsonl", ".ndjson")
NOT_WRITTEN = (".xlsx", ".xls", ".ods", ".parquet", ".pq", ".json")


@dataclass(frozen=True, slots=True)
class FilePredictions:
    """What was written where."""

    path: Path
    rows: int
    empty_rows: int
    """Rows without text; their label and score stay empty."""
    label_column: str
    score_column: str


def predict_file(
    classifier: Classifier,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    text_columns: tuple[str | None, str | None] = (None, None),
    encoding: str | None = None,
    *,
    batch_tokens: int,
) -> FilePredictions:
    """Writes every row of the source with its label and score to a CSV, TSV or JSONL file.

    A table begins with a byte-order mark, without which Excel reads it in the machine's own
    encoding and shows Chinese as gibberish; JSONL is plain UTF-8, as its readers expect.
    """
    path = Path(target)
    _check_target(path, Path(source))
    with quiet_datasets():
        table, _ = open_source(os.fspath(source), encoding)
    texts = [name for name in choose_texts(table, *text_columns) if name]
    _check_columns(table)
    names = _answer_columns(table)
    rows = empty_rows = 0
    bar = progress_bar("predicting")
    try:
        codec = "utf-8" if path.suffix.lower() in JSON_LINES else "utf-8-sig"
        with atomic_writer(path, codec) as file:
            write = _writer(path, file, [*table.columns, *names])
            for chunk in _chunks(table.read(table.columns)):
                where = [table.columns.index(name) for name in texts]
                for row, answer in _answers(classifier, chunk, where, table.where, batch_tokens):
                    score = "" if answer is None else round(answer.score, 6)
                    write([*row, "" if answer is None else answer.label, score])
                    rows += 1
                    empty_rows += answer is None
                bar.update(len(chunk))
            if not rows:
                raise DataError(t("{path} has a header and no rows; add rows", path=table.where))
    except OSError as error:
        raise OutputError(
            t("cannot write {path}: {reason}", path=path, reason=error.strerror or error)
        ) from None
    finally:
        bar.close()
    return FilePredictions(path, rows, empty_rows, *names)


def _check_target(path: Path, source: Path) -> None:
    if path.exists() and source.exists() and path.samefile(source):
        raise OutputError(
            t("{path} is the file the texts come from; name another --output", path=path)
        )
    if path.is_dir():
        raise OutputError(t("{path} is a folder; name a file with --output", path=path))
    if not path.parent.is_dir():
        raise OutputError(
            t(
                "there is no folder {folder} for {name}; make it first",
                folder=path.parent,
                name=path.name,
            )
        )
    if path.suffix.lower() in NOT_WRITTEN:
        raise OutputError(
            t(
                "cannot write {ending} files; name the output .csv, .tsv or .jsonl",
                ending=path.suffix,
            )
        )


def _check_columns(table: Table) -> None:
    twice = [name for name in table.columns if table.columns.count(name) > 1]
    if twice:
        raise DataError(
            t(
                "{where}: several columns are called {name}; rename all but one",
                where=table.where,
                name=repr(twice[0]),
            )
        )


def _answer_columns(table: Table) -> tuple[str, str]:
    """label and score; other names where the table has such columns, to lose nothing of it."""
    if {"label", "score"} & set(table.columns):
        return "predicted_label", "predicted_score"
    return "label", "score"


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while chunk := list(islice(rows, CHUNK_ROWS)):
        yield chunk


def _answers(
    classifier: Classifier, chunk: list[Row], where: list[int], name: str, batch_tokens: int
) -> Iterator[tuple[Row, Prediction | None]]:
    """Each row with its answer; None for a row whose text, or one of its pair, is empty."""
    parts = [tuple(as_text(row[index], name) for index in where) for row in chunk]
    filled = [index for index, words in enumerate(parts) if all(word.strip() for word in words)]
    texts: list[Any] = [parts[index] if len(where) == 2 else parts[index][0] for index in filled]
    found = classifier.predict(texts, batch_tokens=batch_tokens, progress=False) if texts else []
    answers = dict(zip(filled, found, strict=True))
    for index, row in enumerate(chunk):
        yield row, answers.get(index)


def _writer(path: Path, file: IO[str], names: list[str]) -> Callable[[list[Any]], None]:
    if path.suffix.lower() in JSON_LINES:

        def write_line(values: list[Any]) -> None:
            row = plain(dict(zip(names, values, strict=True)))
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

        return write_line
    delimiter = "\t" if path.suffix.lower() in (".tsv", ".tab") else ","
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    writer.writerow(names)
    return lambda values: writer.writerow([_cell(value) for value in values])


def _cell(value: Any) -> Any:
    """A cell of a table: what JSON nests is written as JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value
