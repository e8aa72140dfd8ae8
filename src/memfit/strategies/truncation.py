"""Truncation: texts are cut shorter than they were tokenized, and lose their end.

Activations shrink with the length, attention's with its square where it is not fused. What is cut
is not learned from: max length 32 cost m3e-small 3 points of F1 on ChnSentiCorp. `choose_length`
finds a length in the data's own lengths; tokenizing with it gives the same token ids as this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.engine.micro_batches import TOKEN_INPUTS
from memfit.errors import ConfigError
from memfit.i18n import N_, Message, t
from memfit.strategies.base import Collator, Fidelity, Setup, Strategy
from memfit.strategies.planning import (
    Axis,
    Effects,
    Half,
    Option,
    PlanFigures,
    PlanQuestion,
    TracePart,
)
from memfit.units import percent

if TYPE_CHECKING:
    from memfit.data import LengthSummary

_MULTIPLE = 8
"""Lengths are multiples of it: tensor cores take tokens by eights."""

_LOOKED_AT_ROWS = 1000

_CUT_SHARES = (0.05, 0.2)
"""Shares of the rows that a shorter length may cut, if the planner chooses it."""

_SHORTEST = 3
"""A first special token, one token of text and a last special token."""


@dataclass(frozen=True, slots=True)
class LengthChoice:
    """A length to cut texts at, and what it cuts."""

    max_length: int
    cut_rows: int
    """Rows that lose their end; from a summary, the most it can be."""
    rows: int

    @property
    def cut_fraction(self) -> float:
        """The share of rows that lose their end."""
        return self.cut_rows / self.rows if self.rows else 0.0


def choose_length(
    lengths: LengthSummary | Iterable[int], *, cut_at_most: float = 0.05
) -> LengthChoice:
    """The smallest multiple of 8 that cuts at most this share of the rows.

    `lengths` are those before any cutting. A summary's bins hide where in a bin its rows lie; all
    of a bin that may be cut are counted as cut.
    """
    if not 0 <= cut_at_most < 1:
        raise ConfigError(
            Message(
                "cut_at_most is a share from 0 to below 1, not {cut_at_most}",
                cut_at_most=cut_at_most,
            )
        )
    spans = _spans(lengths)
    rows = sum(count for _, count in spans)
    if not rows:
        raise ConfigError(Message("there is no row to choose a length from"))
    longest = max(last for last, _ in spans)
    for length in range(_MULTIPLE, longest + _MULTIPLE, _MULTIPLE):
        cut_rows = sum(count for last, count in spans if last > length)
        if cut_rows <= cut_at_most * rows:
            return LengthChoice(length, cut_rows, rows)
    raise AssertionError("the last length tried is as long as the longest row")


def _spans(lengths: LengthSummary | Iterable[int]) -> list[tuple[int, int]]:
    """The longest a group of rows can be, and how many rows it has."""
    if isinstance(lengths, Iterable):
        return [(int(length), 1) for length in lengths]
    return [(one.last_tokens, one.rows) for one in lengths.histogram if one.rows]


@dataclass(frozen=True, slots=True)
class Truncation(Strategy):
    """Texts of more than `max_length` tokens keep the first ones and their closing special token.

    Of pairs the tokenizer must decide which text is cut, so they are refused.
    """

    name = "truncation"
    title = N_("shorter texts")
    reason = "shorter texts need less of everything that grows with the length"
    shrinks = ("activations", "time")
    axis = Axis.TEXTS
    permission = "truncate"
    traced = TracePart.NONE
    is_rare = True

    max_length: int = 128

    def __post_init__(self) -> None:
        if self.max_length < _SHORTEST:
            raise ConfigError(
                Message(
                    "texts cannot be cut to {max_length} tokens; {least} or more",
                    max_length=self.max_length,
                    least=_SHORTEST,
                )
            )

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.DATA

    @property
    def effects(self) -> Effects:
        return Effects(cuts_at=self.max_length)

    @classmethod
    def as_used(cls, half: Half) -> Option:  # noqa: ARG003
        return (cls(64),)

    @classmethod
    def options(cls, asked: PlanQuestion, so_far: list[Option]) -> list[Option]:
        if not asked.allows(cls):
            return so_far
        lengths = asked.workload.lengths
        shorter = {choose_length(lengths, cut_at_most=share).max_length for share in _CUT_SHARES}
        shorter.add(max(8, asked.workload.longest_tokens // 2 // 8 * 8))
        fewer = sorted((one for one in shorter if one < max(lengths)), reverse=True)
        return [*so_far, *asked.usable((cls(one),) for one in fewer)]

    def in_words(self) -> str:
        return t("texts cut at {max_length} tokens", max_length=self.max_length)

    def explain(self, plan: PlanFigures) -> str:
        lengths = plan.workload.lengths
        cut = sum(length > self.max_length for length in lengths) / len(lengths)
        return Message(
            "texts are cut at {tokens} tokens, as you allowed: {share} of the rows lose their end",
            tokens=str(self.max_length),
            share=percent(cut),
        )

    def unavailable(self, setup: Setup) -> str:
        if reason := _not_cut(setup.train_dataset):
            return reason
        rows = token_rows(setup.train_dataset)
        if are_pairs(rows):
            return Message(
                "of pairs of texts the tokenizer must choose which to cut; give it max_length"
            )
        if rows:
            from memfit.engine.micro_batches import longest_row

            longest = longest_row(setup.train_dataset, setup.model)
            if longest <= self.max_length:
                return Message("no text has more than {longest} tokens", longest=longest)
        return ""

    def change(self, setup: Setup) -> None:
        closed = ends_alike(token_rows(setup.train_dataset))

        def replace(dataset: Any, collator: Collator) -> tuple[Any, Collator]:
            rows = token_rows(dataset)
            if are_pairs(rows):
                raise ConfigError(
                    Message("pairs of texts cannot be cut in the batch; tokenize them shorter")
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
    return {
        name: _picked(value, places if name == "position_ids" else columns)
        if _is_tokens(name, value, mask)
        else value
        for name, value in batch.items()
    }


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


def _is_tokens(name: str, value: Any, mask: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.shape[:2] != mask.shape:
        return False
    # Classes of tokens go with their tokens; several labels of a text are floating-point numbers.
    return name in TOKEN_INPUTS or (name == "labels" and not value.is_floating_point())


def _picked(value: Tensor, columns: Tensor) -> Tensor:
    index = columns.view(*columns.shape, *[1] * (value.dim() - 2))
    return value.gather(1, index.expand(*columns.shape, *value.shape[2:]))


def _not_cut(dataset: Any) -> str:
    """Why the rows of a dataset cannot be cut in the batch, by its first one."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or not len(dataset):
        return ""
    row = dataset[0]
    if not isinstance(row, Mapping) or "input_ids" not in row:
        return ""
    if "start_positions" in row or "end_positions" in row:
        return Message(
            "answers are named by their place in the text; give the tokenizer max_length"
        )
    ids = _numbers(row["input_ids"])
    return (
        Message("each row holds several texts; give the tokenizer max_length")
        if _nested(ids)
        else ""
    )


def _nested(values: list[Any]) -> bool:
    return bool(values) and (isinstance(values[0], list | tuple) or hasattr(values[0], "__len__"))


def token_rows(dataset: Any) -> list[dict[str, list[int]]]:
    """The first rows of a dataset without padding; none where they cannot be looked at."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return []
    rows = (dataset[index] for index in range(min(len(dataset), _LOOKED_AT_ROWS)))
    return [_unpadded(row) for row in rows if isinstance(row, Mapping) and "input_ids" in row]


def _unpadded(row: Mapping[str, Any]) -> dict[str, list[int]]:
    ids = _numbers(row["input_ids"])
    mask = _numbers(row.get("attention_mask", [1] * len(ids)))
    types = _numbers(row.get("token_type_ids", [0] * len(ids)))
    real = [index for index, seen in enumerate(mask) if seen]
    return {"ids": [ids[at] for at in real], "types": [types[at] for at in real]}


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
    if not ends_alike(rows):
        return False
    return all(ids[-1] in ids[1:-1] for ids in texts)
