"""Loaders that hand out effective batches on the CPU, padded fast, in an order a resume repeats.

Padding through a tokenizer looks at every token in Python, which takes about as long as a small
model's step replayed on a fast card. Batches of plain rows are filled in here, to the same
tensors; all others still go through the tokenizer.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from transformers import (
    BatchEncoding,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from memfit.engine.micro_batches import Trim, lengths_of, rows_of
from memfit.engine.ranks import Ranks

_TOKENS = ("input_ids", "token_type_ids", "attention_mask")

_LABELS = ("label", "labels", "label_ids")

Row = Mapping[str, Any]


def quick(collator: Any) -> Any:
    """Returns a fast version of the stock collator, and any other collator as it is."""
    if type(collator) is not DataCollatorWithPadding:
        return collator
    kind = type(collator.tokenizer)
    stock = PreTrainedTokenizerBase
    if getattr(kind, "pad", None) is not stock.pad or getattr(kind, "_pad", None) is not stock._pad:
        return collator
    return QuickPadding(collator)


class QuickPadding:
    """Pads rows of token ids to the longest of them."""

    def __init__(self, stock: DataCollatorWithPadding) -> None:
        self.stock = stock

    def __getattr__(self, name: str) -> Any:
        """What the stock collator has: its tokenizer, its settings."""
        if name == "stock":  # not there yet, as while a copy is made
            raise AttributeError(name)
        return getattr(self.stock, name)

    def __call__(self, rows: Sequence[Row]) -> Any:
        """Returns the tensors that the stock collator would return."""
        if not self._is_plain(rows):
            return self.stock(list(rows))  # type: ignore[arg-type]
        tokenizer = self.stock.tokenizer
        fill = {
            "input_ids": tokenizer.pad_token_id,
            "token_type_ids": tokenizer.pad_token_type_id,
            "attention_mask": 0,
        }
        lengths = [len(row["input_ids"]) for row in rows]
        multiple = self.stock.pad_to_multiple_of or 1
        width = -(-max(lengths) // multiple) * multiple
        left = tokenizer.padding_side == "left"
        made: dict[str, torch.Tensor] = {}
        for name in rows[0]:
            if name in _TOKENS:
                table = np.full((len(rows), width), fill[name], dtype=np.int64)
                for line, row, length in zip(table, rows, lengths, strict=True):
                    line[width - length if left else 0 : width if left else length] = row[name]
                made[name] = torch.from_numpy(table)
            else:
                made["labels"] = torch.tensor([row[name] for row in rows])
        if "attention_mask" not in made and "attention_mask" in tokenizer.model_input_names:
            places = np.arange(width)[::-1] if left else np.arange(width)
            mask = places < np.array(lengths)[:, None]
            made["attention_mask"] = torch.from_numpy(mask.astype(np.int64))
        return BatchEncoding(made)

    def _is_plain(self, rows: Sequence[Row]) -> bool:
        """Whether rows hold only lists of ids and a label."""
        stock = self.stock
        if stock.padding not in (True, "longest") or stock.return_tensors != "pt" or not rows:
            return False
        if stock.tokenizer.pad_token_id is None:
            return False
        names = rows[0].keys()
        known = all(name in _TOKENS or name in _LABELS for name in names)
        if not known or "input_ids" not in names or sum(name in _LABELS for name in names) > 1:
            return False
        for row in rows:
            if not isinstance(row, Mapping) or row.keys() != names:
                return False
            ids = row["input_ids"]
            if not isinstance(ids, list) or not ids:
                return False
            if any(len(row[name]) != len(ids) for name in names if name in _TOKENS):
                return False
        return True


class ShareOfRank:
    """Keeps this rank's rows of an effective batch: about the same tokens for each rank.

    The whole batch is collated first, so that rows are as wide as in a single process: some models
    see padding. A rank without rows gets an empty batch.
    """

    def __init__(self, whole: Any, ranks: Ranks) -> None:
        self.whole = whole
        """Collates the rows of all ranks."""
        self._ranks = ranks

    def __call__(self, rows: Sequence[Any]) -> Any:
        """The batch of this rank's rows, in their order."""
        batch = self.whole(rows)
        own = shares(lengths_of(batch, Trim.COUNTED), self._ranks.count)[self._ranks.number]
        return rows_of(batch, own)


def of_all_rows(collator: Any) -> Any:
    """The collator of a loader without the sharing among ranks, as a rehearsal needs it."""
    if isinstance(collator, ShareOfRank):
        return collator.whole
    # The Trainer's RemoveColumnsCollator has the other one inside.
    if isinstance(inner := getattr(collator, "data_collator", None), ShareOfRank):
        collator = copy.copy(collator)
        collator.data_collator = inner.whole
    return collator


def shares(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Deals rows to the ranks: the longest first, each to the rank with the fewest tokens.

    No rank gets more than an even share of rows, which is what the plan was made for.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    most = -(-len(lengths) // count)
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        open_ = [rank for rank in range(count) if len(groups[rank]) < most]
        least = min(open_, key=tokens.__getitem__)
        groups[least].append(row)
        tokens[least] += lengths[row]
    return [sorted(group) for group in groups]


@contextlib.contextmanager
def prepared_alone(accelerator: Any, seed: int) -> Iterator[None]:
    """Inside, accelerate prepares loaders of which every rank reads all rows, in the same order."""

    def prepare(loader: DataLoader[Any]) -> DataLoader[Any]:
        prepared = prepare_data_loader(
            loader,
            num_processes=1,
            process_index=0,
            put_on_device=False,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=seed,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        accelerator._dataloaders.append(prepared)
        return prepared  # type: ignore[no-any-return]

    accelerator.prepare = prepare
    try:
        yield
    finally:
        del accelerator.prepare


def kept_on_cpu(dataloader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader, whose batches stay on the CPU: micro-batches go to the device."""
    if hasattr(dataloader, "device"):
        dataloader.device = None
    return dataloader


def repeatable(sampler: Sampler[int] | None, args: TrainingArguments) -> Sampler[int] | None:
    """Replaces the length-grouped sampler, whose order a resumed run could not repeat."""
    if not isinstance(sampler, LengthGroupedSampler):
        return sampler
    seed = args.seed if args.data_seed is None else args.data_seed
    return EpochLengthSampler(sampler.batch_size, list(sampler.lengths), seed)


def in_order(sampler: Sampler[int] | None, dataset: Any) -> Sampler[int] | None:
    """Evaluation in the order of the rows, as predictions are expected.

    The stock sampler shuffles evaluation too when training groups by length.
    """
    return SequentialSampler(dataset) if isinstance(sampler, LengthGroupedSampler) else sampler


class EpochLengthSampler(LengthGroupedSampler):
    """Rows of similar length together, in an order that only the seed and the epoch decide.

    The stock sampler draws from the global generator, whose state in the middle of an epoch
    says nothing about the order the epoch began with: a resumed run would skip other rows
    than were trained.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths, generator=torch.Generator())
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader at the start of every epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch)
        indices: Iterator[int] = super().__iter__()  # type: ignore[no-untyped-call]
        return indices
