"""Tables as people have them: workbooks, class folders, files without a header, data in Python."""

from __future__ import annotations

import builtins
import codecs
import csv
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from data_fixtures import config, reviews, write_csv, write_jsonl, write_xlsx
from datasets import ClassLabel, Dataset, DatasetDict
from transformers import TrainerCallback

import memfit
from memfit.data import read_table, read_texts
from memfit.data.in_memory import path_of, source_of, texts_of
from memfit.data.table_files import open_file, open_source
from memfit.errors import ConfigError, DataError

SPORTS = ["马晓旭意外受伤, 国奥, 警惕", "商瑞华首战复仇心切"]
HOMES = ["金地国际花园, 二期开盘", "毕业生租房, 看这几点"]


def all_rows(path: Path, *columns: str, **options: Any) -> list[tuple[Any, ...]]:
    return list(open_file(path, options.get("encoding"), options.get("header")).read(columns))


def write_rows(path: Path, rows: list[tuple[Any, ...]], delimiter: str = "\t") -> Path:
    """Rows alone, as the corpora of the field have them."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_NONE).writerows(rows)
    return path


# ---- workbooks ----


@pytest.mark.parametrize("name", ["a.xlsx", "a.xlsm"])
def test_a_workbook_is_read_like_the_same_csv(tmp_path: Path, name: str) -> None:
    workbook = write_xlsx(tmp_path / name, [("label", "review"), *reviews()])
    found = read_table(config(workbook))
    expected = read_table(config(write_csv(tmp_path / "a.csv", reviews())))
    assert found.labels == expected.labels
    assert found.validation["text"][:] == expected.validation["text"][:]
    assert found.validation["label"][:] == expected.validation["label"][:]


def test_numbers_of_a_workbook_are_written_as_they_are_shown(tmp_path: Path) -> None:
    rows = [("label", "text"), (1, 2024), (0.5, "a"), (None, "b"), (None, None), (2, "c")]
    path = write_xlsx(tmp_path / "a.xlsx", rows)
    assert all_rows(path, "label", "text") == [(1, 2024), (0.5, "a"), ("", "b"), (2, "c")]


def test_a_workbook_without_a_header_is_numbered(tmp_path: Path) -> None:
    path = write_xlsx(
        tmp_path / "a.xlsx", [("体育", text) for text in SPORTS] + [("房产", HOMES[0])]
    )
    assert open_file(path, None).columns == ("1", "2")
    assert all_rows(path, "1")[0] == ("体育",)


def test_a_workbook_without_the_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = builtins.__import__

    def missing(name: str, *args: Any) -> Any:
        if name == "python_calamine":
            raise ImportError(name)
        return found(name, *args)

    path = write_xlsx(tmp_path / "a.xlsx", [("label", "text"), (1, "a")])
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(DataError, match=r'pip install "memfit\[excel\]"'):
        open_file(path, None)


# ---- a folder of class folders ----


def write_folders(path: Path, *, encoding: str = "utf-8") -> Path:
    for label, texts in (("体育", SPORTS * 5), ("房产", HOMES * 5)):
        folder = path / label
        folder.mkdir(parents=True)
        for number, text in enumerate(texts):
            (folder / f"{number:02}.txt").write_text(f"{text}\n第二行{number}", encoding=encoding)
    (path / ".git").mkdir()
    (path / "README.md").write_text("not a text")
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030", "utf-16"])
def test_a_folder_of_class_folders_is_a_table(tmp_path: Path, encoding: str) -> None:
    found = read_table(config(write_folders(tmp_path / "news", encoding=encoding)))
    assert found.labels.names == ("体育", "房产")
    assert (found.counts.rows_read, found.counts.validation_rows) == (20, 2)
    assert {*found.train["text"], *found.validation["text"]} >= {f"{SPORTS[0]}\n第二行0"}


def test_a_split_that_comes_in_folders_is_kept_and_the_test_folder_left_alone(
    tmp_path: Path,
) -> None:
    for split in ("train", "val", "test"):
        write_folders(tmp_path / split)
    table, validation = open_source(str(tmp_path), None)
    assert validation is not None
    assert (table.where, validation.where) == (str(tmp_path / "train"), str(tmp_path / "val"))
    assert next(table.read(("label", "file"))) == ("体育", "体育/00.txt")
    whole = read_table(config(tmp_path / "train", validation_file=str(tmp_path / "val")))
    assert whole.counts.validation_rows == 20


def test_a_folder_of_anything_else_says_what_it_should_hold(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", reviews())
    with pytest.raises(DataError, match=r"\(a.csv\), or a folder that has a folder of .txt files"):
        open_source(str(tmp_path), None)


# ---- without a header ----


@pytest.mark.parametrize("name", ["cnews.train.txt", "a.tsv"])
@pytest.mark.parametrize("text_first", [False, True])
def test_label_tab_text_is_read_without_a_header(
    tmp_path: Path, name: str, text_first: bool
) -> None:
    rows = [("体育", f"{text}{n}") for n in range(5) for text in SPORTS]
    rows += [("房产", f"{text}{n}") for n in range(5) for text in HOMES]
    path = write_rows(tmp_path / name, [row[::-1] if text_first else row for row in rows])
    found = read_table(config(path))
    assert found.counts.rows_read == 20
    assert found.labels.names == ("体育", "房产")
    expected = ("1", "2") if text_first else ("2", "1")
    assert (found.counts.text_column, found.counts.label_column) == expected
    texts = read_texts(str(path))["text"][:]
    assert texts == [text for _, text in rows]


def test_columns_without_names_are_named_by_number(tmp_path: Path) -> None:
    rows = [(number, label, text) for number, (label, text) in enumerate(reviews())]
    path = write_rows(tmp_path / "a.csv", rows, ",")
    with pytest.raises(DataError, match=r"cannot be told among 1 \(0\), 2 \(1\), 3 \(房间很大"):
        read_table(config(path, header=False))
    found = read_table(config(path, header=False, label_column="2", text_column="3"))
    assert found.counts.rows_read == 40
    assert found.labels.names == ("0", "1")


def test_a_header_is_a_header_whatever_it_is_called(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", reviews(), header=("等级", "客户说的话"))
    assert open_file(path, None).columns == ("等级", "客户说的话")
    found = read_table(config(path, label_column="等级", text_column="客户说的话"))
    assert found.counts.rows_read == 40
    forced = write_csv(tmp_path / "b.csv", [("a", "x"), ("a", "y")], header=("a", "b"))
    assert open_file(forced, None).columns == ("1", "2")
    assert open_file(forced, None, header=True).columns == ("a", "b")


def test_one_text_a_line_is_predicted_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "sentences.txt"
    path.write_text("\n".join(SPORTS[1:] + HOMES[1:]) + "\n", encoding="utf-8")
    assert read_texts(str(path), header=False)["text"][:] == SPORTS[1:] + HOMES[1:]


def test_texts_with_commas_are_one_a_line_and_the_message_names_no_header(tmp_path: Path) -> None:
    path = tmp_path / "sentences.txt"
    texts = ["很好,下次再来", '他说 "一般", 我也是', "位置好,早餐好,价格也好"]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="say --no-header if the first line is a row"):
        read_texts(str(path))
    assert read_texts(str(path), header=False)["text"][:] == texts
    path.write_text("a,b\tc\nd\te,f\n", encoding="utf-8")
    assert open_file(path, None, header=False, only_texts=True).columns == ("1", "2")


def test_texts_with_commas_are_not_cut_into_labels_for_a_training(tmp_path: Path) -> None:
    path = tmp_path / "sentences.txt"
    texts = ["1,很好,下次再来", "1,一般", "0,位置好,早餐好,价格也好"]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    for header in (None, False):
        with pytest.raises(DataError, match="one column and no label; write a label, a tab"):
            read_table(config(path, header=header))


def test_a_text_file_of_labels_and_texts_is_cut_at_tabs_though_a_line_lacks_one(
    tmp_path: Path,
) -> None:
    lines = [f"{label}\t{text}, 真的, 不错" for label, text in reviews()]
    path = tmp_path / "a.txt"
    path.write_text("\n".join([*lines[:20], "一行没有标签,也没有制表符", *lines[20:]]), "utf-8")
    found = read_table(config(path))
    assert (found.counts.rows_read, found.counts.dropped_no_text) == (41, 1)
    assert found.labels.names == ("0", "1")


def test_a_format_that_names_its_columns_refuses_no_header(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"label": 1, "text": "a"}])
    with pytest.raises(DataError, match="names its columns itself"):
        open_file(path, None, header=False)


# ---- byte-order marks ----


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("codec", "mark", "named"),
    [
        ("utf-8", codecs.BOM_UTF8, None),
        ("utf-8", codecs.BOM_UTF8, "utf-8"),
        ("utf-16-le", codecs.BOM_UTF16_LE, None),
        ("utf-16-be", codecs.BOM_UTF16_BE, None),
        ("utf-16-le", codecs.BOM_UTF16_LE, "utf-16-le"),
        ("utf-16-be", codecs.BOM_UTF16_BE, "utf-16-be"),
        ("utf-32-le", codecs.BOM_UTF32_LE, None),
        ("utf-32-be", codecs.BOM_UTF32_BE, None),
        ("utf-32-le", codecs.BOM_UTF32_LE, "utf-32-le"),
        ("gb18030", "\ufeff".encode("gb18030"), None),
        ("gb18030", "\ufeff".encode("gb18030"), "gbk"),
    ],
)
def test_a_byte_order_mark_is_no_part_of_the_first_name(
    tmp_path: Path, ending: str, codec: str, mark: bytes, named: str | None
) -> None:
    path = tmp_path / f"a.{ending}"
    rows = reviews(1)
    if ending == "csv":
        write_csv(path, [row[::-1] for row in rows], header=("review", "label"))
    else:
        write_jsonl(path, [{"review": text, "label": label} for label, text in rows])
    path.write_bytes(mark + path.read_text(encoding="utf-8").encode(codec))
    assert open_file(path, named).columns == ("review", "label")
    assert all_rows(path, "review", encoding=named) == [(text,) for _, text in rows]


# ---- given in Python ----

TEXTS, LABELS = [text for _, text in reviews()], [label for label, _ in reviews()]

GIVEN: dict[str, Any] = {
    "frame": lambda: pd.DataFrame({"review": TEXTS, "label": LABELS}, index=range(7, 47)),
    "category": lambda: pd.DataFrame({"review": TEXTS, "label": pd.Categorical(LABELS)}),
    "numbers and words": lambda: pd.DataFrame({"review": TEXTS, "label": ["1", *LABELS[1:]]}),
    "dataset": lambda: Dataset.from_dict({"review": TEXTS, "label": LABELS}).with_format("numpy"),
    "columns": lambda: {"review": TEXTS, "label": LABELS},
    "rows": lambda: [{"label": a, "review": b} for a, b in zip(LABELS, TEXTS, strict=True)],
    "lists": lambda: (TEXTS, LABELS),
    "series": lambda: (pd.Series(TEXTS), pd.Series(LABELS)),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_data_given_in_python_is_the_same_table(tmp_path: Path, kind: str) -> None:
    expected = read_table(config(write_csv(tmp_path / "a.csv", reviews())))
    path = path_of(GIVEN[kind]())
    assert path == path_of(GIVEN[kind]())  # the same data is the same file
    found = read_table(config(path))
    assert found.labels == expected.labels
    assert found.validation["text"][:] == expected.validation["text"][:]
    assert found.validation["label"][:] == expected.validation["label"][:]


def test_rows_without_a_text_or_a_label_are_dropped_from_a_frame_too() -> None:
    frame = pd.DataFrame({"text": [None, *TEXTS[1:]], "label": [1, None, *LABELS[2:]]})
    counts = read_table(config(path_of(frame))).counts
    assert (counts.rows_read, counts.dropped_no_text, counts.dropped_no_label) == (40, 1, 1)


def test_pairs_come_as_tuples() -> None:
    pairs = [(text, text[::-1]) for text in TEXTS]
    found = read_table(config(path_of((pairs, LABELS))))
    assert found.train["text_pair"][0] == found.train["text"][0][::-1]


def test_a_dataset_keeps_its_label_names_and_its_splits() -> None:
    rows = Dataset.from_dict({"text": TEXTS, "label": LABELS})
    rows = rows.cast_column("label", ClassLabel(names=["差评", "好评"]))
    given = source_of(DatasetDict(train=rows, test=rows, validation=rows.select(range(8))))
    found = read_table(config(given["path"], validation_file=given["validation_file"]))
    assert found.labels.names == ("差评", "好评")
    assert (found.counts.train_rows, found.counts.validation_rows) == (40, 8)
    assert source_of(DatasetDict(train=rows)) == {"path": path_of(rows)}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (({"a"}, {1}, {2}), "the data is a tuple; give a file, a DataFrame"),
        (7, "the data is a int; give a file"),
        ((TEXTS, LABELS[1:]), "columns of different lengths: text 40, label 39"),
    ],
)
def test_data_of_another_kind_says_what_may_be_given(data: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        path_of(data)


def test_a_path_stays_a_path() -> None:
    assert source_of("reviews.csv") == {"path": "reviews.csv"}
    assert source_of(None) == {"path": None}


def test_texts_are_found_in_columns() -> None:
    frame = GIVEN["frame"]()
    assert texts_of(frame, None, None) == TEXTS
    assert texts_of(GIVEN["dataset"](), "review", None) == TEXTS
    assert texts_of(frame, "review", "label")[0] == (TEXTS[0], "1")
    assert texts_of(frame["review"], None, None) == TEXTS
    assert texts_of(TEXTS, None, None) is TEXTS
    with pytest.raises(DataError, match="no column 'text'"):
        texts_of(frame, "text", None)


@pytest.mark.parametrize("function", [memfit.finetune, memfit.plan])
def test_texts_and_labels_given_apart_are_told_how_to_go_together(function: Any) -> None:
    how = rf"write {function.__name__}\(\(texts, labels\), ...\)"
    with pytest.raises(ConfigError, match=how):
        function(TEXTS, LABELS)
    with pytest.raises(ConfigError, match=how):
        function(texts=TEXTS, labels=LABELS)


@pytest.mark.usefixtures("undrawn")
def test_a_frame_is_trained_on_resumed_evaluated_and_predicted(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == 2:
                raise RuntimeError("the notebook died")

    frame, run = GIVEN["frame"](), tmp_path / "run"
    options = {"model": tiny_model_dir, "output_dir": run, "quiet": True}
    with pytest.raises(RuntimeError, match="the notebook died"):
        memfit.finetune(
            frame, **options, callbacks=[Stop()], max_steps=3, save_steps=1, eval_strategy="no",
            batch_size=8, max_length=32, use_cpu=True, exact=True,
        )  # fmt: skip
    result = memfit.finetune(frame, output_dir=run, resume=True, quiet=True)
    assert result.summary.data["rows_read"] == 40
    found = memfit.evaluate(run, (TEXTS, LABELS))
    assert found.metrics == memfit.evaluate(run, frame, text_column="review").metrics
    classifier = memfit.load(run)
    for given in (frame, Dataset.from_pandas(frame), (TEXTS, LABELS)):
        assert classifier.evaluate(given).metrics == found.metrics
    answers = classifier.predict(frame)
    assert [one.label for one in answers] == [one.label for one in memfit.load(run).predict(TEXTS)]
