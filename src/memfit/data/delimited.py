"""CSV and TSV, streamed.

`load_dataset("csv")` is not used: it guesses types from the first 10,000 rows and fails
on the next, takes the words NA, None and null for nothing, fills short rows silently,
reads [1] in a file name as a pattern, and cannot name the line that is wrong.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from memfit.data.encoding import find_encoding
from memfit.data.tables import Row, Table
from memfit.errors import DataError
from memfit.messages import t

_DELIMITERS = (",", ";", "\t")  # Excel writes ; where the comma is the decimal sign
_SNIFFED_LINES = 200
_LONGEST_FIELD = 1 << 24
"""Characters; a longer field is a quote that nobody closed, and would fill the memory."""
_END = "\ue000end of the table\ue000"
_FIELD = r'(?:"[^"]*(?:""[^"]*)*"|[^"\t\r\n]*)'  # as a CSV writer writes one between tabs
_SEP_LINE = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # Excel's own hint in the first line


@dataclass(frozen=True)
class _Dialect:
    path: Path
    encoding: str
    delimiter: str
    skip_lines: int
    plain: bool
    """Tab-separated with one line a row: a quote there is a character like any other."""


def open_delimited(path: Path, encoding: str | None) -> Table:
    """The table in a .csv, .tsv or .txt file."""
    dialect = _sniff(path, find_encoding(path, encoding))
    header = next(_rows(dialect), (0, []))[1]
    if not any(name.strip() for name in header):
        raise DataError(t("{path} is empty; give a table with a header line", path=path))
    columns = tuple(name.strip() or f"column_{n}" for n, name in enumerate(header, 1))

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        return _cells(dialect, len(columns), [columns.index(name) for name in wanted])

    return Table(str(path), columns, read, encoding=dialect.encoding)


def _sniff(path: Path, encoding: str) -> _Dialect:
    with path.open(encoding=encoding, newline="") as file:
        lines = list(islice(file, _SNIFFED_LINES))
    hint = _SEP_LINE.fullmatch(lines[0]) if lines else None
    if hint:
        return _Dialect(path, encoding, hint[1], 1, plain=False)
    tabs_only = path.suffix.lower() in (".tsv", ".tab")
    delimiter = "\t" if tabs_only else _delimiter(lines)
    plain = delimiter == "\t" and _quotes_are_text(path, encoding)
    return _Dialect(path, encoding, delimiter, 0, plain)


def _delimiter(lines: list[str]) -> str:
    """The one that cuts the header into the most columns; among equals, the steadiest."""

    def score(delimiter: str) -> tuple[int, int]:
        widths = [len(row) for row in csv.reader(lines, delimiter=delimiter) if row]
        return (widths[0], widths.count(widths[0])) if widths else (0, 0)

    _allow_long_fields()
    return max(_DELIMITERS, key=score)


def _quotes_are_text(path: Path, encoding: str) -> bool:
    """Whether quotes in a tab-separated file are characters like any other.

    They are where every line has the header's number of tabs, as in the corpora of the field
    (GLUE, LCQMC), unless each of them stands where a CSV writer would have put it.
    """
    with path.open(encoding=encoding, newline="") as file:
        tabs = file.readline().count("\t")
        one_line_a_row = all(line.count("\t") == tabs for line in file if line.strip())
    return one_line_a_row and not _well_quoted(path, encoding, tabs)


def _well_quoted(path: Path, encoding: str, tabs: int) -> bool:
    shape = re.compile(rf"{_FIELD}(?:\t{_FIELD}){{{tabs}}}\r?\n?")
    row: list[str] = []
    chars, is_open = 0, False
    with path.open(encoding=encoding, newline="") as file:
        for line in file:
            row.append(line)
            chars += len(line)
            is_open ^= line.count('"') % 2 == 1
            if is_open and chars < _LONGEST_FIELD:
                continue  # the row goes on in the next line
            text = "".join(row)
            if text.strip() and not shape.fullmatch(text):
                return False
            row, chars = [], 0
    return not row


def _rows(dialect: _Dialect) -> Iterator[tuple[int, list[str]]]:
    """(line the row begins in, its fields); blank lines are left out."""
    with dialect.path.open(encoding=dialect.encoding, newline="") as file:
        lines = islice(file, dialect.skip_lines, None)
        if dialect.plain:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, [_unquoted(cell) for cell in line.rstrip("\r\n").split("\t")]
            return
        _allow_long_fields()
        # The last line of our own shows whether a quote is still open at the end.
        reader = csv.reader(chain(lines, [_END]), delimiter=dialect.delimiter)
        begins = 1 + dialect.skip_lines
        while True:
            try:
                row = next(reader)
            except csv.Error:  # the field is too long
                row = [_END, _END]
            if row == [_END]:
                return
            if row and row[-1].endswith(_END):
                raise DataError(
                    t(
                        '{path}, line {line}: a quote (") is opened and not closed; write '
                        'quotes inside a text twice ("")',
                        path=dialect.path,
                        line=begins,
                    )
                )
            if row:
                yield begins, row
            begins = reader.line_num + 1 + dialect.skip_lines


def _unquoted(cell: str) -> str:
    inner = cell[1:-1].replace('""', "")
    if len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner:
        return cell[1:-1].replace('""', '"')
    return cell


def _cells(dialect: _Dialect, width: int, wanted: list[int]) -> Iterator[Row]:
    for line, row in islice(_rows(dialect), 1, None):
        if len(row) < width:
            # Excel leaves the last empty cells of a row out; what is missing counts as empty.
            row = row + [""] * (width - len(row))
        elif any(row[width:]):
            said = {"path": dialect.path, "line": line, "fields": len(row), "width": width}
            raise DataError(
                t(
                    "{path}, line {line}: {fields} fields where the header has {width}; put "
                    'texts that hold the delimiter in quotes (")',
                    **said,
                )
            )
        yield tuple(row[index] for index in wanted)


def _allow_long_fields() -> None:
    # A process-wide setting of the csv module: only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))
