"""Data given in Python: a DataFrame, a Dataset, columns, rows, or texts and labels.

It is written to a Parquet file in the cache folder and read from there like any other, so that the
run can be resumed and repeated from the command line, too. The file is named after its content: the
same data is the same file.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config import files
from memfit.data.columns import choose_texts
from memfit.data.reading import as_text
from memfit.data.table_files import VALIDATION_SPLITS
from memfit.data.tables import Row, Table
from memfit.data.working_files import new_file, quiet_datasets, room_on_disk
from memfit.errors import DataError
from memfit.i18n import t

if TYPE_CHECKING:
    import pyarrow

_FOLDER = "data"

_MOST_BYTES = 5_000_000_000
"""The most that all files together may take; the oldest are removed first."""


def source_of(data: Any) -> dict[str, Any]:
    """What was given as data, as options: `path`, and `validation_file` if it has such a split."""
    splits = data if isinstance(data, Mapping) and _is_from(data, "datasets") else None
    if splits is None:
        return {"path": path_of(data)}
    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    validation = next((splits[name] for name in VALIDATION_SPLITS if name in splits), None)
    if validation is None or validation is train:
        return {"path": path_of(train)}
    return {"path": path_of(train), "validation_file": path_of(validation)}


def path_of(data: Any) -> Any:
    """The file that holds the data; a path, a Hub id or None is given back as it is."""
    if data is None or isinstance(data, str | os.PathLike):
        return data
    try:
        folder = files.cache_folder() / _FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        files.tidy_cache(f"{_FOLDER}/*", most_bytes=_MOST_BYTES)
        return _written(data, folder)
    except (OSError, RuntimeError):  # it cannot be written, or this user has no home folder
        with room_on_disk():
            return _written(data, new_file().parent)


def texts_of(data: Any, text_column: str | None, text_pair_column: str | None) -> Any:
    """The texts, or pairs of them, of anything that has columns; a text or a list stays one."""
    if isinstance(data, str | list | tuple):
        return data
    if not (isinstance(data, Mapping) or hasattr(data, "columns") or hasattr(data, "column_names")):
        return list(data)
    arrow = data.with_format("arrow")[:] if _is_from(data, "datasets") else _arrow(data)

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        return zip(*(arrow.column(name).to_pylist() for name in wanted), strict=True)

    table = Table(t("the data given"), tuple(arrow.column_names), read)
    chosen = choose_texts(table, text_column, text_pair_column)
    names = [name for name in chosen if name is not None]
    rows = (tuple(as_text(cell, table.where) for cell in row) for row in table.read(names))
    return [row if len(names) == 2 else row[0] for row in rows]


def _written(data: Any, folder: Path) -> str:
    """Writes the data to a file of this folder, unless it is there already."""
    from pyarrow import parquet

    handle, name = tempfile.mkstemp(suffix=".unfinished", dir=folder)
    os.close(handle)
    try:
        if _is_from(data, "datasets") and hasattr(data, "to_parquet"):
            kind = "dataset"
            with quiet_datasets():
                data.with_format(None).to_parquet(name)  # with its label names
        else:
            kind = "dataframe" if hasattr(data, "columns") else "rows"
            parquet.write_table(_arrow(data), name)
        with open(name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
        final = folder / f"{kind}-{digest}.parquet"
        os.replace(name, final)
        return str(final)
    finally:
        Path(name).unlink(missing_ok=True)


def _is_from(data: Any, package: str) -> bool:
    return any(kind.__module__.split(".")[0] == package for kind in type(data).__mro__)


def _arrow(data: Any) -> pyarrow.Table:
    import pyarrow

    if _is_from(data, "pandas") and hasattr(data, "columns"):
        columns = [(str(name), data.iloc[:, n]) for n, name in enumerate(data.columns)]
    elif hasattr(data, "__arrow_c_stream__"):  # polars, pyarrow itself
        return pyarrow.table(data)
    elif isinstance(data, Mapping):
        columns = [(str(name), values) for name, values in data.items()]
    elif isinstance(data, tuple) and len(data) == 2:
        texts, labels = list(data[0]), data[1]
        columns = [("text", texts), ("label", labels)]
        if texts and isinstance(texts[0], tuple | list):
            first, second = zip(*texts, strict=True)
            columns = [("text", first), ("text_pair", second), ("label", labels)]
    elif isinstance(data, list) and data and all(isinstance(row, Mapping) for row in data):
        names = dict.fromkeys(name for row in data for name in row)
        columns = [(str(name), [row.get(name) for row in data]) for name in names]
    else:
        raise DataError(
            "the data is a {kind}; give a file, a DataFrame, a Dataset, a dict of columns, a "
            "list of dicts, or (texts, labels)",
            kind=type(data).__name__,
        )
    lengths = {name: len(values) for name, values in columns}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {count:,}" for name, count in lengths.items())
        raise DataError("the data given has columns of different lengths: {counts}", counts=counts)
    arrays = [_array(values) for _, values in columns]
    return pyarrow.Table.from_arrays(arrays, names=[name for name, _ in columns])


def _array(values: Any) -> pyarrow.Array:
    """The column as Arrow reads it; a column of several types becomes text."""
    import pyarrow

    if not hasattr(values, "dtype"):
        values = list(values)
    try:
        made = pyarrow.array(values, from_pandas=True)
        is_category = pyarrow.types.is_dictionary(made.type)
        return made.dictionary_decode() if is_category else made
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        missing = (one is None or (isinstance(one, float) and math.isnan(one)) for one in values)
        return pyarrow.array(
            [None if lacks else str(one) for one, lacks in zip(values, missing, strict=True)]
        )
