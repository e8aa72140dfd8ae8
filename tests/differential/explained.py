"""Differences to the stock Trainer that are meant; docs/differences.md has them, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from differential.cases import Case
    from differential.training import Seen

EXPLAINED = {
    "files": "A checkpoint also has `manifest.json`, its checksums, and `memfit.json`, how its "
    "batches were run.",
    "log": "`log_history` also has an entry for each change to the micro-batches that memory made "
    "necessary.",
    "order": "With `group_by_length` the order of the rows depends on the seed and the epoch "
    "alone, so that a resumed run repeats it.",
    "noise": "NEFTune's noise is as large, but drawn for micro-batches: its numbers are others.",
    "adapters": "`Lora` trains adapters that begin at random, and `trainer.model` holds them.",
    "cut": "`Truncation` cuts texts, and with them what is predicted for each token.",
}
OUR_FILES = frozenset({"manifest.json", "memfit.json"})
OUR_LOG_ENTRIES = frozenset({"adjustment"})
TIMES = frozenset(
    {
        "train_runtime", "train_samples_per_second", "train_steps_per_second", "eval_runtime",
        "eval_samples_per_second", "eval_steps_per_second", "total_flos", "train_tokens_per_second",
    }
)  # fmt: skip
"""What a clock says, or what is counted of it."""


def values_differ_by_design(case: Case, ours: Seen) -> str:
    """Why the numbers of this case cannot be those of the stock Trainer; empty where they must."""
    found = {
        "adapters": "lora" in ours.strategies,
        "cut": "truncation" in ours.strategies,
        "order": case.sampling == "group_by_length",
        "noise": case.neftune is not None,
    }
    return next((EXPLAINED[name] for name, there in found.items() if there), "")
