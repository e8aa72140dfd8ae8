"""Every kind of file gives the same rows, and every broken one a sentence that helps."""

from __future__ import annotations

import csv
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from data_fixtures import BAD, GOOD, config, reviews, write_csv, write_jsonl

from memfit.data import read_table, working_files
from memfit.data.columns import Columns
from memfit.data.reading import CleanRows
from memfit.data.table_files import open_file, open_hub, open_parquet, open_source
from memfit.errors import DataError

ROWS = reviews()


def rows_of(path: Path, columns: tuple[str, ...] = ("label", "review"), **options: Any) -> Any:
    table = open_file(path, options.get("encoding"))
    return list(table.read(columns))


def as_strings(rows: list[tuple[Any, str]]) -> list[tuple[str, str]]:
    return [(str(label), text) for label, text in rows]


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("utf-8", "utf-8"),
        ("utf-8-sig", "utf-8-sig"),
        ("gb18030", "gb18030"),
        ("utf-16", "utf-16"),
        ("utf-32", "utf-32"),
    ],
)
def test_the_encoding_is_found_and_the_text_unharmed(
    tmp_path: Path, written: str, found: str
) -> None:
    path = write_csv(tmp_path / "评论.csv", [*ROWS, (1, "表情😀也行")], encoding=written)
    table = open_file(path, None)
    assert table.encoding == found
    assert table.columns == ("label", "review")
    assert list(table.read(("review",)))[-1] == ("表情😀也行",)
    assert rows_of(path)[:-1] == as_strings(ROWS)


def test_big5_is_told_from_gb18030(tmp_path: Path) -> None:
    texts = ["服務人員都很親切，我們還會再來", "這個房間不好，沒有窗", "早餐還可以的"]
    path = write_csv(tmp_path / "a.csv", [(1, text) for text in texts], encoding="big5")
    assert open_file(path, None).encoding == "cp950"
    assert [row[1] for row in rows_of(path)] == texts


def test_a_file_whose_only_chinese_comes_after_a_megabyte_is_still_gb18030(tmp_path: Path) -> None:
    rows = [(0, "plain ascii " * 100)] * 1000 + [(1, "最后一行是中文")]
    path = write_csv(tmp_path / "late.csv", rows, encoding="gbk")
    assert path.stat().st_size > 1 << 20
    assert rows_of(path)[-1] == ("1", "最后一行是中文")


@pytest.mark.parametrize("named", ["gb2312", "GBK", "gb18030"])
def test_a_named_chinese_encoding_is_read_as_its_widest_form(tmp_path: Path, named: str) -> None:
    path = write_csv(tmp_path / "a.csv", [(1, "镕€😀")], encoding="gb18030")
    assert rows_of(path, encoding=named) == [("1", "镕€😀")]


def test_a_named_western_encoding_is_used(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [(1, "très élégant")], encoding="cp1252")
    assert rows_of(path, encoding="cp1252") == [("1", "très élégant")]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("name", ["a.csv", "a.txt"])
def test_the_delimiter_is_found(tmp_path: Path, delimiter: str, name: str) -> None:
    rows = [(1, 'one, two; three\tfour "five"\nsix'), (0, "plain")]
    path = write_csv(tmp_path / name, rows, delimiter=delimiter)
    assert rows_of(path) == as_strings(rows)


def test_excels_separator_line_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("sep=;\r\nlabel;review\r\n1;gut, sehr\r\n", encoding="utf-8")
    assert rows_of(path) == [("1", "gut, sehr")]


def test_a_tsv_with_bare_quotes_keeps_every_line(tmp_path: Path) -> None:
    path = tmp_path / "glue.tsv"
    path.write_text('review\tlabel\n"open\t1\nsay "hi"\t0\n"all ""quoted"""\t1\n', encoding="utf-8")
    assert rows_of(path) == [("1", '"open'), ("0", 'say "hi"'), ("1", 'all "quoted"')]


