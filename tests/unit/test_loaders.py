"""Batches are the stock collator's own, tensor for tensor, whichever way they were made."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
import torch
from transformers import BertTokenizerFast, DataCollatorWithPadding, default_data_collator

from memfit.training.loaders import QuickPadding, quick

Row = dict[str, Any]


@pytest.fixture
def tokenizer() -> BertTokenizerFast:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    return BertTokenizerFast(vocab={word: at for at, word in enumerate(words)})


def rows(lengths: tuple[int, ...] = (3, 7, 1, 5), **more: Any) -> list[Row]:
    made = []
    for number, length in enumerate(lengths):
        ids = [5 + (number + place) % 8 for place in range(length)]
        row: Row = {"input_ids": ids, "token_type_ids": [place % 2 for place in range(length)],
                    "attention_mask": [1] * length}  # fmt: skip
        made.append({**row, **{name: value(number) for name, value in more.items()}})
    return made


def assert_same(ours: Any, stock: Any) -> None:
    assert type(ours) is type(stock)
    assert ours.keys() == stock.keys()
    for name in stock:
        assert ours[name].dtype == stock[name].dtype, name
        assert torch.equal(ours[name], stock[name]), name


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize(
    "label",
    [{}, {"label": lambda n: n}, {"labels": lambda n: n % 2}, {"label_ids": lambda n: n},
     {"labels": lambda n: 0.5 * n}, {"labels": lambda n: [1.0, 0.0, float(n)]}],
)  # fmt: skip
def test_plain_rows_give_the_stock_batch_without_the_tokenizer(
    tokenizer: BertTokenizerFast, side: str, multiple: int | None, label: dict[str, Any]
) -> None:
    tokenizer.padding_side, tokenizer._pad_token_type_id = side, 1
    stock = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
    expected = stock(copy.deepcopy(rows(**label)))
    ours = quick(stock)
    ours.stock = _Untouched(stock)
    assert_same(ours(rows(**label)), expected)


class _Untouched:
    """A collator whose settings may be read and which must not be called."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def __call__(self, _: Any) -> Any:
        raise AssertionError("the tokenizer was asked")


def test_a_mask_is_made_where_rows_have_none(tokenizer: BertTokenizerFast) -> None:
    for side in ("right", "left"):
        tokenizer.padding_side = side
        stock = DataCollatorWithPadding(tokenizer)
        plain = [{"input_ids": row["input_ids"]} for row in rows()]
        assert_same(quick(stock)(copy.deepcopy(plain)), stock(plain))


@pytest.mark.parametrize(
    "settings", [{"padding": "max_length", "max_length": 12}, {"return_tensors": "np"}]
)
def test_other_settings_go_through_the_tokenizer(
    tokenizer: BertTokenizerFast, settings: dict[str, Any]
) -> None:
    stock = DataCollatorWithPadding(tokenizer, **settings)
    ours, expected = quick(stock)(rows()), stock(rows())
    assert {name: value.tolist() for name, value in ours.items()} == {
        name: value.tolist() for name, value in expected.items()
    }


@pytest.mark.parametrize(
    "odd",
    [
        [{"input_ids": torch.tensor([5, 6])}, {"input_ids": torch.tensor([5])}],
        [{"input_ids": [5, 6], "weight": 0.5}, {"input_ids": [5, 7], "weight": 1.0}],
    ],
)
def test_other_rows_go_through_the_tokenizer(tokenizer: BertTokenizerFast, odd: list[Row]) -> None:
    stock = DataCollatorWithPadding(tokenizer)
    assert_same(quick(stock)(copy.deepcopy(odd)), stock(odd))


def test_other_collators_stay_as_they_are(tokenizer: BertTokenizerFast) -> None:
    class Own(DataCollatorWithPadding):
        pass

    class OwnTokenizer(BertTokenizerFast):
        def pad(self, *args: Any, **kwargs: Any) -> Any:
            return super().pad(*args, **kwargs)

    own = Own(tokenizer)
    padded_otherwise = DataCollatorWithPadding(OwnTokenizer(vocab=tokenizer.get_vocab()))
    assert quick(own) is own
    assert quick(padded_otherwise) is padded_otherwise
    assert quick(default_data_collator) is default_data_collator


def test_it_travels_to_a_worker_and_shows_the_stock_ones_settings(
    tokenizer: BertTokenizerFast,
) -> None:
    ours = quick(DataCollatorWithPadding(tokenizer, pad_to_multiple_of=4))
    sent = pickle.loads(pickle.dumps(ours))
    assert isinstance(sent, QuickPadding)
    assert sent.pad_to_multiple_of == 4
    assert_same(sent(rows()), ours(rows()))


def test_it_takes_less_than_half_the_time(tokenizer: BertTokenizerFast) -> None:
    batch = rows(tuple(range(60, 124, 2)), labels=lambda n: n % 2)
    stock = DataCollatorWithPadding(tokenizer)

    def best_seconds(collate: Any) -> float:
        found = []
        for _ in range(7):
            started = time.perf_counter()
            collate(batch)
            found.append(time.perf_counter() - started)
        return min(found)

    assert best_seconds(quick(stock)) < 0.5 * best_seconds(stock)
