"""From labels as they are written to a task, label names and ids."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memfit.data.tables import MULTI_LABEL, REGRESSION, SINGLE_LABEL, LabelSpace
from memfit.errors import DataError, nearest
from memfit.i18n import t

MOST_CLASSES = 10_000
"""More different labels than this are numbers to predict or not labels at all."""

SEPARATORS = ("|", ";", ",")
"""Between labels in one cell; only the first is taken for one without being asked."""

WHOLE = re.compile(r"[+-]?\d+(\.0*)?")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")  # not "nan", "inf" or "1_000"
_TRUTH = {"0": False, "1": True, "false": False, "true": True, "0.0": False, "1.0": True}


def label_items(value: Any) -> list[str] | None:
    """One cell as a list of written labels; None where the row has no label."""
    if isinstance(value, list | tuple):
        return [text for item in value if (text := _written(item))]
    text = _written(value)
    return [text] if text else None


def flag_items(values: Sequence[Any], names: Sequence[str], where: str) -> list[str] | None:
    """The names of the 0/1 columns that are 1; None where one of them is empty."""
    chosen = []
    for value, name in zip(values, names, strict=True):
        text = _written(value)
        if not text:
            return None
        if text.lower() not in _TRUTH:
            raise DataError(
                "{where}: column {column} holds {value}; several label columns must hold 0 "
                "or 1 each",
                where=where,
                column=repr(name),
                value=shorten(text),
            )
        if _TRUTH[text.lower()]:
            chosen.append(name)
    return chosen


class LabelScan:
    """What the labels of one table look like, gathered row by row in bounded memory."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.too_many = False
        self.lists = False
        self.list_widths: set[int] = set()
        self.separators: set[str] = set()
        self.first_word: str | None = None
        """The first label that is not a number."""
        self.fractional = False
        self._repeats = False

    def add(self, items: list[str], *, is_list: bool) -> None:
        """One row's labels."""
        if is_list:
            self.lists = True
            self.list_widths.add(len(items))
            self._repeats |= len(set(items)) < len(items)
        for item in items:
            if item in self.counts:
                self.counts[item] += 1
                continue
            if len(self.counts) < MOST_CLASSES:
                self.counts[item] = 1
            else:
                self.too_many = True
            self.separators.update(mark for mark in SEPARATORS if mark in item)
            if not NUMBER.fullmatch(item):
                self.first_word = self.first_word or item
            elif not WHOLE.fullmatch(item) and not float(item).is_integer():
                self.fractional = True

    @property
    def multi_hot_width(self) -> int | None:
        """The length of lists such as [0, 1, 0]; a list of names would not repeat one."""
        width = max(self.list_widths, default=0)
        return width if self._repeats and self.fits_multi_hot(width) else None

    def fits_multi_hot(self, width: int) -> bool:
        """Whether every label can be read as a list of this many zeros and ones."""
        return self.list_widths == {width} and self.counts.keys() <= {"0", "1"}


def _written(value: Any) -> str:
    """A label as text; whole floats as the integers they hold; '' for none."""
    if value is None or isinstance(value, dict | bytes):
        return ""
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value).strip()


def shorten(text: str, limit: int = 40) -> str:
    """Quoted for an error message, and never longer than a line."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


Encoded = int | float | list[float]


@dataclass(frozen=True)
class Coding:
    """How one written label becomes what the model learns."""

    space: LabelSpace
    ids: Mapping[str, int]
    whole_numbers: bool = False
    separator: str | None = None
    multi_hot: bool = False

    def keys(self, item: str) -> list[str]:
        """The labels one written item stands for: 'a|b' for two, '1.0' for '1'."""
        parts = [item] if self.separator is None else item.split(self.separator)
        found = [part.strip() for part in parts if part.strip()]
        return [_whole(key) for key in found] if self.whole_numbers else found

    def encode(self, items: list[str]) -> Encoded:
        """An id, a number, or a 0/1 vector."""
        if self.space.task == REGRESSION:
            return float(items[0])
        if self.multi_hot and items:
            return [float(item) for item in items]
        ids = [self.ids[key] for item in items for key in self.keys(item)]
        if self.space.task == SINGLE_LABEL:
            return ids[0]
        vector = [0.0] * self.space.num_labels
        for number in ids:
            vector[number] = 1.0
        return vector

    def key_counts(self, scan: LabelScan) -> Counter[str]:
        """Rows of every label of a scanned table."""
        counts: Counter[str] = Counter()
        for item, rows in scan.counts.items():
            for key in self.keys(item):
                counts[key] += rows
        return counts

    def check(self, scan: LabelScan, where: str, of: str) -> None:
        """Every label of another table must be one of `of`'s, and of the same kind."""
        task = self.space.task
        _check_kind(scan, task, where)
        if task == REGRESSION:
            return
        if self.multi_hot:
            if not scan.fits_multi_hot(self.space.num_labels):
                said = {"where": where, "count": self.space.num_labels, "of": of}
                raise DataError(
                    "{where}: its labels are not lists of {count} zeros and ones as in "
                    "{of}; write both the same way",
                    **said,
                )
            return
        unknown = [key for key in self.key_counts(scan) if key not in self.ids]
        if unknown:
            said = {"where": where, "label": shorten(unknown[0]), "of": of}
            raise DataError(
                "{where}: the label {label} does not occur in {of}, which has {known}; "
                "correct it or add rows with it there",
                known=_listed(self.ids),
                **said,
            )


