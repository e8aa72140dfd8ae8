"""Opens a table by its path: text, JSON, Parquet, a spreadsheet, class folders, a Hub dataset.

`load_dataset("csv")` is not used: it guesses types from the first 10,000 rows and fails
on the next, takes the words NA, None and null for nothing, fills short rows silently,
reads [1] in a file name as a pattern, and cannot name the line that is wrong.

`load_dataset("json")` is not used: it fails where a label is a number in one row and a
word in the next, reads an array whole, and cannot name the line that is wrong.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from memfit.data.columns import begins_with_a_row, has_usual_name, named_columns, numbered_columns
from memfit.data.encodings import find_encoding, opened, read_text
from memfit.data.tables import Row, Table
from memfit.data.working_files import quiet_logs
from memfit.errors import DataError, nearest
from memfit.i18n import t

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
    """One line a row, with tabs or one column: a quote is a character like any other."""


def open_delimited(
    path: Path, encoding: str | None, header: bool | None, *, one_column: bool = False
) -> Table:
    """The table in a .csv, .tsv or .txt file; `header` says whether its first line names columns.

    Where that is not said the lines below it tell. `one_column`: without tabs a line is one text,
    whatever commas it holds.
    """
    dialect = _sniff(path, find_encoding(path, encoding), one_column)
    rows = (row for _, row in _rows(dialect))
    first = next(rows, [])
    if not any(name.strip() for name in first):
        raise DataError("{path} is empty; give a table with a header line", path=path)
    if header is None:
        header = not begins_with_a_row(first, islice(rows, _SNIFFED_LINES))
    columns = named_columns(first) if header else numbered_columns(len(first))

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        places, width = [columns.index(name) for name in wanted], len(columns)
        for line, row in islice(_rows(dialect), 1 if header else 0, None):
            if any(row[width:]):
                raise DataError(
                    "{path}, line {line}: {fields} fields where the first line has {width}; put "
                    'texts that hold the delimiter in quotes (")',
                    path=path,
                    line=line,
                    fields=len(row),
                    width=width,
                )
            # Excel leaves the last empty cells of a row out.
            yield tuple(row[place] if place < len(row) else "" for place in places)

    codec = dialect.encoding
    return Table(str(path), columns, read, encoding=codec, numbered=not header, has_header=header)


def _sniff(path: Path, encoding: str, one_column: bool) -> _Dialect:
    with opened(path, encoding, newline="") as file:
        lines = list(islice(file, _SNIFFED_LINES))
    hint = _SEP_LINE.fullmatch(lines[0]) if lines else None
    if hint:
        return _Dialect(path, encoding, hint[1], 1, plain=False)
    is_text = path.suffix.lower() == ".txt"
    if (one_column and not any("\t" in line for line in lines)) or (is_text and _is_list(lines)):
        return _Dialect(path, encoding, "\n", 0, plain=True)
    filled = [line for line in lines if line.strip()]
    # A .txt file is a label, a tab and a text a line, though a few lines are not.
    most_have_tabs = 10 * sum("\t" in line for line in filled) >= 9 * max(len(filled), 1)
    tabs_only = path.suffix.lower() in (".tsv", ".tab") or (is_text and most_have_tabs)
    delimiter = "\t" if tabs_only else _delimiter(lines)
    plain = delimiter == "\t" and _quotes_are_text(path, encoding)
    return _Dialect(path, encoding, delimiter, 0, plain)


def _delimiter(lines: list[str]) -> str:
    """The one that cuts the header into the most columns; among equals, the steadiest.

    Tabs that cut every line alike are no accident, however many commas the texts hold.
    """

    def score(delimiter: str) -> tuple[int, int]:
        widths = [len(row) for row in csv.reader(lines, delimiter=delimiter) if row]
        return (widths[0], widths.count(widths[0])) if widths else (0, 0)

    _allow_long_fields()
    tabs = {line.count("\t") for line in lines if line.strip()}
    return "\t" if len(tabs) == 1 and tabs != {0} else max(_DELIMITERS, key=score)


def _is_list(lines: list[str]) -> bool:
    """Whether a .txt file is a text a line: no tabs, no header, and commas here and there."""
    if any("\t" in line for line in lines):
        return False
    _allow_long_fields()
    rows = [row for row in csv.reader(lines, delimiter=_delimiter(lines)) if row]
    return len({len(row) for row in rows}) > 1 and not has_usual_name(rows[0])


def _quotes_are_text(path: Path, encoding: str) -> bool:
    """Whether quotes in a tab-separated file are characters like any other.

    They are where every line has the header's number of tabs, as in the corpora of the field
    (GLUE, LCQMC), unless each of them stands where a CSV writer would have put it.
    """
    with opened(path, encoding, newline="") as file:
        tabs = file.readline().count("\t")
        one_line_a_row = all(line.count("\t") == tabs for line in file if line.strip())
    return one_line_a_row and not _well_quoted(path, encoding, tabs)


def _well_quoted(path: Path, encoding: str, tabs: int) -> bool:
    shape = re.compile(rf"{_FIELD}(?:\t{_FIELD}){{{tabs}}}\r?\n?")
    row: list[str] = []
    chars, is_open = 0, False
    with opened(path, encoding, newline="") as file:
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
    with opened(dialect.path, dialect.encoding, newline="") as file:
        lines = islice(file, dialect.skip_lines, None)
        if dialect.plain:
            mark = dialect.delimiter
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, [_unquoted(cell) for cell in line.rstrip("\r\n").split(mark)]
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
                    '{path}, line {line}: a quote (") is opened and not closed; write '
                    'quotes inside a text twice ("")',
                    path=dialect.path,
                    line=begins,
                )
            if row:
                yield begins, row
            begins = reader.line_num + 1 + dialect.skip_lines


def _unquoted(cell: str) -> str:
    inner = cell[1:-1].replace('""', "")
    if len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner:
        return cell[1:-1].replace('""', '"')
    return cell


def _allow_long_fields() -> None:
    # A process-wide setting of the csv module: only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))


_LOOKED_AT_ROWS = 1000
_CHUNK_CHARS = 1 << 18

_LONGEST_ROW = 1 << 25
"""Characters; an array element longer than this is a file that is not an array of rows."""

_DECODER = json.JSONDecoder()
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
_BETWEEN = re.compile(r"[\s,]*")


def open_json(path: Path, encoding: str | None) -> Table:
    """The table in a .jsonl, .ndjson or .json file: an object a line, or an array of objects."""
    codec = find_encoding(path, encoding)
    with opened(path, codec) as file:
        first = next((line for line in file if line.strip()), "")
    objects = _array if first.lstrip().startswith("[") else _lines
    # Not every object has every key; those of the first rows are the columns.
    columns: dict[str, None] = {}
    for row in islice(objects(path, codec), _LOOKED_AT_ROWS):
        columns.update(dict.fromkeys(row))
    if not columns:
        raise DataError(
            "{path} is empty; give one JSON object with text and label a line", path=path
        )

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        for row in objects(path, codec):
            yield tuple(row.get(name) for name in wanted)

    return Table(str(path), tuple(columns), read, encoding=codec)


def _lines(path: Path, codec: str) -> Iterator[dict[str, Any]]:
    with opened(path, codec) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise _not_json(path, number, error) from None
                yield _as_row(path, number, value, line)


def _array(path: Path, codec: str) -> Iterator[dict[str, Any]]:
    """The elements of one big array, with a small part of the text in memory at a time."""
    with opened(path, codec) as file:
        buffer = file.read(_CHUNK_CHARS)
        position = buffer.index("[") + 1
        line = 1 + buffer.count("\n", 0, position)
        while True:
            start = _BETWEEN.match(buffer, position).end()  # type: ignore[union-attr]
            line += buffer.count("\n", position, start)
            position = start
            if buffer.startswith("]", position):
                return
            try:
                value, end = _DECODER.raw_decode(buffer, position)
            except RecursionError as error:
                raise _not_json(path, line, error) from None
            except ValueError as error:
                # Either it is wrong or it is not all there yet; only the end of the file tells.
                more = file.read(_CHUNK_CHARS)
                if not more or len(buffer) - position > _LONGEST_ROW:
                    raise _not_json(path, line, error) from None
                buffer, position = buffer[position:] + more, 0
                continue
            yield _as_row(path, line, value, buffer[position:end])
            line += buffer.count("\n", position, end)
            position = end


def _not_json(path: Path, line: int, error: Exception) -> DataError:
    """Without the decoder's position, which counts from the start of a line or of a part."""
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    if isinstance(error, RecursionError):
        reason = t("nested too deeply")
    return DataError(
        "{path}, line {line}: not JSON ({reason}); write an array of objects, or one object a line",
        path=path,
        line=line,
        reason=reason,
    )


