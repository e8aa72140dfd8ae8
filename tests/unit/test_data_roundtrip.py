"""Whatever a person writes into a text comes out of the file as it went in."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from data_fixtures import config, write_csv
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.data import read_table, read_texts
from memfit.data.table_files import open_file

# Any character a file can hold (no half emoji), with those that mean something to CSV often.
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
PIECES = st.sampled_from(['"', '""', *",;|\t\n\r", "\r\n", "😀", "评论", " ", "a"])
TEXTS = st.lists(st.one_of(PIECES, CHARACTERS), max_size=12).map("".join)
ROWS = st.lists(TEXTS, min_size=1, max_size=8)
FAST = settings(max_examples=40, deadline=None, derandomize=True)


@FAST
@given(texts=ROWS, delimiter=st.sampled_from([",", ";", "\t"]))
def test_csv_keeps_quotes_newlines_delimiters_and_emoji(texts: list[str], delimiter: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [(number, text) for number, text in enumerate(texts)]
        path = write_csv(Path(folder) / "a.csv", rows, delimiter=delimiter)
        table = open_file(path, None)
        assert list(table.read(("review",))) == [(text,) for text in texts]


@FAST
@given(texts=ROWS)
def test_gb18030_keeps_every_character(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [(0, "这是一个很好的中文句子，我们都在这里"), *((1, text) for text in texts)]
        path = write_csv(Path(folder) / "a.csv", rows, encoding="gb18030")
        assert list(open_file(path, "gb18030").read(("review",)))[1:] == [(text,) for text in texts]


@FAST
@given(texts=ROWS, as_array=st.booleans(), ascii_only=st.booleans())
def test_json_keeps_every_character(texts: list[str], as_array: bool, ascii_only: bool) -> None:
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts]
    content = f"[{','.join(lines)}]" if as_array else "\n".join(lines)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.json"
        path.write_text(content, encoding="utf-8", newline="")
        assert read_texts(str(path))["text"][:] == texts


@settings(max_examples=15, deadline=None, derandomize=True)
@given(texts=ROWS)
def test_every_row_of_a_table_is_kept_or_counted(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [("even" if n % 2 else "odd", text) for n, text in enumerate(texts * 2)]
        rows += [("even", "one"), ("even", "two"), ("odd", "three"), ("odd", "four")]
        data = read_table(config(write_csv(Path(folder) / "a.csv", rows), validation_split=0.5))
        kept = [*data.train["text"][:], *data.validation["text"][:]]
        assert sorted(kept) == sorted(text for _, text in rows if text.strip())
        assert data.counts.rows_read == len(rows)
        assert data.counts.dropped_no_text == len(rows) - len(kept)
