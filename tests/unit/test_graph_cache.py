"""Which token bucket a batch is filled up to, and with what; graphs themselves need a GPU."""

from collections import Counter

import pytest
import torch
from transformers import BertForSequenceClassification

from memfit.engine.executors import GraphedExecutor
from memfit.engine.graph_cache import Signatures, TokenBuckets
from memfit.engine.micro_batches import MicroBatching, Trim, row_count
from memfit.engine.packed_batch import pack
from memfit.strategies.packing.packed_model import PackedModel
from small_training import collate, model_of, texts

BUCKETS = TokenBuckets(256)


def test_a_bucket_is_the_next_multiple():
    assert [BUCKETS.fit(tokens) for tokens in (1, 256, 257, 2700)] == [256, 256, 512, 2816]


def test_a_size_seen_for_the_first_time_borrows_the_next_larger_graph():
    seen: Counter[int] = Counter()
    assert BUCKETS.choose(900, {2816, 3072}, seen) == 2816
    assert BUCKETS.choose(900, {2816, 3072}, seen) == 1024  # it came again: worth its own


def test_a_size_beyond_all_graphs_gets_its_own_at_once():
    assert BUCKETS.choose(3000, {2816}, Counter()) == 3072


def test_a_captured_size_is_used():
    assert BUCKETS.choose(2700, {2816, 3072}, Counter()) == 2816


def test_the_largest_batch_there_can_be_is_captured_first():
    buckets = TokenBuckets(256, largest=4000)
    assert buckets.choose(900, set(), Counter()) == 4096
    assert buckets.choose(900, {4096}, Counter({1024: 1})) == 1024


def packed_rows(**extras):
    ids = torch.arange(5, 17).view(3, 4)
    return pack({"input_ids": ids, "labels": torch.tensor([0, 1, 0]), **extras}, pad_to_rows=4)


def test_inputs_the_training_began_with_are_captured_and_others_when_they_come_again():
    signatures = Signatures()
    usual = packed_rows(table=torch.zeros(3, 2))
    other = packed_rows(table=torch.zeros(3, 5))
    asked = (usual, usual, other, usual, other, packed_rows(), other)
    assert [signatures.captures(batch) for batch in asked] == [
        True, True, False, True, True, False, True,
    ]  # fmt: skip
    assert not any(signatures.captures(packed_rows(thing=object())) for _ in range(3))


class Tabular(BertForSequenceClassification):
    """A text beside some numbers, as a user's subclass would read them."""

    def forward(self, table=None, **inputs):
        output = super().forward(**inputs)
        output.logits = output.logits + table.to(output.logits.dtype)
        return output


@pytest.mark.parametrize("masked", [True, False])
def test_a_step_is_packed_with_all_its_inputs_with_or_without_a_mask(masked):
    model = Tabular(model_of(dropout=0.0).config).eval()
    batch = collate([row for row in texts(20) if len(row["input_ids"]) > 20][:3])
    batch["input_ids"] = batch["input_ids"][:, :20]
    batch["attention_mask"] = batch["attention_mask"][:, :20]
    batch["table"] = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    if not masked:
        del batch["attention_mask"]
    with PackedModel(model) as packing, torch.no_grad():
        executor = GraphedExecutor(
            micro_batching=MicroBatching(), trim=Trim.RIGHT, weigh=lambda _: 3.0,
            prepare=dict, loss=lambda *_: torch.zeros(()), backward=lambda _: None,
            sink=lambda: None, packing=packing, device=torch.device("cpu"), rows=8,
        )  # fmt: skip
        part, share = executor.weighted(model, executor.split(batch))[0]
        found = executor._packed(part, share)
        logits = model(**found.inputs(labels=False)).logits
        expected = model(**{n: x for n, x in batch.items() if n != "labels"}).logits
    assert (found.rows, found.total_tokens) == (8, 256)
    assert torch.allclose(logits[:3], expected, atol=1e-5)
    assert float(found.row_weight.sum()) == pytest.approx(1.0)


class Counting:
    """A sink that would let every step be captured."""

    capturable, hooked = True, True

    def __init__(self):
        self.armed = 0

    def begin(self, _count, replayed=False):
        assert not replayed

    def arm(self, _index):
        self.armed += 1

    def end_backward(self):
        pass


def test_a_batch_padded_on_the_left_is_launched_padded_instead_of_replayed_packed():
    model, sink = model_of(dropout=0.0).eval(), Counting()
    batch = collate(texts(6), side="left")
    expected = model(**batch).loss.detach()
    with PackedModel(model) as packing:
        executor = GraphedExecutor(
            micro_batching=MicroBatching(max_rows=2), trim=Trim.RIGHT, weigh=row_count,
            prepare=packing.inputs_of, loss=lambda model, inputs, _: model(**inputs).loss,
            backward=torch.autograd.backward, sink=lambda: sink, packing=packing,
            device=torch.device("cpu"), rows=8,
        )  # fmt: skip
        loss = executor.run(model, batch)
    assert sink.armed == 3
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert executor.captured_graphs == 0
