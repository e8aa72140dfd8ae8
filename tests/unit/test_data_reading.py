"""From a file to training and validation rows: what is dropped, counted, split and left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_fixtures import BAD, GOOD, config, reviews, write_csv, write_jsonl

from memfit.data import DataCounts, LabelSpace, read_table, read_texts
from memfit.data.splitting import numbered, split_rows
from memfit.errors import DataError

CHN = ("data", "ChnSentiCorp_htl_all.csv")


def test_chnsenticorp_is_split_as_the_tutorials_split_it(shared: Path) -> None:
    data = read_table(config(shared.joinpath(*CHN), label_names={"0": "負評", "1": "正評"}))
    assert asdict(data.counts) == {
        "rows_read": 7766,
        "dropped_no_text": 1,
        "dropped_no_label": 0,
        "train_rows": 6988,
        "validation_rows": 777,
        "duplicates_across_split": 0,
        "contradicting_rows": 0,
        "contradicting_example": "",
        "train_class_counts": {"負評": 2199, "正評": 4789},
        "validation_class_counts": {"負評": 244, "正評": 533},
        "text_column": "review",
        "text_pair_column": None,
        "label_column": "label",
        "group_column": None,
        "groups": None,
        "encoding": "utf-8",
    }
    assert data.labels == LabelSpace("single_label", ("負評", "正評"))
    assert (len(data.train), len(data.validation)) == (6988, 777)
    assert data.train.column_names == ["text", "label"]
    assert data.train[0]["label"] == 1
    assert data.train[0]["text"].startswith("距离川沙公路较近")
    texts = {*data.train["text"][:], *data.validation["text"][:]}
    assert len(texts) == 7765


def test_chnsenticorp_saved_by_chinese_windows_gives_the_same_rows(
    shared: Path, tmp_path: Path
) -> None:
    original = shared.joinpath(*CHN)
    path = tmp_path / "酒店.csv"
    path.write_text(original.read_text(encoding="utf-8"), encoding="gb18030")
    ours, theirs = read_table(config(path)), read_table(config(original))
    assert ours.counts == replace(theirs.counts, encoding="gb18030")
    assert ours.validation["text"][:] == theirs.validation["text"][:]


def test_rows_without_text_or_label_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [*reviews(), (1, ""), (1, "  \n\t"), ("", "no label"), (" ", "blank"), ("", "")]
    counts = read_table(config(write_csv(tmp_path / "a.csv", rows))).counts
    assert (counts.rows_read, counts.dropped_no_text, counts.dropped_no_label) == (45, 3, 2)
    assert counts.train_rows + counts.validation_rows == 40


def test_missing_values_of_json_are_dropped_and_numbers_are_texts(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": n, "label": n % 2} for n in range(20)]
    rows += [{"text": None, "label": 1}, {"label": 1}, {"text": "x", "label": None}]
    rows += [{"text": float("nan"), "label": 1}, {"text": "x", "label": float("nan")}]
    data = read_table(config(write_jsonl(tmp_path / "a.jsonl", rows)))
    assert (data.counts.dropped_no_text, data.counts.dropped_no_label) == (3, 2)
    assert {*data.train["text"][:], *data.validation["text"][:]} == {str(n) for n in range(20)}


def test_texts_are_kept_to_the_letter_but_compared_without_their_edges(tmp_path: Path) -> None:
    train = write_csv(tmp_path / "a.csv", [(1, " same "), (0, "other"), (1, "third")])
    validation = write_csv(tmp_path / "b.csv", [(1, "same"), (1, "same\n"), (0, "new")])
    data = read_table(config(train, validation_file=str(validation)))
    assert data.train["text"][:] == [" same ", "other", "third"]
    assert data.counts.duplicates_across_split == 2


def test_duplicates_of_a_class_with_one_text_are_counted_and_kept(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [(1, "good"), (0, "bad")] * 20)
    data = read_table(config(path))
    assert data.counts.duplicates_across_split == 4
    assert data.counts.validation_rows == 4


def test_equal_texts_stay_on_one_side_of_the_split(tmp_path: Path) -> None:
    rows = [(n % 2, f"text {n // 6} of {n % 2}") for n in range(600)]  # each three times
    data = read_table(config(write_csv(tmp_path / "a.csv", rows)))
    assert data.counts.duplicates_across_split == 0
    assert data.counts.validation_class_counts == {"0": 30, "1": 30}
    several = [(f"{n % 2}|{n % 3}", f"text {n // 3}") for n in range(300)]
    data = read_table(config(write_csv(tmp_path / "b.csv", several)))
    assert data.counts.duplicates_across_split == 0
    assert data.counts.validation_rows == 30


def test_a_text_with_two_labels_stays_on_one_side(tmp_path: Path) -> None:
    rows = [(label, f"text {n}") for n in range(100) for label in (0, 1)]
    counts = read_table(config(write_csv(tmp_path / "a.csv", rows))).counts
    assert (counts.contradicting_rows, counts.duplicates_across_split) == (200, 0)
    assert set(counts.validation_class_counts.values()) == {counts.validation_rows // 2}


def test_the_split_of_repeated_texts_does_not_follow_the_hashes_of_a_process() -> None:
    hashes = np.array([7, -3, 7, 5, -3, 9])
    assert numbered(hashes).tolist() == [0, 1, 0, 2, 1, 3]
    assert numbered(-hashes).tolist() == [0, 1, 0, 2, 1, 3]
    assert numbered(np.arange(5)) is None


def test_a_group_is_never_divided_and_every_class_is_on_both_sides(tmp_path: Path) -> None:
    rows = [(n % 2, f"text {n}", f"customer {n % 40}" if n % 40 else "") for n in range(800)]
    header = ("label", "text", "customer")
    path = write_csv(tmp_path / "a.csv", rows, header)
    data = read_table(config(path, group_column="Customer"))
    of_text = {text: customer for _, text, customer in rows}
    train, held = (
        {of_text[text] for text in part["text"][:]} for part in (data.train, data.validation)
    )
    assert train & held <= {""}  # rows without a group are each alone
    assert data.counts.groups == 39 + 20
    assert data.counts.validation_rows == 80
    assert min(data.counts.validation_class_counts.values()) >= 30
    again = read_table(config(path, group_column="customer"))
    assert again.validation["text"][:] == data.validation["text"][:]


def test_groups_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    header = ("label", "text", "who")
    path = write_csv(tmp_path / "a.csv", [(n % 2, f"text {n}", n % 2) for n in range(40)], header)
    with pytest.raises(DataError, match="2 groups cannot be split so that every class"):
        read_table(config(path, group_column="who"))
    with pytest.raises(DataError, match=r"no column 'whom' \(--group-column\)"):
        read_table(config(path, group_column="whom"))
    with pytest.raises(DataError, match="'label' is the text or the label already"):
        read_table(config(path, group_column="label"))
    with pytest.raises(DataError, match="leave it out"):
        read_table(config(path, group_column="who", validation_file=str(path)))


def test_a_pair_is_a_duplicate_only_as_a_whole(tmp_path: Path) -> None:
    header = ("sentence1", "sentence2", "label")
    train = write_csv(tmp_path / "a.csv", [("a", "b", 1), ("c", "d", 0), ("x", "", 0)], header)
    validation = write_csv(tmp_path / "b.csv", [("a", "d", 1), ("c", "d", 0)], header)
    data = read_table(config(train, validation_file=str(validation)))
    assert data.train.column_names == ["text", "text_pair", "label"]
    assert data.train[1] == {"text": "c", "text_pair": "d", "label": 0}
    assert data.counts.duplicates_across_split == 1
    assert data.counts.dropped_no_text == 1
    assert data.counts.text_pair_column == "sentence2"


def test_the_seed_decides_the_split_and_nothing_else_does(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", reviews(20))
    first, again, other = (
        read_table(config(path, seed=seed)).validation["text"][:] for seed in (1, 1, 2)
    )
    assert first == again
    assert len(other) == len(first) == 16
    assert other != first


def test_training_and_validation_share_no_row_and_lose_none(tmp_path: Path) -> None:
    rows = reviews(20)
    data = read_table(config(write_csv(tmp_path / "a.csv", rows), validation_split=0.3))
    together = [*data.train["text"][:], *data.validation["text"][:]]
    assert sorted(together) == sorted(text for _, text in rows)
    assert data.counts.duplicates_across_split == 0


@pytest.mark.parametrize(
    ("totals", "share", "validates"),
    [
        ([5322, 2443], 0.1, [533, 244]),
        ([90, 10], 0.1, [9, 1]),
        ([1000, 3, 2], 0.1, [99, 1, 1]),
        ([5, 5], 0.5, [3, 2]),
        ([2, 2, 2], 0.5, [1, 1, 1]),
    ],
)
def test_every_class_keeps_its_share_and_at_least_one_row_on_either_side(
    totals: list[int], share: float, validates: list[int]
) -> None:
    labels = np.repeat(np.arange(len(totals)), totals)
    space = LabelSpace("single_label", tuple(str(n) for n in range(len(totals))))
    train, validation = split_rows(labels, space, share, 0, "a.csv")
    assert np.bincount(labels[validation]).tolist() == validates
    assert np.bincount(labels[train]).tolist() == [
        total - count for total, count in zip(totals, validates, strict=True)
    ]


@pytest.mark.parametrize("share", [0.1, 0.9])  # 3 of 24 rows cannot hold a row of each of four
def test_a_split_too_small_for_every_label_names_one_that_is_not(share: float) -> None:
    labels = np.repeat(np.arange(4), [2, 2, 2, 18])
    space = LabelSpace("single_label", ("a", "b", "c", "d"))
    with pytest.raises(DataError, match=r"^a.csv: .* a --validation-split of 0\.17 to 0\.83"):
        split_rows(labels, space, share, 0, "a.csv")
    for good in (0.17, 0.83):
        train, validation = split_rows(labels, space, good, 0, "a.csv")
        assert set(labels[train]) == set(labels[validation]) == {0, 1, 2, 3}


def test_a_separate_validation_file_is_not_split(tmp_path: Path) -> None:
    train = write_csv(tmp_path / "train.csv", [*reviews(), (1, "")])
    validation = write_csv(tmp_path / "val.csv", [(0, BAD[0]), (1, GOOD[0]), ("", "x")])
    data = read_table(config(train, validation_file=str(validation), label_names={"0": "bad"}))
    assert data.validation["label"][:] == [0, 1]
    assert data.labels.names == ("bad", "1")
    assert data.counts == DataCounts(
        rows_read=44,
        dropped_no_text=1,
        dropped_no_label=1,
        train_rows=40,
        validation_rows=2,
        duplicates_across_split=0,
        train_class_counts={"bad": 20, "1": 20},
        validation_class_counts={"bad": 1, "1": 1},
        text_column="review",
        label_column="label",
        encoding="utf-8",
    )


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([(0, "a"), (2, "b")], r"val.csv: the label '2' does not occur in .*train.csv, which has "),
        ([(0, "a")], r"val.csv: no row has the label '1', which .*train.csv has; add some"),
        ([(0, "")], r"val.csv: none of the 1 rows can be used \(1 without text in 'review'"),
        ([], r"val.csv has a header and no rows"),
    ],
)
def test_a_validation_file_that_does_not_match_is_explained(
    tmp_path: Path, rows: list[tuple[int, str]], sentence: str
) -> None:
    train = write_csv(tmp_path / "train.csv", reviews())
    validation = write_csv(tmp_path / "val.csv", rows)
    with pytest.raises(DataError, match=sentence):
        read_table(config(train, validation_file=str(validation)))


def test_a_missing_validation_file_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    train = write_csv(tmp_path / "train.csv", reviews())
    with pytest.raises(DataError, match="there is no file nobody/validation"):
        read_table(config(train, validation_file="nobody/validation"))


def test_multi_label_vectors_must_be_as_long_in_the_validation_file(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": [0, 1, 1]}] * 4)
    short = write_jsonl(tmp_path / "b.jsonl", [{"text": "y", "label": [0, 1]}])
    right = write_jsonl(tmp_path / "c.jsonl", [{"text": "y", "label": [1, 1, 1]}])
    data = read_table(config(train, validation_file=str(right)))
    assert data.validation["label"][:] == [[1.0, 1.0, 1.0]]
    with pytest.raises(DataError, match="not lists of 3 zeros and ones"):
        read_table(config(train, validation_file=str(short)))


BAD_TABLES: list[tuple[list[tuple[Any, str]], str]] = [
    ([], "has a header and no rows; add rows"),
    ([(1, ""), (1, " "), ("", "x")], "none of the 3 rows can be used"),
    ([(1, "a"), (1, "b")], "one class only, every label in 'label' is '1'"),
    ([*reviews(), (2, "a")], "the class '2' has a single row, which cannot both train and"),
    ([(n, "a") for n in range(5)], "5 of 5 classes have a single row"),
    ([(n % 3, "a") for n in range(9)], "leave a label out of one split, as there are 3 labels"),
    ([(0.5, "a")], "every label in 'label' is 0.5"),
]


@pytest.mark.parametrize(("rows", "sentence"), BAD_TABLES)
def test_a_table_that_cannot_be_learned_from_is_explained(
    tmp_path: Path, rows: list[tuple[Any, str]], sentence: str
) -> None:
    path = write_csv(tmp_path / "a.csv", rows)
    with pytest.raises(DataError, match=sentence) as caught:
        read_table(config(path))
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2


def test_too_few_numbers_to_split_are_explained(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [(0.5, "a"), (0.7, "b")])
    with pytest.raises(
        DataError, match=r"2 usable rows cannot be split at --validation-split 0\.9"
    ):
        read_table(config(path, validation_split=0.9))


def test_a_column_of_lists_is_not_a_text(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": ["a"], "label": 1}])
    with pytest.raises(DataError, match="the text column holds list values; name a column of"):
        read_table(config(path))


def test_half_an_emoji_in_json_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        '{"text": "cut \\ud83d", "label": "a\\ud83d"}',
        '{"text": "whole \\ud83d\\ude00", "label": "b"}',
    ]
    path.write_text("\n".join(lines * 5), encoding="utf-8")
    data = read_table(config(path, validation_split=0.2))
    assert set(data.train["text"][:]) == {"cut \ufffd", "whole 😀"}
    assert data.labels.names == ("a\ufffd", "b")
    in_lists = lines[0].replace('"a\\ud83d"', '["a\\ud83d", 1, null]')
    path.write_text(f"[{','.join([in_lists, lines[1]] * 5)}]", encoding="utf-8")
    assert read_table(config(path)).labels.names == ("1", "a\ufffd", "b")


def test_a_changed_file_of_the_same_name_and_size_is_read_again(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [(n % 2, f"old {n}") for n in range(20)])
    before = path.stat()
    read_table(config(path))
    write_csv(path, [(n % 2, f"new {n}") for n in range(20)])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert all(text.startswith("new") for text in read_table(config(path)).train["text"][:])


def test_texts_are_read_in_order_without_labels_and_empty_ones_stay(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", [("b",), ("",), ("a",)], header=("content",))
    assert read_texts(str(path))["text"][:] == ["b", "", "a"]
    rows = write_jsonl(tmp_path / "a.jsonl", [{"q": "b", "a": 1}, {"q": None, "a": "z"}])
    pairs = read_texts(str(rows), text_column="q", text_pair_column="a")
    assert pairs.to_dict() == {"text": ["b", ""], "text_pair": ["1", "z"]}


def test_a_table_of_no_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has a header and no rows"):
        read_texts(str(write_csv(tmp_path / "a.csv", [], header=("text",))))


def test_reading_takes_far_less_memory_than_the_file(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", ((n % 2, f"{n} " + "x" * 20_000) for n in range(1500)))
    size = path.stat().st_size
    assert size > 30e6
    read_table(config(write_csv(tmp_path / "b.csv", reviews())))  # imports
    tracemalloc.start()
    data = read_table(config(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert data.counts.train_rows == 1350
    assert peak < size / 3


def test_nothing_is_printed_and_nothing_is_left_behind(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", reviews())
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = (
        "import sys; from memfit.config import DataConfig; from memfit.data import read_table;"
        f"data = read_table(DataConfig(path={str(path)!r}));"
        "import tempfile, os; assert os.listdir(tempfile.gettempdir());"
        "assert data.train.map(lambda row: {'n': len(row['text'])}).num_rows == 36"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(temporary), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert list(temporary.iterdir()) == []
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.csv", "temporary"]


def test_the_bars_and_the_log_level_of_datasets_come_back(tmp_path: Path) -> None:
    import datasets
    from datasets.utils import logging

    path = write_csv(tmp_path / "a.csv", reviews())
    level = logging.get_verbosity()
    assert not datasets.are_progress_bars_disabled()
    read_table(config(path))
    with pytest.raises(DataError):
        read_table(config(path, text_column="nothing"))
    assert not datasets.are_progress_bars_disabled()
    assert logging.get_verbosity() == level


def test_a_full_temporary_folder_is_explained(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    path = write_csv(tmp_path / "a.csv", ((n % 2, f"{n} " + "x" * 2000) for n in range(3000)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(DataError, match="cannot write to the temporary folder"):
            read_table(config(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