@pytest.mark.parametrize(
    "text", ["\n\t", 'say "hi"\n\tthere', '"', '"\n\t"', "plain", "a\r\nb\tc\td"]
)
def test_a_tsv_of_a_csv_writer_keeps_quoted_tabs_and_newlines(tmp_path: Path, text: str) -> None:
    path = write_csv(tmp_path / "a.tsv", [(1, text), (0, text)], delimiter="\t")
    assert rows_of(path) == [("1", text), ("0", text)]


def test_a_single_open_quote_in_a_tsv_is_a_character(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('label\treview\n1\t"open\n' + "0\tfine\n" * 3, encoding="utf-8")
    assert rows_of(path) == [("1", '"open'), *[("0", "fine")] * 3]


def test_the_words_none_na_and_null_are_texts(tmp_path: Path) -> None:
    words = ["None", "NA", "null", "nan", "N/A"]
    path = write_csv(tmp_path / "a.csv", [(1, word) for word in words])
    assert [text for _, text in rows_of(path)] == words


def test_cells_missing_at_the_end_of_a_row_are_empty_and_extra_empty_ones_ignored(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("label,review,id\n1,good\n\n0,bad,7,,\n", encoding="utf-8")
    assert rows_of(path, ("review", "id")) == [("good", ""), ("bad", "7")]


def test_columns_without_a_name_are_numbered(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [(0, 1, "x")], header=("", "label", "review"))
    assert open_file(path, None).columns == ("column_1", "label", "review")


def test_a_text_longer_than_the_csv_modules_limit_is_read(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [(1, "长" * 200_000)])
    assert len(rows_of(path)[0][1]) == 200_000


OBJECTS = [{"label": label, "review": text} for label, text in ROWS]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    assert rows_of(write_jsonl(tmp_path / name, OBJECTS)) == ROWS


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_streams_across_its_chunks(
    tmp_path: Path, indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.data.table_files._CHUNK_CHARS", 37)
    path = tmp_path / "a.json"
    path.write_text("\n" + json.dumps(OBJECTS, ensure_ascii=False, indent=indent), "utf-8")
    assert rows_of(path) == ROWS


def test_json_keys_may_be_missing_in_some_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"label": 1}, {"review": "x"}])
    assert open_file(path, None).columns == ("label", "review")
    assert rows_of(path) == [(1, None), (None, "x")]


def test_a_parquet_file_of_one_row_group_streams(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"{row} " + "x" * 1000 for row in range(20_000)]})
    parquet.write_table(table, path, row_group_size=20_000, compression="none")
    del table
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in open_file(path, None).read(["text"])]
    assert len(held) == 20_000
    assert max(held) < 12 << 20 < path.stat().st_size  # two batches and a buffer, not the file


def test_a_long_text_that_parquet_stores_once_does_not_fill_the_memory(tmp_path: Path) -> None:
    text = "word " * (1 << 18)
    path = tmp_path / "a.parquet"
    part = pyarrow.table({"text": [text] * 20, "label": [0, 1] * 10})
    with pyarrow.parquet.ParquetWriter(path, part.schema) as writer:
        for _ in range(100):
            writer.write_table(part)
    assert path.stat().st_size < 8 << 20
    peak = 0
    for row in open_parquet(path).read(["text"]):
        peak = max(peak, pyarrow.total_allocated_bytes())
        assert row == (text,)
    assert peak < 256 << 20
    long = write_csv(tmp_path / "a.csv", [(0, "a")])
    long.with_suffix(".jsonl").write_text(json.dumps({"text": "a" * (1 << 25), "label": 0}))
    with pytest.raises(DataError, match="a text has 33,554,432 characters, and 16,777,216 are"):
        read_table(config(long.with_suffix(".jsonl")))