def choose_coding(
    scan: LabelScan,
    *,
    task: str,
    columns: Sequence[str],
    declared: Sequence[str] | None,
    label_names: Mapping[str, str],
    where: str,
) -> Coding:
    """The task, found or named, with ids: numbers in their order, words sorted."""
    if task == "auto":
        task = REGRESSION if scan.fractional and scan.first_word is None else SINGLE_LABEL
        if len(columns) > 1 or scan.lists or ("|" in scan.separators and not declared):
            task = MULTI_LABEL
    _check_kind(scan, task, where)
    if task == REGRESSION:
        if label_names:
            raise DataError("label_names has no meaning for regression; leave it out")
        return Coding(LabelSpace(task, (columns[0],)), {})
    several = task == MULTI_LABEL and len(columns) == 1
    width = scan.multi_hot_width if several else None
    coding = Coding(
        LabelSpace(task, ()),
        {},
        whole_numbers=scan.first_word is None and not scan.fractional,
        separator=_separator(scan) if several and not scan.lists else None,
        multi_hot=width is not None,
    )
    if width is not None:
        keys = [str(number) for number in range(width)]
    elif len(columns) > 1:
        keys = list(columns)
    else:
        keys = list(declared) if declared else _ordered(coding.key_counts(scan))
    named = _with_names(keys, label_names, where, may_count=bool(declared))
    names = tuple(dict.fromkeys(named.values()))
    ids = {key: names.index(name) for key, name in named.items()}
    return replace(coding, space=LabelSpace(task, names), ids=ids)


def coding_for(
    space: LabelSpace, scan: LabelScan, label_names: Mapping[str, str], where: str
) -> Coding:
    """How a table's labels map to those of a model that exists.

    By name, or by what `label_names` translates. Numbers are ids only where the model's labels have
    no names (LABEL_0, LABEL_1): which word a 0 stands for would be a guess.
    """
    _check_kind(scan, space.task, where)
    several = space.task == MULTI_LABEL
    ids = {_whole(name): number for name, number in space.label2id.items()} | space.label2id
    for key, name in _as_text(label_names).items():
        if name not in space.label2id:
            raise DataError(
                "label_names: the model has no label {label}, only {known}; write one of "
                "these.{hint}",
                label=repr(name),
                known=_listed(space.names),
                hint=nearest(name, space.names),
            )
        ids[key] = ids[_whole(key)] = space.label2id[name]
    coding = Coding(
        space,
        ids,
        whole_numbers=scan.first_word is None and not scan.fractional,
        separator=_separator(scan) if several and not scan.lists else None,
        multi_hot=several and scan.multi_hot_width is not None,
    )
    keys = coding.key_counts(scan)
    by_id = {str(number): number for number in space.id2label}
    if space.task == REGRESSION or coding.multi_hot or all(key in ids for key in keys):
        return coding
    if not all(key in by_id for key in keys):
        return coding  # `check` names the first that is not known
    if all(name == f"LABEL_{number}" for number, name in space.id2label.items()):
        return replace(coding, ids=by_id)
    raise DataError(
        "{where}: its labels are numbers ({numbers}) and the model's are words ({known}); say "
        "which is which, such as --label-names {example}",
        where=where,
        numbers=_listed(sorted(keys)),
        known=_listed(space.names),
        example=" ".join(f"{key}={space.names[by_id[key]]}" for key in sorted(keys)[:3]),
    )


def ids_of(labels: Iterable[Any], space: LabelSpace) -> list[Encoded]:
    """The model's ids of labels given by name, one or a list of them for each text."""
    where, scan, written = t("the labels given"), LabelScan(), []
    for number, label in enumerate(labels, 1):
        is_list = isinstance(label, list | tuple)
        items = label_items(label)
        if items is None:
            raise DataError("text {number} has no label; give one for each", number=number)
        scan.add(items, is_list=is_list)
        written.append(items)
    coding = coding_for(space, scan, {}, where)
    coding.check(scan, where, of=t("the model"))
    return [coding.encode(items) for items in written]


def label_named(
    written: str, space: LabelSpace, label_names: Mapping[str, str], option: str
) -> str:
    """The name of a label that an option names: by its name, or as the table has it."""
    word = str(written).strip()
    for name in (word, _as_text(label_names).get(word), _whole(word)):
        if name in space.names:
            return str(name)
    raise DataError(
        "{option} names {label}, which is no label here; the labels are {known}.{hint}",
        option=option,
        label=shorten(word),
        known=_listed(space.names),
        hint=nearest(word, space.names),
    )


