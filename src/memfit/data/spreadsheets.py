"""The first sheet of a workbook (.xlsx, .xls, .ods), read by calamine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from memfit.data.columns import begins_with_a_row, named_columns, numbered_columns
from memfit.data.tables import Row, Table
from memfit.errors import DataError
from memfit.text import t

SPREADSHEETS = (".xlsx", ".xlsm", ".xlsb", ".xls", ".ods")

_SNIFFED_ROWS = 200


def open_spreadsheet(path: Path, header: bool | None) -> Table:
    """The table in a workbook's first sheet that is not empty; further sheets are not read."""
    rows = _rows(path)
    first = next(rows, None)
    if first is None:
        raise DataError(t("{path} is empty; give a table with a header line", path=path))
    cells = [_written(cell) for cell in first]
    if header is None:
        below = ([_written(cell) for cell in row] for row in islice(rows, _SNIFFED_ROWS))
        header = not begins_with_a_row(cells, below)
    columns = named_columns(cells) if header else numbered_columns(len(cells))

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        places = [columns.index(name) for name in wanted]
        for row in islice(_rows(path), 1 if header else 0, None):
            yield tuple(_plain(row[place]) for place in places)

    return Table(str(path), columns, read, numbered=not header, has_header=header)


def _rows(path: Path) -> Iterator[list[Any]]:
    """The rows that hold anything."""
    try:
        import python_calamine
    except ImportError:
        raise DataError(
            t(
                '{path} is a spreadsheet, which needs a package: pip install "memfit[excel]" (or '
                "save it as CSV in UTF-8)",
                path=path,
            )
        ) from None
    try:
        book = python_calamine.load_workbook(str(path))
        sheets = (book.get_sheet_by_index(index) for index in range(len(book.sheet_names)))
        sheet = next((one for one in sheets if one.total_height), None)
        rows = [] if sheet is None else sheet.to_python()
    except Exception as error:  # each format has errors of its own, in Rust
        raise DataError(
            t(
                "{path} cannot be read as a spreadsheet ({reason}); save it again, without a "
                "password",
                path=path,
                reason=str(error).splitlines()[0] if str(error) else type(error).__name__,
            )
        ) from None
    return (row for row in rows if any(_written(cell) for cell in row))


def _plain(cell: Any) -> Any:
    """Numbers as they are shown: a workbook keeps 1 as 1.0."""
    return int(cell) if isinstance(cell, float) and cell.is_integer() else cell


def _written(cell: Any) -> str:
    return str(_plain(cell)).strip()