def _as_row(path: Path, line: int, value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            "{path}, line {line}: {kind} where an object is expected; write rows such as {row}",
            row='{"text": "…", "label": 1}',
            path=path,
            line=line,
            kind=type(value).__name__,
        )
    # Half an emoji, where somebody cut a text by length, is no character Arrow can hold.
    row: dict[str, Any] = _without_surrogates(value) if _SURROGATE_ESCAPE.search(source) else value
    return row


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _LONE_SURROGATES.sub("\ufffd", value)
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(value[key]) for key in value}
    return value


_BATCH_ROWS = 2000
_BATCH_BYTES = 1 << 26
_PROBED_ROWS = 32
_BUFFER_BYTES = 1 << 20
VALIDATION_SPLITS = ("validation", "valid", "dev")


def open_parquet(path: Path) -> Table:
    """The table in a .parquet file; columns that are not asked for are not read."""
    import pyarrow
    from datasets import Features
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
    except (pyarrow.ArrowException, OSError) as error:
        reason = _first_line(error)
        raise DataError(
            "{path} is not a Parquet file ({reason}); write it again", path=path, reason=reason
        ) from None
    class_names = _class_names(Features.from_arrow_schema(schema))

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        try:
            # Read ahead, a whole row group lies in memory, and some files are one group.
            with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
                # A text that is repeated in every row is stored once: the first rows tell.
                first = next(file.iter_batches(_PROBED_ROWS, columns=list(wanted)), None)
                row_bytes = 1 + (first.nbytes // len(first) if first else 0)
                rows = max(min(_BATCH_ROWS, _BATCH_BYTES // row_bytes), 1)
                for batch in file.iter_batches(rows, columns=list(wanted)):
                    columns = [batch.column(name).to_pylist() for name in wanted]
                    yield from _named(zip(*columns, strict=True), wanted, class_names)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(
                "{path} cannot be read to its end ({reason}); write it again",
                path=path,
                reason=_first_line(error),
            ) from None

    return Table(str(path), tuple(schema.names), read, class_names)


def open_hub(name: str) -> tuple[Table, Table | None]:
    """A dataset of the Hub ('owner/name', 'owner/name:config'): training, own validation or none.

    Its test split is left alone: it is not ours to train on or to choose a model with.
    """
    import datasets

    repository, _, configuration = name.partition(":")
    try:
        with quiet_logs():  # the bars stay: a download may take long
            found = datasets.load_dataset(repository, configuration or None)
    except Exception as error:  # every layer below (hub, http, builder) raises its own kinds
        raise DataError(
            "{name} is neither a file here nor a dataset the Hub gives ({reason}); check "
            "the spelling and the connection (HF_ENDPOINT=https://hf-mirror.com names a "
            "mirror)",
            name=repr(name),
            reason=_first_line(error),
        ) from error
    train = found["train"] if "train" in found else next(iter(found.values()))
    validation = next((found[split] for split in VALIDATION_SPLITS if split in found), None)
    if validation is train:
        validation = None
    return (
        _hub_table(f"{name} (training split)", train),
        None if validation is None else _hub_table(f"{name} (validation split)", validation),
    )


def _hub_table(where: str, dataset: Any) -> Table:
    class_names = _class_names(dataset.features)

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        for batch in dataset.select_columns(list(wanted)).iter(_BATCH_ROWS):
            columns = [batch[name] for name in wanted]
            yield from _named(zip(*columns, strict=True), wanted, class_names)

    return Table(where, tuple(dataset.column_names), read, class_names)


def _class_names(features: Any) -> dict[str, tuple[str, ...]]:
    """The label names that `datasets` keeps with a column or with the items of its lists."""
    from datasets import ClassLabel

    inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {
        name: tuple(feature.names)
        for name, feature in inner.items()
        if isinstance(feature, ClassLabel)
    }


def _named(
    rows: Iterator[Row], wanted: Sequence[str], class_names: dict[str, tuple[str, ...]]
) -> Iterator[Row]:
    """The rows with declared ids replaced by their names."""
    names = [class_names.get(name) for name in wanted]
    if not any(names):
        yield from rows
        return
    for row in rows:
        yield tuple(
            value if known is None else _name_of(value, known)
            for value, known in zip(row, names, strict=True)
        )


def _name_of(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_name_of(item, names) for item in value]
    # -1 is how the Hub's benchmarks write a label that is kept secret.
    return None if value is None or value < 0 else names[value]


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


_SNIFFED_ROWS = 200


def open_spreadsheet(path: Path, header: bool | None) -> Table:
    """The table in a workbook's first sheet that is not empty; further sheets are not read.

    calamine reads .xlsx, .xls and .ods alike.
    """
    rows = _sheet_rows(path)
    first = next(rows, None)
    if first is None:
        raise DataError("{path} is empty; give a table with a header line", path=path)
    cells = [_sheet_cell(cell) for cell in first]
    if header is None:
        below = ([_sheet_cell(cell) for cell in row] for row in islice(rows, _SNIFFED_ROWS))
        header = not begins_with_a_row(cells, below)
    columns = named_columns(cells) if header else numbered_columns(len(cells))

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        places = [columns.index(name) for name in wanted]
        for row in islice(_sheet_rows(path), 1 if header else 0, None):
            yield tuple(_shown_number(row[place]) for place in places)

    return Table(str(path), columns, read, numbered=not header, has_header=header)


def _sheet_rows(path: Path) -> Iterator[list[Any]]:
    """The rows that hold anything."""
    try:
        import python_calamine
    except ImportError:
        raise DataError(
            '{path} is a spreadsheet, which needs a package: pip install "memfit[excel]" (or '
            "save it as CSV in UTF-8)",
            path=path,
        ) from None
    try:
        book = python_calamine.load_workbook(str(path))
        sheets = (book.get_sheet_by_index(index) for index in range(len(book.sheet_names)))
        sheet = next((one for one in sheets if one.total_height), None)
        rows = [] if sheet is None else sheet.to_python()
    except Exception as error:  # each format has errors of its own, in Rust
        raise DataError(
            "{path} cannot be read as a spreadsheet ({reason}); save it again, without a password",
            path=path,
            reason=str(error).splitlines()[0] if str(error) else type(error).__name__,
        ) from None
    return (row for row in rows if any(_sheet_cell(cell) for cell in row))


def _shown_number(cell: Any) -> Any:
    """Numbers as they are shown: a workbook keeps 1 as 1.0."""
    return int(cell) if isinstance(cell, float) and cell.is_integer() else cell


def _sheet_cell(cell: Any) -> str:
    return str(_shown_number(cell)).strip()


_VALIDATION_FOLDERS = ("validation", "valid", "val", "dev")
_TEXT_ENDING = ".txt"


def open_class_folders(path: Path, encoding: str | None) -> tuple[Table, Table | None] | None:
    """(training table, its own validation table or None); None for a folder of other things.

    Each text is a file, and its label the folder it lies in. Beside `train`, a folder called
    validation, valid, val or dev validates; others are left alone.

        reviews/good/1.txt        reviews/train/good/1.txt
        reviews/bad/2.txt         reviews/validation/bad/2.txt
    """
    train = path / "train"
    if train.is_dir() and _classes(train):
        found = (path / name for name in _VALIDATION_FOLDERS)
        validation = next((one for one in found if one.is_dir() and _classes(one)), None)
        own = None if validation is None else _folder_table(validation, encoding)
        return _folder_table(train, encoding), own
    return (_folder_table(path, encoding), None) if _classes(path) else None


def _classes(folder: Path) -> list[Path]:
    """The folders in it that hold texts, by name."""
    folders = sorted(one for one in folder.iterdir() if one.is_dir() and one.name[0] != ".")
    return [one for one in folders if next(_texts(one), None) is not None]


def _texts(folder: Path) -> Iterator[Path]:
    return (file for file in folder.iterdir() if file.suffix.lower() == _TEXT_ENDING)


def _folder_table(folder: Path, encoding: str | None) -> Table:
    def read(wanted: Sequence[str]) -> Iterator[Row]:
        for label in _classes(folder):
            for file in sorted(_texts(label)):
                cells = {"file": f"{label.name}/{file.name}", "label": label.name}
                if "text" in wanted:
                    cells["text"] = read_text(file, encoding)
                yield tuple(cells[name] for name in wanted)

    return Table(str(folder), ("text", "label", "file"), read)


DELIMITED = (".csv", ".tsv", ".tab", ".txt")
JSON = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet", ".pq")
SPREADSHEETS = (".xlsx", ".xlsm", ".xlsb", ".xls", ".ods")
KNOWN = (*DELIMITED, *JSON, *PARQUET, *SPREADSHEETS)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", re.ASCII)


def open_source(
    name: str, encoding: str | None, header: bool | None = None, *, only_texts: bool = False
) -> tuple[Table, Table | None]:
    """(training table, the source's own validation table or None).

    `only_texts`: no labels and no column are asked for, so that a .txt file may be a list of texts.
    """
    path = Path(name).expanduser()
    if path.is_dir() and (found := open_class_folders(path, encoding)) is not None:
        return found
    if path.exists() or not _may_be_hub_id(name, path):
        return open_file(path, encoding, header, only_texts=only_texts), None
    return open_hub(name)


def check_source(name: str) -> None:
    """What a look at the path can tell, before anything is read."""
    path = Path(name).expanduser()
    if not path.is_dir() and (path.exists() or not _may_be_hub_id(name, path)):
        _check_file(path)


def open_file(
    path: Path, encoding: str | None, header: bool | None = None, *, only_texts: bool = False
) -> Table:
    """The table in a file, by the ending of its name; `header` says if its first line is one."""
    _check_file(path)
    suffix = path.suffix.lower()
    if header is False and suffix in (*JSON, *PARQUET):
        raise DataError("{path} names its columns itself; leave --no-header out", path=path)
    try:
        if suffix in DELIMITED:
            one_column = only_texts and header is False and suffix == ".txt"
            return open_delimited(path, encoding, header, one_column=one_column)
        if suffix in JSON:
            return open_json(path, encoding)
        if suffix in PARQUET:
            return open_parquet(path)
        if suffix in SPREADSHEETS:
            return open_spreadsheet(path, header)
    except PermissionError:
        raise DataError("{path} may not be read; check its permissions", path=path) from None
    known, last = ", ".join(KNOWN[:-1]), KNOWN[-1]
    raise DataError(
        "{path}: cannot tell a table from the ending {ending}; name it {known} or {last}",
        path=path,
        ending=repr(suffix),
        known=known,
        last=last,
    )


def _may_be_hub_id(name: str, path: Path) -> bool:
    """A missing path that looks like a file is a mistake to report, not an id to look up."""
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        return False
    in_a_folder_here = len(path.parts) > 1 and path.parent.is_dir()
    return path.suffix.lower() not in KNOWN and not in_a_folder_here


def _check_file(path: Path) -> None:
    if path.is_dir():
        tables = sorted(item.name for item in path.iterdir() if item.suffix.lower() in KNOWN)
        inside = f" ({', '.join(tables[:5])})" if tables else ""
        raise DataError(
            "{path} is a folder; give one of the files in it{inside}, or a folder that has a "
            "folder of .txt files for each label",
            path=path,
            inside=inside,
        )
    if path.is_symlink() and not path.exists():
        raise DataError(
            "{path} is a link to a file that is not there; give the file itself", path=path
        )
    if not path.exists():
        folder = path.parent
        here = [item.name for item in folder.iterdir()] if folder.is_dir() else []
        raise DataError(
            "there is no file {path}; check the path.{hint}",
            path=path,
            hint=nearest(path.name, here),
        )
    if not path.is_file():
        raise DataError("{path} is not a regular file; write the table to a file first", path=path)
    if path.stat().st_size == 0:
        raise DataError("{path} is empty; give a table with a header and rows", path=path)
