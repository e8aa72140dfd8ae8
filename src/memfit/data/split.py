"""Which rows validate: seeded, and stratified where there are classes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from memfit.data.values import MULTI_LABEL, SINGLE_LABEL, LabelSpace
from memfit.errors import DataError
from memfit.messages import t

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def check_share(share: float) -> None:
    """`validation_split` before anything is read."""
    if not 0 < share < 1:  # also refuses nan
        raise DataError(
            t(
                "--validation-split is {share}; write a share between 0 and 1, such as 0.1",
                share=share,
            )
        )


def split_rows(
    labels: Array, space: LabelSpace, share: float, seed: int, where: str
) -> tuple[Array, Array]:
    """(training, validation) row numbers, each in the order of the file.

    In order and not shuffled, so that a file larger than memory is read front to back;
    the Trainer shuffles every epoch.
    """
    import numpy as np

    rows = len(labels)
    wanted = math.ceil(round(rows * share, 6))  # as datasets and scikit-learn round it
    if wanted >= rows:
        raise DataError(
            t(
                "{where}: {rows} usable rows cannot be split at --validation-split {share}; "
                "add rows or give a --validation-file",
                where=where,
                rows=rows,
                share=share,
            )
        )
    random = np.random.default_rng(seed)
    if space.task == SINGLE_LABEL:
        shares = _stratified_counts(labels, space, wanted, where)
        members = (np.flatnonzero(labels == number) for number in range(space.num_labels))
        chosen = [
            random.permutation(member)[:count]
            for member, count in zip(members, shares, strict=True)
        ]
        validates = np.concatenate(chosen)
    else:
        validates = random.permutation(rows)[:wanted]
    in_validation = np.zeros(rows, dtype=bool)
    in_validation[validates] = True
    if space.task == MULTI_LABEL:
        _keep_every_label_in_training(labels, in_validation)
    return np.flatnonzero(~in_validation), np.flatnonzero(in_validation)


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
            t(
                "{where}: {wanted} of {rows} rows for validation leave a label out of one "
                "split, as there are {classes} labels; give a --validation-split of {least} to "
                "{most}, or a --validation-file",
                where=where,
                least=least,
                most=most,
                **said,
            )
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


def _keep_every_label_in_training(labels: Array, in_validation: Array) -> None:
    """A rare label of a multi-label table must at least be learned; its first row is moved."""
    import numpy as np

    for column in labels.T > 0:
        holders = np.flatnonzero(column)
        if len(holders) and in_validation[holders].all():
            in_validation[holders[0]] = False


def count_shared(train_hashes: Array, validation_hashes: Array) -> int:
    """Validation rows whose text also occurs in training."""
    import numpy as np

    return int(np.isin(validation_hashes, train_hashes).sum())


def class_counts(labels: Array, space: LabelSpace) -> dict[str, int]:
    """Rows of every class (multi-label: rows that have it); nothing for regression."""
    import numpy as np

    if space.task == SINGLE_LABEL:
        totals = np.bincount(labels, minlength=space.num_labels)
    elif space.task == MULTI_LABEL:
        totals = (labels > 0).sum(axis=0)
    else:
        return {}
    return {name: int(total) for name, total in zip(space.names, totals, strict=True)}
