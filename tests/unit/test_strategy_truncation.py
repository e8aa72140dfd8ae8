"""Texts cut in the batch: the ids a tokenizer with that max_length would have given."""

from __future__ import annotations

import pickle
import string
from typing import Any

import pytest
import torch
import transformers
from strategy_fixtures import CLS, SEP, build, collate, losses, rows_of, setup_of, trained
from torch.utils.data import IterableDataset

from memfit.errors import ConfigError
from memfit.strategies import Fidelity, Truncation
from memfit.strategies.truncation import CuttingCollator, choose_length, cut
from sentences import SENTENCES


def bert_tokenizer() -> Any:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*special, *sorted(set("".join(SENTENCES)))]
    return transformers.BertTokenizer(vocab={token: n for n, token in enumerate(tokens)})


def roberta_tokenizer() -> Any:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokens = [*special, *string.ascii_letters, *string.punctuation, "Ġ"]
    vocabulary = {token: n for n, token in enumerate(dict.fromkeys(tokens))}
    return transformers.RobertaTokenizer(vocab=vocabulary, merges=[])


BERT_TEXTS = [*SENTENCES, "房", "服務" * 20]
ROBERTA_TEXTS = ["short", "a somewhat longer text, with a comma", "x", "words " * 12]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("max_length", [3, 8, 13, 41, 64])
@pytest.mark.parametrize(
    ("tokenizer", "texts"),
    [(bert_tokenizer(), BERT_TEXTS), (roberta_tokenizer(), ROBERTA_TEXTS)],
    ids=["bert", "roberta"],
)
def test_a_cut_batch_is_what_the_tokenizer_makes_with_that_length(
    tokenizer, texts, max_length, side
):
    tokenizer.padding_side = side
    whole = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    expected = dict(
        tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    )
    found = cut({**whole, "labels": torch.arange(len(texts))}, max_length)
    assert torch.equal(found.pop("labels"), torch.arange(len(texts)))
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_batch_padded_to_a_fixed_width_is_cut_to_the_length():
    tokenizer = bert_tokenizer()
    whole = tokenizer(BERT_TEXTS, padding="max_length", max_length=64, return_tensors="pt")
    assert whole["input_ids"].shape[1] == 64
    expected = tokenizer(BERT_TEXTS, padding=True, truncation=True, max_length=9)
    assert cut(whole, 9)["input_ids"].tolist() == expected["input_ids"]


def test_positions_are_those_of_a_shorter_text():
    ids = torch.tensor([[CLS, 10, 11, 12, 13, SEP], [CLS, 20, SEP, 0, 0, 0]])
    batch = {
        "input_ids": ids,
        "attention_mask": ids.ne(0).long(),
        "position_ids": torch.arange(6).expand(2, 6),
    }
    found = cut(batch, 4)
    assert found["input_ids"].tolist() == [[CLS, 10, 11, SEP], [CLS, 20, SEP, 0]]
    assert found["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]


def test_texts_without_a_closing_token_lose_only_their_end():
    ids = torch.tensor([[10, 11, 12, 13, 14]])
    assert cut({"input_ids": ids}, 3, keeps_end=False)["input_ids"].tolist() == [[10, 11, 12]]
    embedded = torch.arange(10.0).view(1, 5, 2)
    batch = {"inputs_embeds": embedded, "attention_mask": torch.ones(1, 5)}
    assert cut(batch, 3)["inputs_embeds"].tolist() == [[[0, 1], [2, 3], [8, 9]]]


def test_what_is_short_enough_is_passed_on():
    batch = collate(rows_of(4, longest=8))
    assert all(cut(batch, 8)[name] is value for name, value in batch.items())


# ---- as a strategy ----


class Seen:
    """Notes how wide the batches are that a model gets, and the last token of each text."""

    def __init__(self, model: Any) -> None:
        self.widths: list[int] = []
        self.ends: set[int] = set()
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, _model: Any, _args: Any, kwargs: Any) -> None:
        mask, ids = kwargs["attention_mask"], kwargs["input_ids"]
        self.widths.append(mask.shape[1])
        self.ends |= set(ids.gather(1, mask.sum(1, keepdim=True) - 1).flatten().tolist())


def test_training_and_evaluation_see_shorter_texts_and_the_loss_falls(tmp_path):
    model, rows = build(), rows_of(32)
    seen = Seen(model)
    setup = setup_of(model, tmp_path, max_steps=12, learning_rate=3e-3)
    trainer = trained(setup, [Truncation(8)], rows, eval_dataset=rows)
    assert losses(trainer)[-1] < losses(trainer)[0]
    trainer.evaluate()
    trainer.predict(rows[:1])
    assert max(seen.widths) == 8
    assert seen.ends == {SEP}
    assert Truncation(8).fidelity is Fidelity.DATA


