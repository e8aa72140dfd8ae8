"""How long rows are, and the largest batch the shuffle can draw."""

from torch import nn
from torch.utils.data import IterableDataset

from memfit.engine.micro_batches import largest_batch, longest_row, row_lengths

ROWS = [{"input_ids": [1] * length} for length in (3, 9, 4, 7)]


def test_lengths_of_plain_rows():
    assert row_lengths(ROWS) == [3, 9, 4, 7]
    assert longest_row(ROWS, nn.Identity()) == 9


def test_the_largest_batch_is_made_of_the_longest_rows():
    assert largest_batch(ROWS, nn.Identity(), 2) == 16
    assert largest_batch(ROWS, nn.Identity(), 9) == 23


def test_rows_that_cannot_be_looked_at_count_as_the_longest_the_model_takes():
    assert row_lengths(iter(ROWS)) == []
    assert largest_batch(iter(ROWS), nn.Identity(), 2) == 1024


class Stream(IterableDataset):
    """One that knows how many rows will come, as the Trainer likes to know."""

    def __iter__(self):
        return iter(ROWS)

    def __len__(self):
        return len(ROWS)


def test_a_stream_that_has_a_length_has_no_rows_to_look_at():
    assert row_lengths(Stream()) == []
    assert longest_row(Stream(), nn.Identity()) == 512


def test_lengths_are_read_as_lists_whatever_a_dataset_makes_of_its_rows(monkeypatch):
    """The formatters that make tensors fail beside a torchvision without VideoReader."""
    from datasets import Dataset
    from datasets.formatting import torch_formatter

    def refuse(*_):
        raise ImportError("cannot import name 'VideoReader'")

    rows = Dataset.from_dict({"input_ids": [row["input_ids"] for row in ROWS]})
    monkeypatch.setattr(torch_formatter.TorchFormatter, "_tensorize", refuse)
    assert row_lengths(rows.with_format("torch")) == [3, 9, 4, 7]


def test_a_transform_of_the_users_decides_how_long_rows_are():
    from datasets import Dataset

    rows = Dataset.from_dict({"input_ids": [row["input_ids"] for row in ROWS]})
    cut = rows.with_transform(lambda batch: {"input_ids": [ids[:4] for ids in batch["input_ids"]]})
    assert row_lengths(cut) == [3, 4, 4, 4]


def test_rows_that_were_chosen_or_shuffled_are_counted_in_their_new_order():
    from datasets import Dataset

    rows = Dataset.from_dict({"input_ids": [row["input_ids"] for row in ROWS]})
    assert row_lengths(rows.select([2, 0])) == [4, 3]
    assert row_lengths(rows.select([1, 3, 2]).with_format("numpy")) == [9, 7, 4]
