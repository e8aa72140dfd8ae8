"""Token ids as the tokenizer itself would cut them, and lengths as they were before."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_fixtures import config, write_csv, write_jsonl

from memfit.config import files
from memfit.data import LengthBin, TextData, read_table, tokenize, tokenize_dataset, tokens
from memfit.data import tokens as kept_tokens
from memfit.data.tokens import summarize_lengths
from memfit.errors import DataError

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a word of one letter."""
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]
    return BertTokenizer(
        vocab={word: number for number, word in enumerate(words)}, model_max_length=64
    )


def letters(count: int, start: int = 0) -> str:
    return " ".join(LETTERS[(start + n) % 26] for n in range(count))


def table(tmp_path: Path, lengths: list[int]) -> TextData:
    """Texts of so many tokens, all to be found in the validation too."""
    rows = [(n % 2, letters(length, n)) for n, length in enumerate(lengths)]
    path = write_csv(tmp_path / "a.csv", rows)
    return read_table(config(path, validation_file=str(path)))


def test_texts_are_cut_and_not_padded(tmp_path: Path, tokenizer: Any) -> None:
    data = table(tmp_path, [3, 8, 9, 50])
    tokens = tokenize(data, tokenizer, 10)
    assert set(tokens.train.column_names) == {
        "input_ids", "token_type_ids", "attention_mask", "labels",
    }  # fmt: skip
    assert [len(ids) for ids in tokens.train["input_ids"]] == [5, 10, 10, 10]
    assert tokens.train["input_ids"][0] == [2, 5, 6, 7, 3]
    assert tokens.train["input_ids"][:] == tokenizer(
        data.train["text"][:], truncation=True, max_length=10
    )["input_ids"]  # fmt: skip
    assert tokens.train["attention_mask"][0] == [1] * 5
    assert tokens.train["labels"][:] == [0, 1, 0, 1]
    assert tokens.train.features["labels"].dtype == "int64"
    assert tokens.validation.to_dict() == tokens.train.to_dict()


def test_lengths_are_those_before_cutting(tmp_path: Path, tokenizer: Any) -> None:
    lengths = tokenize(table(tmp_path, [3, 8, 9, 50]), tokenizer, 10).lengths
    assert (lengths.count, lengths.max, lengths.max_length) == (8, 52, 10)
    assert lengths.mean == pytest.approx((5 + 10 + 11 + 52) / 4)
    assert (lengths.p50, lengths.p90, lengths.p99) == (10, 52, 52)
    assert lengths.cut_rows == 4
    assert lengths.cut_fraction == 0.5


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_tokenizers_side_of_cutting_is_kept(
    tmp_path: Path, tokenizer: Any, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "truncation_side", side)
    tokens = tokenize(table(tmp_path, [20, 6]), tokenizer, 6)
    kept = [5, 6, 7, 8] if side == "right" else [21, 22, 23, 24]
    assert tokens.train["input_ids"][0] == [2, *kept, 3]
    assert (tokens.lengths.max, tokens.lengths.cut_rows) == (22, 4)


def test_pairs_are_tokenized_together_and_their_length_is_that_of_both(
    tmp_path: Path, tokenizer: Any
) -> None:
    header = ("sentence1", "sentence2", "label")
    sizes = [(2, 3), (30, 20), (4, 5), (1, 40)]
    rows = [(letters(a), letters(b), n % 2) for n, (a, b) in enumerate(sizes)]
    path = write_csv(tmp_path / "a.csv", rows, header)
    data = read_table(config(path, validation_file=str(path)))
    tokens = tokenize(data, tokenizer, 12)
    assert tokens.train["input_ids"][:] == tokenizer(
        data.train["text"][:], data.train["text_pair"][:], truncation=True, max_length=12
    )["input_ids"]  # fmt: skip
    assert tokens.train["token_type_ids"][0] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert tokens.lengths.max == 30 + 20 + 3
    assert tokens.lengths.mean == pytest.approx(np.mean([a + b + 3 for a, b in sizes]))
    assert tokens.lengths.cut_rows == 4  # 12 tokens are not cut, 53 and 44 are


def test_tokens_the_vocabulary_lacks_are_counted_with_an_example(
    tmp_path: Path, tokenizer: Any
) -> None:
    texts = ["a b c d", "好 吃 a b", "😀 😀 😀 a", "a b c d"]
    path = write_csv(tmp_path / "a.csv", [(n % 2, text) for n, text in enumerate(texts)])
    lengths = tokenize(read_table(config(path, validation_file=str(path))), tokenizer, 16).lengths
    assert lengths.unknown_share == pytest.approx(5 / 16)
    assert lengths.unknown_example == "😀 😀 😀 a"
    assert tokenize(table(tmp_path, [3, 8]), tokenizer, 10).lengths.unknown_share == 0
    assert lengths.most_tokens == 64


