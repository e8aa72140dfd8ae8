"""Splitting an effective batch: which rows together, and how wide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memfit.engine.micro_batches import MicroBatching, Trim, group_rows, split, trimming_for
from memfit.errors import ConfigError
from memfit.models.layer_stack import _READ_FIRST, _READ_LAST, sees_padding

SMALL = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
_RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
SIZES: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "gpt2": _GPT, "gptj": {**_GPT, "rotary_dim": 4}, "bloom": {"n_layer": 2, "n_head": 2},
    "gpt_neo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    "albert": {"embedding_size": 8}, "electra": {"embedding_size": 8},
    "modernbert": {
        "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "deberta": _RELATIVE, "deberta-v2": {**_RELATIVE, "position_buckets": 8},
}  # fmt: skip


def padded(lengths: list[int], width: int | None = None, side: str = "right") -> dict[str, Any]:
    """Rows whose tokens say which row and place they are: row * 100 + place + 1."""
    width = width or max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        columns = slice(0, length) if side == "right" else slice(width - length, width)
        ids[row, columns] = torch.arange(length) + 100 * row + 1
        mask[row, columns] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(len(lengths))}


def rows_and_widths(batch: dict[str, Any], limits: MicroBatching, trim: Trim = Trim.RIGHT):
    parts = split(batch, limits, trim)
    return [(part.rows, part.inputs["input_ids"].shape[1]) for part in parts]


def test_rows_of_similar_length_go_together_the_longest_first():
    batch = padded([3, 9, 4, 8, 2])
    found = rows_and_widths(batch, MicroBatching(max_rows=2))
    assert found == [((1, 3), 9), ((2, 0), 4), ((4,), 2)]


def test_tokens_count_padding_and_a_long_row_is_never_refused():
    batch = padded([3, 9, 4, 8, 2, 3])
    # 9 alone exceeds 8; 8 x 1; then 4 x 2 is full; 3 x 2 with room for no third
    found = rows_and_widths(batch, MicroBatching(max_tokens=8))
    assert found == [((1,), 9), ((3,), 8), ((2, 0), 4), ((5, 4), 3)]
    both = rows_and_widths(batch, MicroBatching(max_rows=1, max_tokens=100))
    assert [rows for rows, _ in both] == [(1,), (3,), (2,), (0,), (5,), (4,)]


def test_a_batch_that_fits_keeps_its_order_and_its_tensors():
    batch = padded([3, 9, 4])
    (part,) = split(batch, MicroBatching(max_rows=3, max_tokens=27))
    assert part.rows == (0, 1, 2)
    assert all(part.inputs[name] is batch[name] for name in batch)


def test_padding_to_the_maximum_length_is_cut():
    batch = padded([3, 9, 4], width=64)
    assert rows_and_widths(batch, MicroBatching()) == [((0, 1, 2), 9)]
    assert rows_and_widths(batch, MicroBatching(max_rows=2)) == [((1, 2), 9), ((0,), 3)]


def test_left_padding_is_cut_only_where_positions_are_relative():
    batch = padded([3, 9, 4], width=12, side="left")
    assert rows_and_widths(batch, MicroBatching(), Trim.BOTH) == [((0, 1, 2), 9)]
    assert rows_and_widths(batch, MicroBatching(), Trim.RIGHT) == [((0, 1, 2), 12)]
    assert rows_and_widths(batch, MicroBatching(), Trim.NONE) == [((0, 1, 2), 12)]
    (_, short) = split(batch, MicroBatching(max_rows=2), Trim.BOTH)
    assert short.inputs["input_ids"].tolist() == [[1, 2, 3]]


def test_without_a_mask_rows_keep_order_and_width():
    batch = {"input_ids": torch.arange(15).view(5, 3)}
    assert rows_and_widths(batch, MicroBatching(max_rows=2)) == [
        ((0, 1), 3),
        ((2, 3), 3),
        ((4,), 3),
    ]


def test_a_row_without_a_token_keeps_the_width():
    batch = padded([3, 2])
    batch["attention_mask"][1] = 0
    found = rows_and_widths(batch, MicroBatching(max_rows=1))
    assert found == [((0,), 3), ((1,), 3)]


def test_as_many_labels_as_tokens_are_not_taken_for_tokens():
    batch = padded([3, 9, 4], width=12)
    for labels in (torch.ones(3, 12), torch.ones(3, 12, dtype=torch.long)):
        parts = split({**batch, "labels": labels}, MicroBatching(max_rows=1))
        assert all(part.inputs["labels"].shape == (1, 12) for part in parts)
        assert all(part.inputs["input_ids"].shape == (1, 12) for part in parts)


def test_labels_of_tokens_keep_the_width():
    batch = padded([3, 5], width=8)
    labels = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
    for part in split({**batch, "labels": labels}, MicroBatching(max_rows=1)):
        assert part.inputs["labels"].shape == part.inputs["input_ids"].shape == (1, 8)


def test_rows_of_several_texts_count_all_their_tokens():
    batch = {"input_ids": torch.ones(4, 3, 5, dtype=torch.long), "labels": torch.zeros(4)}
    parts = split(batch, MicroBatching(max_tokens=30), Trim.NONE)
    assert [part.rows for part in parts] == [(0, 1), (2, 3)]


def test_a_tuple_is_cut_by_rows_and_stays_one():
    batch = (torch.arange(10).view(5, 2), torch.arange(5))
    first, second = split(batch, MicroBatching(max_rows=3), Trim.NONE)
    assert isinstance(first.inputs, tuple)
    assert first.inputs[1].tolist() == [0, 1, 2]
    assert second.inputs[0].tolist() == [[6, 7], [8, 9]]


def test_where_nothing_is_cut_the_collators_own_batch_is_handed_on():
    batch = padded([3, 5], width=8)
    (whole,) = split(batch, MicroBatching(), Trim.NONE)
    assert whole.inputs is batch


def test_what_is_packed_inside_counts_real_tokens_and_keeps_its_width():
    batch = padded([2, 6, 2], width=8)
    parts = split(batch, MicroBatching(max_tokens=6), Trim.COUNTED, packed=True)
    assert [part.rows for part in parts] == [(1,), (0, 2)]
    assert all(part.inputs["input_ids"].shape[1] == 8 for part in parts)


def test_an_unknown_input_as_wide_as_the_texts_keeps_the_width():
    batch = {**padded([3, 9], width=12), "bbox": torch.zeros(2, 12, 4)}
    assert rows_and_widths(batch, MicroBatching()) == [((0, 1), 12)]


def test_odd_entries_are_cut_by_row_or_passed_on():
    batch = {
        **padded([3, 9]),
        "nested": {"features": torch.tensor([[1.0], [2.0]]), "pair": (torch.tensor([5, 6]), 7)},
        "names": ["first", "second"],
        "temperature": 0.5,
        "scalar": torch.tensor(3),
        "shared": torch.zeros(4, 4),
    }
    long, short = (part.inputs for part in split(batch, MicroBatching(max_rows=1)))
    assert long["nested"]["features"].tolist() == [[2.0]]
    assert long["nested"]["pair"][0].tolist() == [6]
    assert long["nested"]["pair"][1] == 7
    assert (long["names"], short["names"]) == (["second"], ["first"])
    assert (short["temperature"], int(short["scalar"]), short["shared"].shape) == (0.5, 3, (4, 4))


@pytest.mark.parametrize("limits", [{"max_rows": 0}, {"max_tokens": -1}])
def test_limits_below_one_are_refused(limits):
    with pytest.raises(ConfigError, match="at least 1"):
        MicroBatching(**limits)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20),
    max_rows=st.none() | st.integers(1, 8),
    max_tokens=st.none() | st.integers(1, 90),
    extra=st.integers(0, 5),
    side=st.sampled_from(["left", "right"]),
)
def test_every_token_is_run_exactly_once_within_the_limits(
    lengths, max_rows, max_tokens, extra, side
):
    batch = padded(lengths, max(lengths) + extra, side)
    parts = split(batch, MicroBatching(max_rows, max_tokens), Trim.BOTH)
    assert sorted(row for part in parts for row in part.rows) == list(range(len(lengths)))
    seen = []
    for part in parts:
        ids, mask = part.inputs["input_ids"], part.inputs["attention_mask"]
        assert part.inputs["labels"].tolist() == list(part.rows)
        assert max_rows is None or len(ids) <= max_rows
        assert max_tokens is None or ids.numel() <= max_tokens or len(ids) == 1
        assert ids.shape[1] == max(lengths[row] for row in part.rows)
        seen += ids[mask == 1].tolist()
    assert sorted(seen) == sorted(batch["input_ids"][batch["attention_mask"] == 1].tolist())


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    max_rows=st.none() | st.integers(1, 8),
    max_tokens=st.integers(20, 90),
)
def test_packed_parts_are_as_few_as_must_be_and_even(lengths, max_rows, max_tokens):
    limits = MicroBatching(max_rows, max_tokens)
    groups = group_rows(lengths, limits, packed=True)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    sizes = [sum(lengths[row] for row in group) for group in groups]
    assert max(sizes) <= max_tokens
    assert max_rows is None or max(map(len, groups)) <= max_rows
    assert all(lengths[group[0]] == max(lengths[row] for row in group) for group in groups)


def test_a_batch_a_little_too_large_falls_into_halves_not_into_most_and_a_rest():
    lengths = [10] * 11
    sizes = [
        len(group) for group in group_rows(lengths, MicroBatching(max_tokens=100), packed=True)
    ]
    assert sizes == [6, 5]


def test_what_may_be_cut_depends_on_the_head():
    from transformers import (
        BertConfig,
        BertForQuestionAnswering,
        BertForSequenceClassification,
        BertForTokenClassification,
        Qwen2Config,
        Qwen2ForSequenceClassification,
    )

    class Pooled(BertForSequenceClassification):
        """A head of the user's own."""

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    settings = BertConfig(intermediate_size=8, **small)
    rotary = Qwen2Config(intermediate_size=8, num_key_value_heads=2, pad_token_id=0, **small)
    with torch.device("meta"):
        bert, qwen = BertForSequenceClassification(settings), Qwen2ForSequenceClassification(rotary)
        recurrent = BertForSequenceClassification(settings)
        recurrent.classifier = nn.LSTM(8, 8)
        for kind in (BertForTokenClassification, BertForQuestionAnswering, Pooled):
            assert trimming_for(kind(settings)) is Trim.NONE
    assert trimming_for(bert) is Trim.RIGHT
    assert trimming_for(qwen) is Trim.BOTH
    assert trimming_for(recurrent) is Trim.NONE
    assert trimming_for(nn.Sequential(nn.Linear(2, 2))) is Trim.NONE
    qwen.config.pad_token_id = None  # the last column is read then
    assert trimming_for(qwen) is Trim.NONE


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # DeBERTa's own
@pytest.mark.parametrize("kind", sorted(_READ_FIRST | _READ_LAST | {"llama", "qwen3"}))
def test_families_whose_padding_is_cut_do_not_see_it(kind):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    settings = AutoConfig.for_model(kind, **{**SMALL, **SIZES.get(kind, {})})
    model: Any = AutoModelForSequenceClassification.from_config(settings).eval()
    assert not sees_padding(model)
    batch = padded([9, 6, 11], width=20)
    batch = {"input_ids": batch["input_ids"] % 53, "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        whole = model(**batch).logits
        for part in split(batch, MicroBatching(max_rows=1), trimming_for(model)):
            assert part.inputs["input_ids"].shape[1] < 20
            torch.testing.assert_close(model(**part.inputs).logits[0], whole[part.rows[0]])
