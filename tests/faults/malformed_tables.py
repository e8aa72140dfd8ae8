"""Tables that are wrong in one way each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from malformed import GOOD, Case, Place, table

JSON_ROW = '{"label": 1, "review": "服務人員都很親切"}\n{"label": 0, "review": "不親切"}\n'


def tables() -> Iterator[tuple[str, Case]]:
    contents: dict[str, bytes | str] = {
        "empty": b"", "spaces": "  \n \n", "bom": b"\xef\xbb\xbf", "nulls": b"\0" * 64,
        "utf16-bom": b"\xff\xfe", "header": "label,review\n", "one-column": "label\n1\n0\n",
        "no-header": "1,2,3\n4,5,6\n", "png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
        "zip": b"PK\x03\x04" + b"\0" * 99, "gzip": b"\x1f\x8b\x08" + b"\0" * 99,
        "one-class": "label,review\n" + "1,好\n" * 9,
        "no-text": "label,review\n" + "1,\n0,\n" * 9,
        "no-label": "label,review\n" + ",好\n,壞\n" * 9,
        "single": GOOD + "2,普通\n", "open-quote": 'label,review\n1,"服務\n0,好\n' * 3,
        "ragged": "label,review\n" + "1,好,多,了\n" * 9, "same-names": "label,label\n1,0\n0,1\n",
        "all-classes": "label,review\n" + "".join(f"c{n},好\n" for n in range(40)),
        "numbers": "label,value\n1,2\n0,3\n" * 9, "semicolon-in-name": "la;bel\n1\n",
        "crlf-only": "\r\n\r\n\r\n", "delimiters": ",,,\n,,,\n,,,\n",
        "long-line": "label,review\n" + "x" * 100_000,
    }  # fmt: skip
    for name, content in contents.items():
        for ending in ("csv", "tsv"):
            yield f"{ending}-{name}", table(f"data.{ending}", content)
    for ending in ("xlsx", "xls", "pdf", "docx", "zip", "db", "json5", "arrow", "", "CSV~"):
        yield f"ending-{ending or 'none'}", table(f"data.{ending}".rstrip("."), GOOD)
    yield "folder", lambda place: place.train(place.folder)
    yield "missing", lambda place: place.train(place.folder / "nothing.csv")
    yield "missing-folder", lambda place: place.train(place.folder / "no" / "where.csv")
    yield "broken-link", _broken_link
    yield "pipe", _pipe
    yield "device", lambda place: place.train("/dev/zero", "--encoding", "utf-8")
    yield "null-in-name", lambda place: place.train("a\0b.csv")
    yield "long-name", lambda place: place.train("x" * 5000 + ".csv")
    yield "empty-name", lambda place: place.train("")
    yield "through-a-file", lambda place: place.train(place.good() / "data.csv")


def _broken_link(place: Place) -> list[str]:
    link = place.folder / "data.csv"
    link.symlink_to(place.folder / "gone.csv")
    return place.train(link)


def _pipe(place: Place) -> list[str]:
    pipe = place.folder / "data.csv"
    os.mkfifo(pipe)
    return place.train(pipe)


def json_tables() -> Iterator[tuple[str, Case]]:
    contents: dict[str, bytes | str] = {
        "empty": b"", "brace": "{", "array-open": "[",
        "array-cut": "[" + JSON_ROW.replace("\n", ","),
        "cut": JSON_ROW * 3 + '{"label": 1, "rev', "numbers": "1\n2\n3\n", "words": '"a"\n"b"\n',
        "lists": "[1, 2]\n[3, 4]\n", "null": "null\n", "arrays": "[[1, 2], [3]]",
        "empty-array": "[]",
        "empty-objects": "{}\n{}\n", "no-text": '{"label": 1}\n{"label": 0}\n' * 5,
        "no-label": '{"review": "好"}\n' * 9, "text-numbers": '{"label": 1, "review": 5}\n' * 9,
        "text-object": '{"label": 1, "review": {"a": 2}}\n{"label": 0, "review": {"a": 1}}\n' * 5,
        "text-list": '{"label": 1, "review": ["好"]}\n{"label": 0, "review": ["壞"]}\n' * 5,
        "label-object": '{"label": {"a": 1}, "review": "好"}\n' * 9,
        "deep": "[" * 100_000, "deep-object": '{"a":' * 100_000,
        "deep-row": '{"label": 1, "review": ' + "[" * 50_000,
        "not-utf8": b'{"label": 1, "review": "\xff\xfe\xfa"}\n' * 9,
        "single-quotes": "{'label': 1, 'review': 'x'}\n", "comma": '{"label": 1,}\n',
        "nan-label": '{"label": NaN, "review": "好"}\n' * 9,
        "huge": '{"label": 1' + "0" * 5000 + "}\n",
        "control": '{"label": 1, "review": "a\x01b"}\n' * 9, "html": "<html></html>",
    }  # fmt: skip
    for name, content in contents.items():
        yield f"jsonl-{name}", table("data.jsonl", content)
        if name in ("cut", "deep", "array-cut", "html", "empty-array", "lists", "null", "comma"):
            yield f"json-{name}", table("data.json", content)


def parquet_tables() -> Iterator[tuple[str, Case]]:
    yield "parquet-empty", table("data.parquet", b"")
    yield "parquet-text", table("data.parquet", GOOD)
    yield "parquet-magic", table("data.parquet", b"PAR1" + b"\0" * 50 + b"PAR1")

    def written(columns: dict[str, Any], change: Callable[[bytes], bytes] = bytes) -> Case:
        def write(place: Place) -> list[str]:
            import pyarrow
            from pyarrow import parquet

            path = place.folder / "data.parquet"
            parquet.write_table(pyarrow.table(columns), path)
            path.write_bytes(change(path.read_bytes()))
            return place.train(path)

        return write

    good = {"label": [0, 1] * 8, "review": ["好", "壞"] * 8}
    yield "parquet-cut", written(good, lambda content: content[: len(content) // 2])
    yield "parquet-head", written(good, lambda content: content[40:])
    yield "parquet-body", written(good, lambda content: content[:8] + b"\xff" * 60 + content[68:])
    yield "parquet-no-rows", written({"label": [], "review": []})
    yield "parquet-no-label", written({"review": ["好", "壞"] * 8})
    yield "parquet-no-text", written({"label": [0, 1] * 8})
    yield "parquet-bytes", written({"label": [0, 1] * 8, "review": [b"\xff\xfe", b"\x00"] * 8})
    yield "parquet-struct", written({"label": [0, 1] * 8, "review": [{"a": 1}, {"a": 2}] * 8})
    yield "parquet-nulls", written({"label": [None] * 9, "review": ["好"] * 9})
