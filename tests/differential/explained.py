"""Differences to the stock Trainer that are meant, each with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from differential.cases import Case
    from differential.training import Seen

OUR_FILES = frozenset({"manifest.json", "memfit.json"})
"""Checksums and the micro-batching of a checkpoint."""
OUR_LOG_ENTRIES = frozenset({"adjustment"})
"""Entries of the log that say which micro-batches memory left."""
TIMES = frozenset(
    {
        "train_runtime", "train_samples_per_second", "train_steps_per_second", "eval_runtime",
        "eval_samples_per_second", "eval_steps_per_second", "total_flos",
    }
)  # fmt: skip
"""What a clock says, or what is counted of it."""


def values_differ_by_design(case: Case, ours: Seen) -> str:
    """Why the numbers of this case cannot be those of the stock Trainer; empty where they must."""
    if "lora" in ours.strategies:
        return "adapters are other weights, which begin at random"
    if "truncation" in ours.strategies:
        return "texts are cut"
    if case.sampling == "group_by_length":
        return "the order depends on seed and epoch alone, so that a resumed run repeats it"
    if case.neftune is not None:
        return "noise is drawn for other shapes; how much of it is compared apart"
    return ""