def weights_of_classes(
    asked: Mapping[str, float] | str,
    space: LabelSpace,
    counts: Mapping[str, int],
    rows: int,
    label_names: Mapping[str, str],
) -> list[float]:
    """What a row of each class counts in the loss, in the order of the ids; 1 if not named.

    `balanced` lets all classes count alike in sum, rows / (classes x rows of the class); for
    several labels a row it weighs the rows that have a label as those that have not.
    """
    if space.task == REGRESSION:
        raise DataError("--class-weights has no meaning for a regression; leave it out")
    if isinstance(asked, str):
        found = [counts.get(name, 0) for name in space.names]
        if space.task == MULTI_LABEL:
            return [(rows - count) / count if 0 < count < rows else 1.0 for count in found]
        present = sum(count > 0 for count in found)
        return [rows / (present * count) if count else 1.0 for count in found]
    named = {
        label_named(label, space, label_names, "--class-weights"): weight
        for label, weight in asked.items()
    }
    return [float(named.get(name, 1.0)) for name in space.names]


def _check_kind(scan: LabelScan, task: str, where: str) -> None:
    """Whether labels that look like this can be the labels of that task."""
    if task == REGRESSION:
        if scan.first_word is not None:
            raise DataError(
                "{where}: regression needs numbers and one label is {label}; correct it, "
                "or name another --label-column or task",
                where=where,
                label=shorten(scan.first_word),
            )
        if scan.lists:
            raise DataError(
                "{where}: regression needs one number a row and finds lists", where=where
            )
        return
    if scan.too_many:
        raise DataError(
            "{where}: more than {most} different labels; name the right --label-column, or "
            "task=regression if they are numbers to predict",
            where=where,
            most=f"{MOST_CLASSES:,}",
        )
    if task == SINGLE_LABEL and not scan.list_widths <= {1}:
        least, most = min(scan.list_widths), max(scan.list_widths)
        raise DataError(
            "{where}: single_label needs one label a row and finds lists of {least} to "
            "{most}; give task=multi_label",
            where=where,
            least=least,
            most=most,
        )


def _separator(scan: LabelScan) -> str | None:
    return next((mark for mark in SEPARATORS if mark in scan.separators), None)


def _ordered(keys: Iterable[str]) -> list[str]:
    """Numbers by value, words by code point; the same on every machine."""
    found = list(keys)
    if all(NUMBER.fullmatch(key) for key in found):
        return sorted(found, key=lambda key: (float(key), key))
    return sorted(found)


def _with_names(
    keys: list[str], label_names: Mapping[str, str], where: str, *, may_count: bool
) -> dict[str, str]:
    """The name of each label: as the user named it, or as it is written.

    Labels that differ only in case or spaces are one class if the user gives them one name.
    """
    names = {key: key for key in keys}
    spellings = {key.casefold(): key for key in keys} | {key: key for key in keys}
    if may_count:  # the source has named its labels already; the user may still say 0 and 1
        spellings = {str(number): key for number, key in enumerate(keys)} | spellings
    written = _as_text(label_names)
    for label, name in written.items():
        lower = label.casefold()
        key = spellings.get(label) or spellings.get(lower) or spellings.get(_whole(lower))
        if key is None:
            raise DataError(
                "{where}: label_names names {label}, which does not occur; the labels are "
                "{known}.{hint}",
                where=where,
                label=shorten(label),
                known=_listed(keys),
                hint=nearest(label, keys),
            )
        names[key] = name
    by_name: dict[str, str] = {}
    by_spelling: dict[str, str] = {}
    for key, name in names.items():
        spelling = " ".join(key.split()).casefold()
        other = by_spelling.setdefault(spelling, key)
        if other != key and not may_count and not {other, key} & written.keys():
            raise DataError(
                "{where}: the labels {label} and {other} differ only in case or spaces; write them "
                "alike, or give both one name: --label-names {example}",
                where=where,
                label=shorten(other),
                other=shorten(key),
                example=repr(f"{key}={other}"),
            )
        if by_name.setdefault(name, spelling) != spelling:
            raise DataError(
                "label_names gives two labels the name {name}; name them apart", name=repr(name)
            )
    return names


def _whole(key: str) -> str:
    """'1.0' and '01' are '1'; by text, since a float would round long numbers."""
    if WHOLE.fullmatch(key):
        return str(int(key.partition(".")[0]))
    whole = NUMBER.fullmatch(key) and float(key).is_integer()
    return str(int(float(key))) if whole else key


def _listed(names: Sequence[str] | Mapping[str, int]) -> str:
    shown = ", ".join(shorten(name)[1:-1] for name in list(names)[:10])
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown


def _as_text(label_names: Mapping[str, str]) -> dict[str, str]:
    """In Python a person also writes {0: "bad"}."""
    return {str(key).strip(): str(name) for key, name in label_names.items()}
