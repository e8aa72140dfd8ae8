"""Truncation: texts are cut shorter than they were tokenized, and lose their end.

Activations shrink with the length, attention's with its square where it is not fused. What is cut
is not learned from: max length 32 cost m3e-small 3 points of F1 on ChnSentiCorp. `choose_length`
finds a length in the data's own lengths; tokenizing with it gives the same token ids as this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memfit.engine.micro_batches import TOKEN_INPUTS, has_rows
from memfit.errors import ConfigError
from memfit.i18n import N_, Message, t
from memfit.strategies.base import Collator, Fidelity, PlanFigures, Setup, Strategy
from memfit.units import percent

_MULTIPLE = 8
"""Lengths are multiples of it: tensor cores take tokens by eights."""

_LOOKED_AT_ROWS = 1000

_CUT_SHARES = (0.05, 0.2)
"""Shares of the rows that a shorter length may cut, if the planner chooses it."""

_SHORTEST = 3
"""A first special token, one token of text and a last special token."""


def choose_length(lengths: Sequence[int], cut_at_most: float) -> int:
    """The smallest multiple of 8 that cuts at most this share of rows of these lengths."""
    for length in range(_MULTIPLE, max(lengths), _MULTIPLE):
        if sum(one > length for one in lengths) <= cut_at_most * len(lengths):
            return length
    return -(-max(lengths) // _MULTIPLE) * _MULTIPLE


@dataclass(frozen=True, slots=True)
class Truncation(Strategy):
    """Texts of more than `max_length` tokens keep the first ones and their closing special token.

    Of pairs the tokenizer must decide which text is cut, so they are refused.
    """

    name = "truncation"
    title = N_("shorter texts")
    reason = "shorter texts need less of everything that grows with the length"
    shrinks = ("activations", "time")

    max_length: int = 128

    def __post_init__(self) -> None:
        if self.max_length < _SHORTEST:
            raise ConfigError(
                "texts cannot be cut to {max_length} tokens; {least} or more",
                max_length=self.max_length,
                least=_SHORTEST,
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.DATA

    def in_words(self) -> str:
        return t("texts cut at {max_length} tokens", max_length=self.max_length)

    def explain(self, plan: PlanFigures) -> str:
        lengths = plan.task.lengths
        cut = sum(length > self.max_length for length in lengths) / len(lengths)
        return Message(
            "texts are cut at {tokens} tokens, as you allowed: {share} of the rows lose their end",
            tokens=str(self.max_length),
            share=percent(cut),
        )

    def unavailable(self, setup: Setup) -> str:
        dataset = setup.train_dataset
        first = dataset[0] if has_rows(dataset) else {}
        if isinstance(first, Mapping) and "input_ids" in first:
            if "start_positions" in first or "end_positions" in first:
                return Message(
                    "answers are named by their place in the text; give the tokenizer max_length"
                )
            if any(hasattr(one, "__len__") for one in _numbers(first["input_ids"])[:1]):
                return Message("each row holds several texts; give the tokenizer max_length")
        rows = token_rows(dataset)
        if are_pairs(rows):
            return Message(
                "of pairs of texts the tokenizer must choose which to cut; give it max_length"
            )
        if rows:
            from memfit.engine.micro_batches import longest_row

            longest = longest_row(dataset, setup.model)
            if longest <= self.max_length:
                return Message("no text has more than {longest} tokens", longest=longest)
        return ""

    def change(self, setup: Setup) -> None:
        closed = ends_alike(token_rows(setup.train_dataset))

        def replace(dataset: Any, collator: Collator) -> tuple[Any, Collator]:
            rows = token_rows(dataset)
            if are_pairs(rows):
                raise ConfigError(
                    "pairs of texts cannot be cut in the batch; tokenize them shorter"
                )
            keeps_end = ends_alike(rows) if closed is None else closed
            # Nearly every tokenizer for classification closes a text with a token of its own.
            return dataset, CuttingCollator(collator, self.max_length, keeps_end is not False)

        setup.replace_data.append(replace)
        setup.undo.append(lambda: setup.replace_data.remove(replace))


@dataclass(frozen=True, slots=True)
class CuttingCollator:
    """A collator whose texts are cut; picklable, for loader workers."""

    collator: Callable[[list[Any]], Any]
    max_length: int
    keeps_end: bool

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        return cut(self.collator(rows), self.max_length, keeps_end=self.keeps_end)


def cut(batch: Mapping[str, Any], max_length: int, *, keeps_end: bool = True) -> dict[str, Any]:
    """The batch with at most this many tokens a text, padded on the side it was.

    A text that is too long keeps its first tokens, and with `keeps_end` its last one.
    """
    mask = batch.get("attention_mask")
    if mask is None and isinstance(ids := batch.get("input_ids"), Tensor):
        mask = torch.ones_like(ids)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] <= max_length:
        return dict(batch)
    real = mask.ne(0)
    columns = _columns(real, max_length, keeps_end=keeps_end)
    # The last token moves up, and takes the position of the place it comes to.
    places = _columns(real, max_length, keeps_end=False)
    shorter = dict(batch)
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.shape[:2] != mask.shape:
            continue
        # Classes of tokens go with their tokens; several labels of a text are floating-point.
        if name in TOKEN_INPUTS or (name == "labels" and not value.is_floating_point()):
            kept = places if name == "position_ids" else columns
            index = kept.view(*kept.shape, *[1] * (value.dim() - 2))
            shorter[name] = value.gather(1, index.expand(*kept.shape, *value.shape[2:]))
    return shorter


def _columns(real: Tensor, max_length: int, *, keeps_end: bool) -> Tensor:
    """Which columns of each row are kept, in order: [rows, max_length]."""
    number = real.cumsum(dim=1)  # 1 for a text's first token
    length = number[:, -1:]
    end = 1 if keeps_end else 0
    kept = (number <= max_length - end) | (number > length - end) | (length <= max_length)
    kept &= real
    # Stable, so that tokens stay in order; a row that was cut fills the width, and one that was
    # not brings its own padding along.
    is_left = bool((~real[:, 0] & real[:, -1]).any())
    order = (kept if is_left else ~kept).int().argsort(dim=1, stable=True)
    return order[:, -max_length:] if is_left else order[:, :max_length]


def token_rows(dataset: Any) -> list[dict[str, list[int]]]:
    """The first rows of a dataset without padding; none where they cannot be looked at."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return []
    found = []
    for row in (dataset[index] for index in range(min(len(dataset), _LOOKED_AT_ROWS))):
        if isinstance(row, Mapping) and "input_ids" in row:
            ids = _numbers(row["input_ids"])
            mask = _numbers(row.get("attention_mask", [1] * len(ids)))
            types = _numbers(row.get("token_type_ids", [0] * len(ids)))
            real = [index for index, seen in enumerate(mask) if seen]
            found.append({"ids": [ids[at] for at in real], "types": [types[at] for at in real]})
    return found


def _numbers(values: Any) -> list[int]:
    return list(values.tolist()) if hasattr(values, "tolist") else list(values)


def ends_alike(rows: Sequence[Mapping[str, list[int]]]) -> bool | None:
    """Whether every text begins and ends with the same token: special ones. None: too few rows."""
    texts = [row["ids"] for row in rows if row["ids"]]
    if len(texts) < 2:
        return None
    return len({ids[0] for ids in texts}) == 1 and len({ids[-1] for ids in texts}) == 1


def are_pairs(rows: Sequence[Mapping[str, list[int]]]) -> bool:
    """Whether rows hold two texts: by their token types, or by a closing token in the middle."""
    if any(any(row["types"]) for row in rows):
        return True
    texts = [row["ids"] for row in rows if row["ids"]]
    return bool(ends_alike(rows)) and all(ids[-1] in ids[1:-1] for ids in texts)
