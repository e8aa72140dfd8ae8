"""How a text file is encoded, found by its bytes.

Python reads GB18030 over almost any bytes without complaint, so falling back to it
blindly would turn a French file, or a UTF-8 file with one broken byte, into nonsense that
still trains. A sample of the bytes is judged first, and doubt is an error, not a guess.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from contextlib import contextmanager
from encodings.aliases import aliases
from pathlib import Path
from typing import IO

from memfit.errors import DataError, nearest
from memfit.i18n import N_

_CHUNK_BYTES = 1 << 20

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),  # Excel's "Unicode text"
    (codecs.BOM_UTF16_BE, "utf-16"),
)

_MARK = "\ufeff"

# Supersets that read the same files and more: what says gb2312 is often GBK with a few extras.
_WIDER = {"utf-8": "utf-8-sig", "gb2312": "gb18030", "gbk": "gb18030", "big5": "cp950"}

_MAGIC = (
    (
        b"PK\x03\x04",
        N_(
            "{path} is not a text table: it is an Excel workbook or a zip file; name it .xlsx, or "
            "save it as CSV (UTF-8)"
        ),
    ),
    (
        b"\xd0\xcf\x11\xe0",
        N_("{path} is not a text table: it is an old Excel workbook; name it .xls"),
    ),
    (b"PAR1", N_("{path} is not a text table: it is a Parquet file; name it .parquet")),
    (b"\x1f\x8b", N_("{path} is not a text table: it is compressed with gzip; unpack it first")),
)

_GB18030_FOUR_BYTES = re.compile(rb"[\x81-\xfe][0-9][\x81-\xfe][0-9]")
_HIGH_RUNS = re.compile(rb"[\x80-\xff]+")

_COMMON = frozenset(
    "的一是不了在人有我他这這个個们們中来來上大为為和国國地到以说說时時要就出会會可也你对對生能"
    "而子那得于於着著下自之年过過发發后後作里裡好很没沒还還都给給让讓买買太差"
)

_CHINESE_SHARE = 0.02
"""About one in a thousand random characters is a common one."""


def find_encoding(path: Path, named: str | None) -> str:
    """The codec that reads the whole file; an error where none does."""
    with path.open("rb") as file:
        head = file.read(_CHUNK_BYTES)
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            raise DataError(kind, path=path)
    if named is not None:
        codec = _lookup(named)
        if broken := _first_undecodable(path, codec):
            raise DataError(
                "{path} is not {name}: line {line} cannot be read; give its real encoding, "
                "or leave --encoding out to have it found",
                path=path,
                name=named,
                line=broken[0],
            )
        marked = head.startswith(codecs.BOM_UTF8)
        return codec if codec != "utf-8-sig" or marked else "utf-8"
    for mark, codec in _MARKS:
        if head.startswith(mark):
            if broken := _first_undecodable(path, codec):
                said = {"path": path, "codec": codec, "line": broken[0]}
                raise DataError(
                    "{path} begins as {codec} but line {line} cannot be read; save it "
                    "again as UTF-8",
                    **said,
                )
            return codec
    return _unmarked(path, head)


def _unmarked(path: Path, head: bytes) -> str:
    begin = head[:4096]
    if begin.count(0) * 10 > len(begin):
        high_byte_last = begin[1::2].count(0) >= begin[::2].count(0)
        raise DataError(
            "{path} is not a text table: it is full of zero bytes; if it is UTF-16 without "
            "a mark, give --encoding {codec}",
            path=path,
            codec="utf-16-le" if high_byte_last else "utf-16-be",
        )
    broken = _first_undecodable(path, "utf-8")
    if broken is None:
        return "utf-8"
    line, offset = broken
    # From a little before the first byte that is not UTF-8: what precedes it tells a
    # broken UTF-8 file from one in another encoding.
    with path.open("rb") as file:
        file.seek(max(0, offset - _CHUNK_BYTES // 2) & ~1)  # UTF-16 has two bytes a character
        sample = file.read(_CHUNK_BYTES)
    codec = _judge(path, sample, line)
    if failed := _first_undecodable(path, codec):
        said = {"path": path, "codec": codec.upper(), "line": failed[0]}
        raise DataError(
            "{path} is neither UTF-8 nor {codec}: line {line} cannot be read; give its encoding "
            "with --encoding, or save it as UTF-8",
            **said,
        )
    return codec


def _judge(path: Path, sample: bytes, line: int) -> str:
    """GB18030 or Big5, for bytes that are not UTF-8; an error for bytes that are not Chinese."""
    if b"\0" in sample:
        wide = max(("utf-16-le", "utf-16-be"), key=lambda codec: _common_share(sample, codec))
        if _common_share(sample, wide) > _CHINESE_SHARE:
            raise DataError(
                "{path} seems to be UTF-16 without a byte-order mark; give --encoding {codec}",
                path=path,
                codec=wide,
            )
        raise DataError(
            "{path} is not a text table: it is binary (line {line})", path=path, line=line
        )
    as_utf8 = sample.decode("utf-8", "replace")
    broken = as_utf8.count("\ufffd")
    valid = sum(char > "\x7f" for char in as_utf8) - broken
    if valid > 5 * broken:  # real GB18030 gives less than one to one but for single words
        raise DataError(
            "{path} is UTF-8 with broken bytes, first in line {line}; repair that line, or "
            "give its encoding with --encoding if it is another one",
            path=path,
            line=line,
        )
    # Chinese comes in pairs of high bytes; in Western text they stand alone between letters.
    runs = _HIGH_RUNS.findall(_GB18030_FOUR_BYTES.sub(b"", sample))
    if sum(len(run) == 1 for run in runs) * 2 > len(runs):
        raise DataError(
            "{path} is neither UTF-8 nor Chinese (GB18030), see line {line}; give its encoding "
            "(such as --encoding cp1252), or save it as UTF-8",
            path=path,
            line=line,
        )
    return max(("gb18030", "cp950"), key=lambda codec: _common_share(sample, codec))


def _common_share(sample: bytes, codec: str) -> float:
    """How much of the text is the commonest characters; the wrong codec gives rare ones."""
    text = [char for char in sample.decode(codec, "replace") if char > "\x7f"]
    return sum(char in _COMMON for char in text) / max(len(text), 1)


def _lookup(named: str) -> str:
    try:
        "a".encode(named)  # codecs.lookup alone would also take base64 and rot13
        name = codecs.lookup(named).name
    except (LookupError, ValueError):
        hint = nearest(named.lower(), {*aliases, *aliases.values(), "utf-8"})
        raise DataError(
            "there is no encoding {name}; write utf-8, gb18030, big5 or another that "
            "Python knows.{hint}",
            name=repr(named),
            hint=hint,
        ) from None
    return _WIDER.get(name, name)


def _first_undecodable(path: Path, codec: str) -> tuple[int, int] | None:
    """(line, byte offset) of about the first bytes the codec refuses; None where it reads all."""
    decoder = codecs.getincrementaldecoder(codec)()
    line, offset = 1, 0
    with path.open("rb") as file:
        while True:
            chunk = file.read(_CHUNK_BYTES)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeError as error:
                start = getattr(error, "start", 0)
                return line + chunk[:start].count(b"\n"), offset + start
            if not chunk:
                return None
            line += chunk.count(b"\n")
            offset += len(chunk)


@contextmanager
def opened(path: Path, encoding: str, newline: str | None = None) -> Iterator[IO[str]]:
    """The file as text, without the byte-order mark that some codecs leave in it."""
    with path.open(encoding=encoding, newline=newline) as file:
        if file.read(1) != _MARK:
            file.seek(0)
        yield file


def read_text(path: Path, named: str | None) -> str:
    """Reads a small file whole."""
    if named is None:
        try:
            return path.read_bytes().decode("utf-8").removeprefix(_MARK)
        except UnicodeDecodeError:
            pass
    with opened(path, find_encoding(path, named)) as file:
        return file.read()
