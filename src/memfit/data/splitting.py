"""Which rows train and which validate; rows that belong together stay on one side.

Rows with the same text belong together, or else those with the same value in --group-column (one
customer, one conversation): a model that has seen a text, or its writer, is validated on what it
knows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from memfit.data.tables import MULTI_LABEL, REGRESSION, SINGLE_LABEL, LabelSpace
from memfit.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_TRIES = 20
"""Ways to deal out groups that hold several classes each; the one nearest to the shares is kept."""


def numbered(values: Array) -> Array | None:
    """The group of each row, numbered as they first occur; None where every row is alone.

    Not by the values' own order: Python's hashes differ from process to process, and a resumed run
    must split as it did before.
    """
    import numpy as np

    known, first, of_row = np.unique(values, return_index=True, return_inverse=True)
    if len(known) == len(values):
        return None
    order = np.empty(len(known), dtype=np.int64)
    order[np.argsort(first)] = np.arange(len(known))
    return order[of_row]


def split_rows(
    labels: Array,
    space: LabelSpace,
    share: float,
    seed: int,
    where: str,
    *,
    texts: Array | None = None,
    groups: Array | None = None,
) -> tuple[Array, Array]:
    """(training, validation) row numbers, each in the order of the file.

    Rows of one of `groups` are never divided; rows with one of `texts` are not, unless a class has
    too few different texts for that. In order and not shuffled, so that a file larger than memory
    is read front to back; the Trainer shuffles every epoch.
    """
    import numpy as np

    rows = len(labels)
    wanted = math.ceil(round(rows * share, 6))  # as datasets and scikit-learn round it
    if wanted >= rows:
        raise DataError(
            "{where}: {rows} usable rows cannot be split at --validation-split {share}; "
            "add rows or give a --validation-file",
            where=where,
            rows=rows,
            share=share,
        )
    classes, counts = np.zeros(rows, dtype=np.int64), [wanted]
    if space.task == SINGLE_LABEL:
        classes, counts = labels, _stratified_counts(labels, space, wanted, where)
    if groups is not None:
        in_validation = _whole_groups(classes, counts, groups, seed, where)
    else:
        in_validation = _drawn_by_class(classes, counts, texts, seed)
        if texts is not None and not _on_both_sides(classes, in_validation):
            in_validation = _drawn_by_class(classes, counts, None, seed)
    if space.task == MULTI_LABEL:
        _keep_every_label_in_training(labels, in_validation, texts if groups is None else groups)
    return np.flatnonzero(~in_validation), np.flatnonzero(in_validation)


def _drawn_by_class(classes: Array, counts: list[int], texts: Array | None, seed: int) -> Array:
    """Which rows validate: of every class its count, equal texts together where that can be."""
    import numpy as np

    random = np.random.default_rng(seed)
    home = classes
    if texts is not None:  # a text with several labels is dealt out with the first of them
        home = classes[np.unique(texts, return_index=True)[1]][texts]
    in_validation = np.zeros(len(classes), dtype=bool)
    for number, count in enumerate(counts):
        members = np.flatnonzero(home == number)
        in_validation[_drawn(members, texts, count, random)] = True
    return in_validation


def _drawn(members: Array, texts: Array | None, count: int, random: np.random.Generator) -> Array:
    """About `count` of the rows, whole texts; exactly `count` where that would be far too many."""
    import numpy as np

    if texts is None:
        return random.permutation(members)[:count]
    _, of_row, sizes = np.unique(texts[members], return_inverse=True, return_counts=True)
    if len(sizes) == len(members):
        return random.permutation(members)[:count]
    picked = _picked(random.permutation(len(sizes)), sizes, count)
    if len(picked) == len(sizes) or sizes[picked].sum() > 2 * count:
        return random.permutation(members)[:count]
    found: Array = members[_rows_of(picked, of_row, len(sizes))]
    return found


def _picked(order: Array, sizes: Array, count: int) -> Array:
    """Groups of `count` rows together or a few less, the first in this order; at least one."""
    import numpy as np

    first = order[np.cumsum(sizes[order]) <= count]
    rest = order[len(first) :]
    rest = rest[sizes[rest] <= count - sizes[first].sum()]
    more = rest[np.cumsum(sizes[rest]) <= count - sizes[first].sum()]
    picked = np.concatenate([first, more])
    return picked if len(picked) else order[[int(np.argmin(sizes[order]))]]


def _rows_of(picked: Array, groups: Array, count: int) -> Array:
    """Which rows are in one of the picked groups, of so many groups in all."""
    import numpy as np

    is_picked = np.zeros(count, dtype=bool)
    is_picked[picked] = True
    found: Array = is_picked[groups]
    return found


def _whole_groups(classes: Array, counts: list[int], groups: Array, seed: int, where: str) -> Array:
    """Which rows validate where no group may be divided, every class on both sides."""
    import numpy as np

    random, sizes = np.random.default_rng(seed), np.bincount(groups)
    best: tuple[float, Array] | None = None
    for _ in range(_TRIES):
        picked = _picked(random.permutation(len(sizes)), sizes, sum(counts))
        in_validation = _rows_of(picked, groups, len(sizes))
        missed = np.bincount(classes[in_validation], minlength=len(counts)) - np.array(counts)
        far = float(np.abs(missed).sum())
        if _on_both_sides(classes, in_validation) and (best is None or far < best[0]):
            best = far, in_validation
    if best is None:
        raise DataError(
            "{where}: {groups} groups cannot be split so that every class is trained on and "
            "validated; give a --validation-file, or leave --group-column out",
            where=where,
            groups=f"{len(sizes):,}",
        )
    return best[1]


def _on_both_sides(classes: Array, in_validation: Array) -> bool:
    import numpy as np

    there = np.bincount(classes)
    held = np.bincount(classes[in_validation], minlength=len(there))
    return bool(((held > 0) & (held < there))[there > 0].all())


def _stratified_counts(labels: Array, space: LabelSpace, wanted: int, where: str) -> list[int]:
    """Validation rows of every class: proportional, and at least one on either side."""
    import numpy as np

    totals = np.bincount(labels, minlength=space.num_labels)
    present = totals > 0  # a source may declare a class that has no rows
    classes = int(present.sum())
    if min(wanted, len(labels) - wanted) < classes:
        least = f"{math.ceil(100 * classes / len(labels)) / 100:.2f}"
        most = f"{math.floor(100 - 100 * classes / len(labels)) / 100:.2f}"
        said = {"wanted": wanted, "rows": len(labels), "classes": classes}
        raise DataError(
            "{where}: {wanted} of {rows} rows for validation leave a label out of one "
            "split, as there are {classes} labels; give a --validation-split of {least} to "
            "{most}, or a --validation-file",
            where=where,
            least=least,
            most=most,
            **said,
        )
    quota = totals * (wanted / len(labels))
    counts = np.where(present, np.clip(np.floor(quota), 1, np.maximum(totals - 1, 1)), 0)
    # Rounding leaves a few rows over or short; they go where the quota is missed most.
    while counts.sum() < wanted:
        room = counts < totals - 1
        counts[np.argmax(np.where(room, quota - counts, -np.inf))] += 1
    while counts.sum() > wanted:
        counts[np.argmax(np.where(counts > 1, counts - quota, -np.inf))] -= 1
    return [int(count) for count in counts]


def _keep_every_label_in_training(
    labels: Array, in_validation: Array, groups: Array | None
) -> None:
    """A rare label of a multi-label table must at least be learned; its first row is moved."""
    import numpy as np

    for column in labels.T > 0:
        holders = np.flatnonzero(column)
        if len(holders) and in_validation[holders].all():
            first = holders[0]
            in_validation[first if groups is None else groups == groups[first]] = False


def count_shared(train_hashes: Array, validation_hashes: Array) -> int:
    """Validation rows whose text also occurs in training."""
    import numpy as np

    return int(np.isin(validation_hashes, train_hashes).sum())


def contradictions(hashes: Array, labels: Array, space: LabelSpace) -> Array:
    """Row numbers whose text another row has with another label; none for a regression."""
    import numpy as np

    _, of_row, rows = np.unique(hashes, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(rows[of_row] > 1)
    if space.task == REGRESSION or not len(repeated):
        return repeated[:0]
    text, label = of_row[repeated], labels[repeated]
    if space.task == MULTI_LABEL:
        label = np.unique(label, axis=0, return_inverse=True)[1].reshape(-1)
    least, most = np.full(len(rows), label.max()), np.full(len(rows), label.min())
    np.minimum.at(least, text, label)
    np.maximum.at(most, text, label)
    found: Array = repeated[least[text] != most[text]]
    return found
