"""Which seeds are run: a few hundred in the suite, as many as are asked for by `make`.

The cases of the suite are in two files, so that two workers share them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Literal

from differential.cases import Case, drawn

COUNT = int(os.environ.get("DIFFERENTIAL_CASES", "300"))
FIRST = int(os.environ.get("DIFFERENTIAL_FIRST", "0"))


def seeds_of(kind: Literal["model", "run"]) -> list[int]:
    """Of the seeds to be run those whose case is about the model, or about how it is run."""
    chosen = range(FIRST, FIRST + COUNT)
    return [seed for seed in chosen if _is_a_run(drawn(seed)) == (kind == "run")]


def _is_a_run(case: Case) -> bool:
    return bool(
        case.save or case.again or case.trial or case.failing or case.evaluate or case.budget
    )


def first_cases(wanted: Callable[[Case], object], count: int) -> list[Case]:
    """The first so many cases of the generator that are as wanted."""
    found: Iterator[Case] = (case for case in map(drawn, itertools.count()) if wanted(case))
    return list(itertools.islice(found, count))
