"""What `pack` makes of a padded batch."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from memfit.engine.packed_batch import (
    PackedBatch,
    PackSpec,
    pack,
    padded_on_the_right,
    text_lengths,
    weighted_loss,
)
from memfit.errors import DataError

IDS = torch.tensor([[5, 6, 7, 0, 0], [8, 9, 0, 0, 0], [4, 3, 2, 1, 6]])
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])


def batch(**changes: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "attention_mask": MASK, "labels": torch.tensor([1, 0, 1]), **changes}


def test_texts_follow_one_another_without_padding() -> None:
    flat = pack(batch())
    assert flat.input_ids.tolist() == [5, 6, 7, 8, 9, 4, 3, 2, 1, 6]
    assert flat.tokens["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]
    assert flat.cu_seqlens.tolist() == [0, 3, 5, 10]
    assert flat.cu_seqlens.dtype == torch.int32
    assert (flat.max_seqlen, flat.lengths) == (5, (3, 2, 5))
    assert (flat.rows, flat.real_rows, flat.total_tokens) == (3, 3, 10)
    assert flat.labels is not None
    assert flat.labels.tolist() == [1, 0, 1]


def test_left_padding_gives_the_same_batch() -> None:
    left = pack(batch(input_ids=IDS.flip(1), attention_mask=MASK.flip(1)))
    assert left.input_ids.tolist() == [7, 6, 5, 9, 8, 6, 1, 2, 3, 4]
    assert left.tokens["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]


def test_a_hole_in_the_mask_keeps_the_columns_of_what_follows() -> None:
    flat = pack(batch(attention_mask=torch.tensor([[1, 0, 1, 0, 0], [1, 1, 0, 0, 0], [1] * 5])))
    assert flat.input_ids.tolist()[:2] == [5, 7]
    assert flat.tokens["position_ids"].tolist()[:2] == [0, 2]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (MASK.tolist(), True),
        ([[1, 1], [1, 1]], True),
        ([[1], [1]], True),
        ([[1, 1, 1], [0, 1, 1]], False),
        ([[1, 1, 1], [1, 0, 1]], False),
        ([[1, 1, 1], [0, 0, 0]], False),
    ],
    ids=["right", "none", "one column", "left", "between", "a row without tokens"],
)
def test_only_padding_behind_the_texts_has_no_part_in_a_step(mask: Any, expected: bool) -> None:
    mask = torch.tensor(mask)
    assert padded_on_the_right({"input_ids": mask, "attention_mask": mask}) is expected
    assert padded_on_the_right({"input_ids": mask})  # every cell is a token


def test_roberta_positions_start_after_the_padding_token_and_skip_it() -> None:
    ids = torch.tensor([[5, 1, 7, 1], [8, 9, 4, 3]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    flat = pack({"input_ids": ids, "attention_mask": mask}, PackSpec(padding_idx=1))
    # An inner padding token stays where fairseq's rule puts it: at padding_idx itself.
    assert flat.tokens["position_ids"].tolist() == [2, 1, 3, 2, 3, 4, 5]


def test_given_positions_and_token_types_are_stripped_alike() -> None:
    positions = torch.arange(5).expand(1, 5) + 10
    types = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 1, 1]])
    flat = pack(batch(position_ids=positions, token_type_ids=types))
    assert flat.tokens["position_ids"].tolist() == [10, 11, 12, 10, 11, 10, 11, 12, 13, 14]
    assert flat.tokens["token_type_ids"].tolist() == [0, 1, 1, 0, 1, 0, 0, 1, 1, 1]


def test_token_types_are_made_when_the_family_needs_them() -> None:
    assert "token_type_ids" not in pack(batch()).tokens
    made = pack(batch(), PackSpec(token_types=True)).tokens["token_type_ids"]
    assert made.tolist() == [0] * 10


def test_other_columns_of_a_collator_are_kept() -> None:
    special = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 0, 1]])
    weights = torch.tensor([0.5, 1.0, 2.0])
    inputs = pack(batch(special_tokens_mask=special, weights=weights, source="csv")).inputs()
    assert inputs["special_tokens_mask"].tolist() == [[1, 0, 1, 1, 1, 1, 0, 0, 0, 1]]
    assert inputs["weights"] is weights
    assert inputs["source"] == "csv"


def test_without_a_mask_every_cell_is_a_token() -> None:
    assert pack({"input_ids": IDS}).lengths == (5, 5, 5)


def test_a_row_without_tokens_keeps_its_label_and_one_cell() -> None:
    mask = MASK.clone()
    mask[1] = 0
    flat = pack(batch(attention_mask=mask))
    assert flat.lengths == (3, 1, 5)
    assert flat.rows == 3
    assert int(mask[1].sum()) == 0  # the caller's mask is not written to


def test_inputs_carry_the_names_transformers_uses() -> None:
    flat = pack(batch())
    inputs = flat.inputs()
    assert inputs["input_ids"].shape == (1, 10)
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"] is flat.cu_seqlens
    assert inputs["max_length_q"] == inputs["max_length_k"] == 5
    assert "attention_mask" not in inputs
    assert inputs["labels"] is flat.labels
    assert "labels" not in flat.inputs(labels=False)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_bucketed_batches_of_any_content_have_one_shape(rows: int) -> None:
    few = {name: column[:rows] for name, column in batch().items()}
    flat = pack(few, pad_to_tokens=16, pad_to_rows=4, max_seqlen=6)
    assert flat.total_tokens == 16
    assert flat.cu_seqlens.shape == (4 + 3 + 1,)  # four rows, three slots of six tokens
    assert flat.cu_seqlens[-1] == 16
    assert max(flat.lengths) <= flat.max_seqlen == 6
    assert flat.row_weight.tolist() == [1.0] * rows + [0.0] * (4 - rows)
    assert flat.labels is not None
    assert flat.labels.tolist() == [1, 0, 1][:rows] + [-100] * (4 - rows)
    assert flat.lengths[:4] == (3, 2, 5)[:rows] + (0,) * (4 - rows)


def test_dummy_tokens_have_a_position_every_family_has() -> None:
    assert pack(batch(), pad_to_tokens=12).tokens["position_ids"].tolist()[-2:] == [0, 0]
    roberta = pack(batch(), PackSpec(padding_idx=0), pad_to_tokens=12)
    assert roberta.tokens["position_ids"].tolist()[-2:] == [1, 1]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"pad_to_tokens": 9}, "10 tokens do not fit pad_to_tokens=9"),
        ({"pad_to_rows": 2}, "3 rows do not fit pad_to_rows=2"),
        ({"max_seqlen": 4}, "a text of 5 tokens does not fit max_seqlen=4"),
    ],
)
def test_a_bucket_that_is_too_small_is_an_error(shapes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(batch(), **shapes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"inputs_embeds": torch.zeros(3, 5, 8), "attention_mask": MASK},
        batch(attention_mask=torch.ones(3, 1, 5, 5)),
        batch(input_ids=IDS.flatten()),
    ],
)
def test_what_cannot_be_packed_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"input_ids|attention mask"):
        pack(wrong)


def test_the_models_own_loss_is_refused_where_it_would_count_dummy_rows() -> None:
    flat = pack(batch(labels=torch.rand(3, 2)), pad_to_rows=4)
    with pytest.raises(ValueError, match="weighted_loss"):
        flat.inputs()
    assert flat.labels is not None
    assert flat.labels[3].tolist() == [0.0, 0.0]


def test_a_graphs_buffers_are_overwritten_in_place() -> None:
    shapes = {"pad_to_tokens": 16, "pad_to_rows": 4, "max_seqlen": 6}
    static = pack(batch(), **shapes)
    addresses = _addresses(static)
    other = pack({name: column[1:] for name, column in batch().items()}, **shapes)
    static.copy_from(other)
    assert _addresses(static) == addresses
    for name, value in other.inputs().items():
        if isinstance(value, Tensor):
            assert torch.equal(static.inputs()[name], value)
    assert torch.equal(static.row_weight, other.row_weight)
    with pytest.raises(ValueError, match="not padded to the same"):
        static.copy_from(pack(batch()))


SHAPES = {"pad_to_tokens": 16, "pad_to_rows": 4, "max_seqlen": 6}


def table(rows: int, start: float = 0.0) -> Tensor:
    return start + torch.arange(rows * 2.0).view(rows, 2)


def test_inputs_beside_the_texts_are_overwritten_too() -> None:
    static = pack(batch(table=table(3), more={"ages": torch.tensor([1, 2, 3])}, k=2), **SHAPES)
    kept = static.extras["table"], static.extras["more"]["ages"]
    fresh = batch(table=table(3, 50.0), more={"ages": torch.tensor([7, 8, 9])}, k=2)
    short = {name: x[:2] if isinstance(x, Tensor) else x for name, x in fresh.items()}
    short["more"] = {"ages": torch.tensor([7, 8])}
    static.copy_from(pack(short, **SHAPES))
    assert static.extras["table"] is kept[0]
    assert static.extras["more"]["ages"] is kept[1]
    # Dummy rows get values the model is used to: those of the first row.
    assert kept[0].tolist() == [[50, 51], [52, 53], [50, 51], [50, 51]]
    assert kept[1].tolist() == [7, 8, 7, 7]


@pytest.mark.parametrize(
    "other",
    [
        {"table": table(3).double(), "k": 2},
        {"table": torch.zeros(3, 5), "k": 2},
        {"table": table(3), "k": 3},
        {"k": 2},
        {"table": table(3), "k": 2, "labels": torch.rand(3)},
        {"table": table(3), "k": 2, "token_type_ids": torch.zeros_like(IDS)},
    ],
)
def test_a_graph_is_not_handed_inputs_of_another_kind(other: dict[str, Any]) -> None:
    static = pack(batch(table=table(3), k=2), **SHAPES)
    same = pack(batch(table=table(3, 9.0), k=2), **SHAPES)
    assert static.signature == same.signature is not None
    unlike = pack(batch(**other), **SHAPES)
    assert unlike.signature != static.signature
    with pytest.raises(ValueError, match="other inputs"):
        static.copy_from(unlike)


def test_what_cannot_be_told_apart_has_no_signature() -> None:
    assert pack(batch(thing=object())).signature is None
    assert pack(batch(things=[{"a": {1, 2}}])).signature is None


def test_a_batch_on_a_device_is_not_pinned() -> None:
    flat = pack(batch(table=table(3))).to("meta")
    assert flat.pin_memory().input_ids.is_meta


def test_lengths_are_those_that_are_packed() -> None:
    empty = MASK.clone()
    empty[1] = 0
    assert text_lengths(batch()) == [3, 2, 5]
    assert text_lengths(batch(attention_mask=empty)) == list(
        pack(batch(attention_mask=empty)).lengths
    )
    assert text_lengths({"input_ids": IDS}) == [5, 5, 5]


def test_batches_travel_between_processes_and_devices() -> None:
    flat = pack(batch(note="kept"), PackSpec(token_types=True))
    again: PackedBatch = pickle.loads(pickle.dumps(flat))
    assert torch.equal(again.input_ids, flat.input_ids)
    moved = flat.to("meta")
    assert moved.input_ids.is_meta
    assert moved.labels is not None
    assert moved.labels.is_meta
    assert moved.extras == {"note": "kept"}


def test_the_weighted_loss_is_the_heads_loss() -> None:
    torch.manual_seed(0)
    logits, weight = torch.randn(4, 3), torch.tensor([1.0, 1.0, 0.0, 1.0]) / 3
    real = [0, 1, 3]
    single = torch.tensor([2, 0, -100, 1])
    assert torch.allclose(
        weighted_loss(logits, single, weight), F.cross_entropy(logits[real], single[real])
    )
    multi = torch.rand(4, 3).round()
    assert torch.allclose(
        weighted_loss(logits, multi, weight),
        F.binary_cross_entropy_with_logits(logits[real], multi[real]),
    )
    value = torch.randn(4)
    assert torch.allclose(
        weighted_loss(logits[:, :1], value, weight), F.mse_loss(logits[real, 0], value[real])
    )
    several = torch.randn(4, 3)
    assert torch.allclose(
        weighted_loss(logits, several, weight, "regression"),
        F.mse_loss(logits[real], several[real]),
    )


def _addresses(flat: PackedBatch) -> list[int]:
    tensors = [*flat.tokens.values(), flat.cu_seqlens, flat.row_weight]
    assert flat.labels is not None
    return [tensor.data_ptr() for tensor in [*tensors, flat.labels]]