def test_a_tokenizer_that_keeps_nothing_it_cuts_gives_the_same_lengths(
    tmp_path: Path, tokenizer: Any
) -> None:
    """As the slow ones do: they answer with the ids alone."""

    class Slow:
        model_max_length, unk_token_id, eos_token_id = 64, 1, None

        def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return dict(tokenizer(*args, **kwargs))

        def num_special_tokens_to_add(self, pair: bool = False) -> int:
            return int(tokenizer.num_special_tokens_to_add(pair))

    data = table(tmp_path, [3, 8, 9, 50, 27])
    fast, slow = tokenize(data, tokenizer, 10), tokenize(data, Slow(), 10)
    assert slow.lengths == fast.lengths
    assert slow.train.to_dict() == fast.train.to_dict()


@pytest.mark.parametrize(
    ("labels", "dtype", "first"),
    [([[0, 1, 1], [1, 0, 0]], "list", [0, 1, 1]), ([0.5, 2], "f", 0.5)],
)
def test_labels_keep_their_type(
    tmp_path: Path, tokenizer: Any, labels: list[Any], dtype: str, first: Any
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "label": x} for x in labels * 5])
    train = tokenize(read_table(config(path, validation_file=str(path))), tokenizer, 8).train
    feature = train.features["labels"]
    assert (feature.feature if dtype == "list" else feature).dtype == "float32"
    assert train["labels"][0] == first


def test_a_tokenizer_that_changes_its_rows_is_asked_for_each(
    tmp_path: Path, tokenizer: Any
) -> None:
    from transformers import BertTokenizer

    class Marked(BertTokenizer):
        def __call__(self, *texts: Any, **options: Any) -> Any:
            made = super().__call__(*texts, **options)
            made["input_ids"] = [[*ids, 7] for ids in made["input_ids"]]
            return made

    data = table(tmp_path, [3, 5, 12])
    usual = tokenize(data, tokenizer, 16).train["input_ids"]
    marked = tokenize(data, Marked(vocab=tokenizer.get_vocab()), 16).train["input_ids"]
    assert marked[:] == [[*ids, 7] for ids in usual]


def test_a_selection_is_kept_apart_from_the_same_rows_in_another_order(tokenizer: Any) -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"text": ["a", "b c", "d"]})
    chosen = (rows, rows.select([2, 0]), rows.select([0, 2]), rows.select([0]))
    places = [tokens.place_of_tokens(one, tokenizer, 16) for one in chosen]
    assert len(set(places)) == 4
    assert places[1] == tokens.place_of_tokens(rows.select([2, 0]), tokenizer, 16)


def test_rows_without_labels_are_tokenized_too(tokenizer: Any) -> None:
    from datasets import Dataset

    dataset = Dataset.from_dict({"text": ["a b", "", "c"]})
    tokens, lengths = tokenize_dataset(dataset, tokenizer, 8)
    assert tokens["input_ids"][:] == [[2, 5, 6, 3], [2, 3], [2, 7, 3]]
    assert "labels" not in tokens.column_names
    assert (lengths.count, lengths.max, lengths.cut_rows) == (3, 4, 0)


@pytest.mark.parametrize(("pair", "least"), [(False, 3), (True, 5)])
def test_a_length_that_leaves_no_room_for_text_is_refused(
    tokenizer: Any, pair: bool, least: int
) -> None:
    from datasets import Dataset

    columns = {"text": ["a b c"], **({"text_pair": ["a b c"]} if pair else {})}
    tokenize_dataset(Dataset.from_dict(columns), tokenizer, least)
    with pytest.raises(DataError, match=f"special tokens; give at least {least}"):
        tokenize_dataset(Dataset.from_dict(columns), tokenizer, least - 1)


def test_the_histogram_holds_every_row_once_and_one_long_text_does_not_flatten_it() -> None:
    lengths = np.concatenate([np.arange(1, 201), [5000]])
    summary = summarize_lengths(lengths, 128)
    assert sum(part.rows for part in summary.histogram) == 201
    assert summary.histogram[0] == LengthBin(1, 23, 23)
    assert summary.histogram[-1] == LengthBin(208, 5000, 1)
    assert len(summary.histogram) == 10
    assert summary.cut_rows == 73


def test_short_texts_need_few_bins() -> None:
    assert summarize_lengths(np.array([2, 2, 3]), 128).histogram == (
        LengthBin(1, 1, 0),
        LengthBin(2, 2, 2),
        LengthBin(3, 3, 1),
    )


def test_real_reviews_have_the_lengths_the_tokenizer_gives(shared: Path) -> None:
    from transformers import BertTokenizer

    vocabulary = (shared / "data" / "bert-base-chinese-vocab.txt").read_text("utf-8").split("\n")
    real = BertTokenizer(vocab={word: n for n, word in enumerate(vocabulary) if word})
    data = read_table(config(shared / "data" / "ChnSentiCorp_htl_all.csv"))
    sample = data.validation
    part = TextData(sample, sample, data.labels, data.counts)
    tokens = tokenize(part, real, 128)
    full = [len(ids) for ids in real(sample["text"][:], verbose=False)["input_ids"]]
    assert tokens.lengths.count == 2 * 777
    assert tokens.lengths.max == max(full)
    assert tokens.lengths.mean == pytest.approx(np.mean(full))
    assert tokens.lengths.cut_rows == 2 * sum(length > 128 for length in full)
    assert [len(ids) for ids in tokens.train["input_ids"]] == [min(n, 128) for n in full]