def test_rows_without_special_tokens_are_seen_to_have_none(tmp_path):
    model, rows = build(), [{**row, "input_ids": row["input_ids"][1:-1]} for row in rows_of(32)]
    setup = setup_of(model, tmp_path, max_steps=1)
    trainer = trained(setup, [Truncation(8)], rows)
    batch = next(iter(trainer.get_eval_dataloader(rows[:3])))
    expected = [row["input_ids"][:8] for row in rows[:3]]
    found = [ids[mask.bool()].tolist() for ids, mask in zip(
        batch["input_ids"], batch["attention_mask"], strict=True)]  # fmt: skip
    assert found == expected


def test_the_collator_travels_to_loader_workers():
    collator = CuttingCollator(collate, 8, True)
    again = pickle.loads(pickle.dumps(collator))
    assert torch.equal(again(rows_of(3))["input_ids"], collator(rows_of(3))["input_ids"])


def test_undo_takes_it_out_again():
    setup = setup_of(build())
    setup.train_dataset = rows_of(8)
    Truncation(8).apply(setup)
    assert len(setup.replace_data) == 1
    setup.restore()
    assert setup.data_for(setup.train_dataset, collate) == (setup.train_dataset, collate)


def test_pairs_are_refused_by_their_token_types_or_their_separators():
    with_types = [
        {"input_ids": [CLS, 9, SEP, 8, SEP], "token_type_ids": [0, 0, 0, 1, 1]} for _ in range(3)
    ]
    without = [{"input_ids": [CLS, n, SEP, SEP, n + 1, SEP]} for n in range(8, 12)]
    for rows in (with_types, without):
        setup = setup_of(build())
        setup.train_dataset = rows
        assert "the tokenizer must choose which to cut" in Truncation(4).unavailable(setup)
        setup.train_dataset = None  # not known yet: then said when it is loaded from
        Truncation(4).apply(setup)
        with pytest.raises(ConfigError, match="pairs of texts cannot be cut"):
            setup.data_for(rows, collate)


def test_a_length_that_cuts_nothing_is_refused():
    setup = setup_of(build())
    setup.train_dataset = rows_of(50, longest=20)
    assert Truncation(32).unavailable(setup) == "no text has more than 20 tokens"
    with pytest.raises(ConfigError, match="no text has more than 20 tokens"):
        Truncation(32).apply(setup)
    with pytest.raises(ConfigError, match="texts cannot be cut to 2 tokens"):
        Truncation(2)


def test_a_stream_of_rows_is_cut_too():
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(rows_of(4))

    setup = setup_of(build())
    Truncation(8).apply(setup)
    stream = Stream()
    dataset, collator = setup.data_for(stream, collate)
    assert dataset is stream
    assert collator(rows_of(4))["input_ids"].shape[1] == 8


# ---- which length ----


def test_the_shortest_multiple_of_eight_that_cuts_few_enough():
    lengths = [*range(1, 101)]
    assert choose_length(lengths, 0.1) == choose_length(lengths, 0.04) == 96
    assert choose_length(lengths, 0.03) == choose_length(lengths, 0.0) == 104
    assert choose_length([3, 4, 5], 0.05) == 8


@pytest.mark.parametrize("side", ["right", "left"])
def test_labels_of_tokens_are_cut_with_their_tokens(side: str) -> None:
    ids = [torch.arange(5, 5 + length) for length in (12, 4, 7)]
    pad = {"batch_first": True, "padding_side": side}
    batch = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(ids, **pad),
        "attention_mask": torch.nn.utils.rnn.pad_sequence([i.gt(0).long() for i in ids], **pad),
        "labels": torch.nn.utils.rnn.pad_sequence([i * 10 for i in ids], padding_value=-100, **pad),
    }
    found = cut(batch, 6)
    seen = found["attention_mask"].bool()
    assert found["labels"].shape == found["input_ids"].shape == (3, 6)
    assert torch.equal(found["labels"][seen], found["input_ids"][seen] * 10)
    assert bool((found["labels"][~seen] == -100).all())
    several = {**batch, "labels": torch.zeros(3, 12)}  # as many labels as tokens
    assert cut(several, 6)["labels"].shape == (3, 12)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [5] * 9, "start_positions": 7, "end_positions": 8}, "place in the text"),
        ({"input_ids": [[5] * 9, [6] * 4], "labels": 1}, "several texts"),
    ],
)
def test_rows_whose_labels_would_no_longer_fit_are_not_cut(row: Any, reason: str) -> None:
    setup = setup_of(build("bert"))
    setup.train_dataset = [row] * 4
    with pytest.raises(ConfigError, match=reason):
        Truncation(8).apply(setup)
