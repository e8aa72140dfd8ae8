"""JSON Lines and JSON arrays, streamed row by row.

`load_dataset("json")` is not used: it fails where a label is a number in one row and a
word in the next, reads an array whole, and cannot name the line that is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from memfit.data.encoding import find_encoding
from memfit.data.tables import Row, Table
from memfit.errors import DataError
from memfit.messages import t

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
    objects = _array if _begins_with_bracket(path, codec) else _lines
    # Not every object has every key; those of the first rows are the columns.
    columns: dict[str, None] = {}
    for row in islice(objects(path, codec), _LOOKED_AT_ROWS):
        columns.update(dict.fromkeys(row))
    if not columns:
        raise DataError(
            t("{path} is empty; give one JSON object with text and label a line", path=path)
        )

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        for row in objects(path, codec):
            yield tuple(row.get(name) for name in wanted)

    return Table(str(path), tuple(columns), read, encoding=codec)


def _begins_with_bracket(path: Path, codec: str) -> bool:
    with path.open(encoding=codec) as file:
        return any(line.lstrip().startswith("[") for line in islice(_filled(file), 1))


def _filled(lines: Iterator[str] | Any) -> Iterator[str]:
    return (line for line in lines if line.strip())


def _lines(path: Path, codec: str) -> Iterator[dict[str, Any]]:
    with path.open(encoding=codec) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                said = {"path": path, "line": number, "reason": _reason(error)}
                raise DataError(
                    t(
                        "{path}, line {line}: not JSON ({reason}); write an array of objects, "
                        "or one object a line",
                        **said,
                    )
                ) from None
            yield _as_row(path, number, _mended(value, line))


def _array(path: Path, codec: str) -> Iterator[dict[str, Any]]:
    """The elements of one big array, with a small part of the text in memory at a time."""
    with path.open(encoding=codec) as file:
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
                said = {"path": path, "line": line, "reason": _reason(error)}
                raise DataError(
                    t(
                        "{path}, line {line}: not JSON ({reason}); write an array of objects, "
                        "or one object a line",
                        **said,
                    )
                ) from None
            except ValueError as error:
                # Either it is wrong or it is not all there yet; only the end of the file tells.
                more = file.read(_CHUNK_CHARS)
                if not more or len(buffer) - position > _LONGEST_ROW:
                    said = {"path": path, "line": line, "reason": _reason(error)}
                    raise DataError(
                        t(
                            "{path}, line {line}: not JSON ({reason}); write an array of "
                            "objects, or one object a line",
                            **said,
                        )
                    ) from None
                buffer, position = buffer[position:] + more, 0
                continue
            yield _as_row(path, line, _mended(value, buffer[position:end]))
            line += buffer.count("\n", position, end)
            position = end


def _reason(error: Exception) -> str:
    """Without the position, which counts from the start of a line or a part of the file."""
    if isinstance(error, RecursionError):
        return t("nested too deeply")
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _mended(value: Any, source: str) -> Any:
    """Half an emoji, where somebody cut a text by length, is no character Arrow can hold."""
    return _without_surrogates(value) if _SURROGATE_ESCAPE.search(source) else value


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _LONE_SURROGATES.sub("\ufffd", value)
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(value[key]) for key in value}
    return value


def _as_row(path: Path, line: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        said = {"path": path, "line": line, "kind": type(value).__name__}
        raise DataError(
            t(
                "{path}, line {line}: {kind} where an object is expected; write rows such as {row}",
                row='{"text": "…", "label": 1}',
                **said,
            )
        )
    return value
