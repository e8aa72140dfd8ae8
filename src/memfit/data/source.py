"""What a data path means: a file of a known kind, or the id of a dataset on the Hub."""

from __future__ import annotations

import re
from pathlib import Path

from memfit.data.arrow import open_hub, open_parquet
from memfit.data.delimited import open_delimited
from memfit.data.jsonfiles import open_json
from memfit.data.tables import Table
from memfit.errors import DataError, nearest
from memfit.messages import t

DELIMITED = (".csv", ".tsv", ".tab", ".txt")
JSON = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet", ".pq")
KNOWN = (*DELIMITED, *JSON, *PARQUET)

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", re.ASCII)


def open_source(name: str, encoding: str | None) -> tuple[Table, Table | None]:
    """(training table, the source's own validation table or None)."""
    path = Path(name).expanduser()
    if path.exists() or not _may_be_hub_id(name, path):
        return open_file(path, encoding), None
    return open_hub(name)


def open_file(path: Path, encoding: str | None) -> Table:
    """The table in a file, by the ending of its name."""
    _check_file(path)
    suffix = path.suffix.lower()
    try:
        if suffix in DELIMITED:
            return open_delimited(path, encoding)
        if suffix in JSON:
            return open_json(path, encoding)
        if suffix in PARQUET:
            return open_parquet(path)
    except PermissionError:
        raise DataError(t("{path} may not be read; check its permissions", path=path)) from None
    if suffix in (".xlsx", ".xls", ".ods"):
        raise DataError(
            t("{path} is a spreadsheet; save it as CSV (UTF-8) and give that", path=path)
        )
    known, last = ", ".join(KNOWN[:-1]), KNOWN[-1]
    raise DataError(
        t(
            "{path}: cannot tell a table from the ending {ending}; name it {known} or {last}",
            path=path,
            ending=repr(suffix),
            known=known,
            last=last,
        )
    )


def _may_be_hub_id(name: str, path: Path) -> bool:
    """A missing path that looks like a file is a mistake to report, not an id to look up."""
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        return False
    in_a_folder_here = len(path.parts) > 1 and path.parent.is_dir()
    return path.suffix.lower() not in (*KNOWN, ".xlsx", ".xls", ".ods") and not in_a_folder_here


def _check_file(path: Path) -> None:
    if path.is_dir():
        tables = sorted(item.name for item in path.iterdir() if item.suffix.lower() in KNOWN)
        inside = f" ({', '.join(tables[:5])})" if tables else ""
        raise DataError(
            t("{path} is a folder; give one of the files in it{inside}", path=path, inside=inside)
        )
    if path.is_symlink() and not path.exists():
        raise DataError(
            t("{path} is a link to a file that is not there; give the file itself", path=path)
        )
    if not path.exists():
        folder = path.parent
        here = [item.name for item in folder.iterdir()] if folder.is_dir() else []
        raise DataError(
            t(
                "there is no file {path}; check the path.{hint}",
                path=path,
                hint=nearest(path.name, here),
            )
        )
    if not path.is_file():
        raise DataError(
            t("{path} is not a regular file; write the table to a file first", path=path)
        )
    if path.stat().st_size == 0:
        raise DataError(t("{path} is empty; give a table with a header and rows", path=path))