def test_parquet_reads_types_and_lists(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    table = pa.table({"id": [1, 2], "label": [["a"], ["a", "b"]], "review": ["x", None]})
    parquet.write_table(table, path)
    assert rows_of(path) == [(["a"], "x"), (["a", "b"], None)]


def test_every_format_gives_the_same_split(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    labels, texts = zip(*ROWS, strict=True)
    parquet.write_table(pa.table({"label": labels, "review": texts}), tmp_path / "a.parquet")
    paths = [
        write_csv(tmp_path / "a.csv", ROWS),
        write_csv(tmp_path / "a.tsv", ROWS, delimiter="\t"),
        write_jsonl(tmp_path / "a.jsonl", OBJECTS),
        tmp_path / "a.parquet",
    ]
    validations = [read_table(config(path, validation_split=0.25)).validation for path in paths]
    assert len(validations[0]) == 10
    for other in validations[1:]:
        assert other.to_dict() == validations[0].to_dict()


def test_a_file_name_with_brackets_spaces_and_chinese_is_a_file_name(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "酒店 评论[1]*.csv", ROWS)
    assert rows_of(path) == as_strings(ROWS)


def make_repository(folder: Path) -> Path:
    """What a dataset repository looks like once it is on this machine."""
    folder.mkdir()
    write_csv(folder / "train.csv", ROWS)
    write_csv(folder / "validation.csv", [(1, GOOD[0]), (0, BAD[0])])
    write_csv(folder / "test.csv", [(1, "secret")])
    return folder


def test_a_hub_dataset_brings_its_own_validation_and_its_test_split_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    train, validation = open_hub(str(make_repository(tmp_path / "reviews")))
    assert next(train.read(("review", "label"))) == (ROWS[0][1], 1)
    assert validation is not None
    assert list(validation.read(("label", "review"))) == [(1, GOOD[0]), (0, BAD[0])]
    assert "training split" in train.where


def test_a_hub_dataset_with_one_split_is_split_by_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "reviews"
    folder.mkdir()
    write_csv(folder / "validation.csv", ROWS)
    train, validation = open_hub(str(folder))
    assert validation is None
    assert len(list(train.read(("label",)))) == len(ROWS)


def test_an_unreachable_hub_dataset_is_one_sentence() -> None:
    with pytest.raises(DataError, match="'nobody/no-such-dataset' is neither a file here nor"):
        open_source("nobody/no-such-dataset", None)


@pytest.mark.parametrize(
    "name", ["reviews.csv", "./reviews", "data/reviews.parquet", "/no/such/dir", "評論/資料"]
)
def test_a_missing_file_is_not_looked_up_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"^there is no file .*; check the path"):
        open_source(name, None)


def test_a_missing_file_in_an_existing_folder_suggests_the_nearest(tmp_path: Path) -> None:
    write_csv(tmp_path / "reviews.csv", ROWS)
    with pytest.raises(DataError, match=r"Did you mean 'reviews\.csv'\?"):
        open_file(tmp_path / "review.csv", None)


def test_a_folder_lists_the_tables_in_it(tmp_path: Path) -> None:
    write_csv(tmp_path / "b.csv", ROWS)
    with pytest.raises(DataError, match=r"is a folder; give one of the files in it \(b\.csv\)"):
        open_source(str(tmp_path), None)


CUT_OFF = "label,text\n1,这家酒店真的很不错\n0,".encode() + b"\xe8\n"
BROKEN: list[tuple[str, bytes, str]] = [
    ("a.csv", b"", "is empty; give a table"),
    ("a.csv", b"\n\n", "is empty; give a table with a header"),
    ("a.csv", b"PK\x03\x04rest", "it is an Excel workbook or a zip file"),
    ("a.csv", b"PAR1....", "it is a Parquet file; name it .parquet"),
    ("a.csv", bytes(range(256)) * 40, "it is binary (line 2)"),
    ("a.csv", "label,text\n1,abc\n".encode("utf-16-le"), "give --encoding utf-16-le"),
    ("a.csv", "标签,文本\n好,这里的人都好\n".encode("utf-16-le") * 9, "give --encoding utf-16-le"),
    ("a.csv", "标签,文本\n好,这里的人都好\n".encode("utf-16-be") * 9, "give --encoding utf-16-be"),
    ("a.csv", b"label,text\n1,one,two\n", "line 2: 3 fields where the first line has 2"),
    ("a.csv", b'label,text\n1,fine\n0,"open\n1,x\n', 'line 3: a quote (") is opened'),
    ("a.csv", "label,text\n1,très bon\n0,élégant".encode("cp1252"), "such as --encoding cp1252"),
    ("a.csv", b"label,text\n1,\xff\xff\xff\xff\n", "neither UTF-8 nor GB18030: line 2"),
    ("a.csv", CUT_OFF, "broken bytes, first in line 3"),
    ("a.csv", b"\xff\xfel\0a\0\x00", "begins as utf-16 but line"),
    ("a.xlsx", b"PK", "cannot be read as a spreadsheet"),
    ("a.docx", b"PK", "cannot tell a table from the ending '.docx'"),
    ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2: not JSON (Expecting value)"),
    ("a.jsonl", b'"just a string"\n', "line 1: str where an object is expected"),
    ("a.jsonl", b"  \n", "is empty; give one JSON object"),
    ("a.json", b'[{"text": "x"},\n {"text": oops}]', "line 2: not JSON (Expecting value)"),
    ("a.json", b'[{"text": "x"},\n 3]', "line 2: int where an object is expected"),
    ("a.parquet", b"label,text\n1,a\n", "is not a Parquet file"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "sentence"), BROKEN)
def test_a_broken_file_says_what_is_wrong_and_where(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(sentence)) as caught:
        read_table(config(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_parquet_file_broken_in_the_middle_is_one_sentence(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    table = pa.table({"label": [0, 1] * 500, "text": [f"text number {n}" for n in range(1000)]})
    parquet.write_table(table, path, compression="gzip")
    content = bytearray(path.read_bytes())
    content[100:400] = bytes(300)
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read to its end"):
        read_table(config(path))


@pytest.mark.parametrize("named", ["utf-8", "ascii", "utf-16"])
def test_a_wrong_named_encoding_says_which_line(tmp_path: Path, named: str) -> None:
    path = write_csv(tmp_path / "a.csv", [(1, "中文a")], encoding="gbk")
    with pytest.raises(DataError, match=rf"is not {named}: line [12] cannot be read"):
        open_file(path, named)


@pytest.mark.parametrize(("named", "hint"), [("utf9", "Did you mean 'utf"), ("base64", "")])
def test_an_unknown_encoding_is_refused(tmp_path: Path, named: str, hint: str) -> None:
    path = write_csv(tmp_path / "a.csv", ROWS)
    with pytest.raises(DataError, match=rf"there is no encoding '{named}'.*{hint}"):
        open_file(path, named)


def test_a_quote_never_closed_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.data.table_files._LONGEST_FIELD", 1000)
    path = tmp_path / "a.csv"
    path.write_text('label,text\n1,"' + "line\n" * 600, encoding="utf-8")
    before = csv.field_size_limit(1000)
    try:
        with pytest.raises(DataError, match=r"line 2: a quote \(\"\) is opened and not closed"):
            read_table(config(path))
    finally:
        csv.field_size_limit(before)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(DataError, match="is not a regular file; write the table to a file first"):
        read_table(config(tmp_path / "a.csv"))


def test_a_file_that_is_cut_off_while_it_is_read_is_one_sentence(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", reviews(400))
    table = open_file(path, None)
    path.write_bytes(path.read_bytes()[:-3] + b"\xe8")
    with pytest.raises(DataError, match="cannot be read to its end"):
        CleanRows(table, Columns("review", None, ("label",)))


def test_a_process_that_starts_beside_another_leaves_its_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    lock, looks = fcntl.flock, iter([True])

    def flock(handle: int, how: int) -> None:
        if next(looks, False):  # the other one looks for abandoned folders just before this
            working_files._remove_abandoned(tmp_path)
        lock(handle, how)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", flock)
    made = working_files._folder_of.__wrapped__(os.getpid())
    assert Path(made.name).is_dir()
    working_files._remove_abandoned(tmp_path)
    assert Path(made.name).is_dir()
    made.cleanup()