def test_a_bar_shows_only_on_a_terminal_and_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from memfit.data.working_files import progress_bar

    with progress_bar("reading", 10) as bar:
        assert bar.disable  # pytest's stderr is no terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress_bar("reading", 10) as bar:
        bar.update(5)
        assert not bar.disable
        assert (bar.delay, bar.leave) == (2.0, False)
        assert capsys.readouterr().err == ""
        bar.start_t -= 3
        bar.refresh()
        assert "reading" in capsys.readouterr().err


def test_the_data_package_loads_nothing_heavy() -> None:
    import subprocess
    import sys

    heavy = ("torch", "datasets", "pyarrow", "numpy")
    program = f"import sys, memfit.data; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert run.stdout.strip() == b"[]"


@pytest.fixture
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where tokens are kept; in other tests nothing of earlier runs is read."""
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    before = files._used.set(True)
    yield tmp_path / "cache" / "tokens"
    files._used.reset(before)


def test_the_same_rows_are_not_tokenized_twice(
    tmp_path: Path, tokenizer: Any, kept_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = table(tmp_path, [3, 30, 12])
    first = tokenize(data, tokenizer, 16)
    assert len(list(kept_in.iterdir())) == 1  # training and validation rows are the same here
    monkeypatch.setattr(tokens, "_encode", lambda *_: pytest.fail("tokenized again"))
    again = tokenize(data, tokenizer, 16)
    assert again.train[:] == first.train[:]
    assert again.train.features == first.train.features
    assert again.lengths == first.lengths


@pytest.mark.usefixtures("kept_in")
def test_rows_on_disk_are_handed_on_by_the_name_of_their_file(
    tmp_path: Path, tokenizer: Any
) -> None:
    data = table(tmp_path, [30] * 2000)
    made, read = (tokenize(data, tokenizer, 32) for _ in range(2))
    for rows in (made, read):
        handed = pickle.dumps(rows.on_disk())
        assert len(handed) < 10_000
        there = pickle.loads(handed)
        assert there.train[:] == made.train[:]
        assert there.validation.features == made.validation.features
        assert there.lengths == made.lengths


def test_other_rows_lengths_and_tokenizers_are_not_taken_for_the_kept_ones(
    tmp_path: Path, tokenizer: Any, kept_in: Path
) -> None:
    from transformers import BertTokenizer

    data = table(tmp_path, [3, 30, 12])
    tokenize(data, tokenizer, 16)
    known = set(kept_in.iterdir())
    backwards = [*tokenizer.get_vocab()][::-1]
    other = BertTokenizer(vocab={word: number for number, word in enumerate(backwards)})
    for again in (
        lambda: tokenize(data, tokenizer, 12),
        lambda: tokenize(data, other, 16),
        lambda: tokenize(table(tmp_path, [3, 30, 13]), tokenizer, 16),
    ):
        again()
        assert len(set(kept_in.iterdir()) - known) == 1
        known = set(kept_in.iterdir())


def test_damaged_tokens_are_made_again_and_no_cache_reads_none(
    tmp_path: Path, tokenizer: Any, kept_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = table(tmp_path, [3, 30, 12])
    first = tokenize(data, tokenizer, 16)
    (file,) = kept_in.iterdir()
    whole = file.read_bytes()
    # Cut off, and with an end of zeros, as a power cut may leave it.
    for damaged in (whole[:100], b"", whole[:-400] + bytes(400)):
        file.write_bytes(damaged)
        assert tokenize(data, tokenizer, 16).train[:] == first.train[:]
        assert file.read_bytes() != damaged
    calls = []
    encode = tokens._encode
    monkeypatch.setattr(tokens, "_encode", lambda *of: calls.append(of) or encode(*of))
    with files.cache_unused():
        tokenize(data, tokenizer, 16)
    assert len(calls) == 2  # of both


def test_the_oldest_tokens_go_when_there_are_too_many(
    tmp_path: Path, tokenizer: Any, kept_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize(table(tmp_path, [3, 30, 12]), tokenizer, 16)
    first = set(kept_in.iterdir())
    size = sum(file.stat().st_size for file in first)
    for file in first:
        os.utime(file, (1, 1))
    monkeypatch.setattr(kept_tokens, "_MOST_BYTES", int(1.5 * size))
    tokenize(table(tmp_path, [3, 30, 13]), tokenizer, 16)
    left = set(kept_in.iterdir())
    assert not left & first
    assert len(left) == 1
