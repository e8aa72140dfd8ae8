"""Checkpoints that a run can be continued from exactly, and how to tell them from halves."""

from __future__ import annotations

import contextlib
import json
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from transformers.trainer_pt_utils import LengthGroupedSampler

from memfit.errors import OutputError
from memfit.runtime.batching import MicroBatching

_FOLDER = re.compile(r"checkpoint-(\d+)")
# The Trainer writes this file last: a checkpoint without it was interrupted while being written.
_WRITTEN_LAST = "trainer_state.json"
_OPTIMIZER = "optimizer.pt"
_OURS = "memfit.json"


def checkpoint_to_resume(output_dir: str | Path, wanted: str | bool) -> str:
    """The checkpoint to continue from: the one named, or the newest complete one."""
    if isinstance(wanted, str):
        if not is_complete(Path(wanted)):
            raise OutputError(f"{wanted} is not a complete checkpoint: no {_WRITTEN_LAST} to read")
        found = Path(wanted)
    else:
        newest = last_complete(output_dir)
        if newest is None:
            raise OutputError(f"nothing to resume: no complete checkpoint in {output_dir}")
        found = newest
    if not (found / _OPTIMIZER).is_file():
        warnings.warn(
            f"{found} has no optimizer state (save_only_model): the run goes on from its weights, "
            "not exactly",
            UserWarning,
            stacklevel=3,
        )
    return str(found)


def last_complete(output_dir: str | Path) -> Path | None:
    """The newest checkpoint that was written to its end, if there is one."""
    folder = Path(output_dir)
    found = [
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _FOLDER.fullmatch(path.name)) and is_complete(path)
    ]
    return max(found)[1] if found else None


def is_complete(checkpoint: Path) -> bool:
    """Whether the file written last is there and whole."""
    try:
        return isinstance(json.loads((checkpoint / _WRITTEN_LAST).read_bytes()), dict)
    except (OSError, ValueError):
        return False


def record_micro_batching(folder: str | Path, micro_batching: MicroBatching) -> None:
    """Write how the batches were run, since dropout's numbers depend on it."""
    content = json.dumps({"micro_batching": asdict(micro_batching)}, indent=2)
    (Path(folder) / _OURS).write_text(content + "\n", encoding="utf-8")


def recorded_micro_batching(checkpoint: str | Path) -> MicroBatching | None:
    """How the batches of this checkpoint were run; nothing where another Trainer wrote it."""
    path = Path(checkpoint) / _OURS
    if not path.is_file():
        return None
    return MicroBatching(**json.loads(path.read_text(encoding="utf-8"))["micro_batching"])


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


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Random numbers drawn inside leave no trace outside, so that when one evaluates is free.

    (Every data loader draws a seed. A checkpoint taken before an evaluation would otherwise
    resume with other dropout than the run that evaluated.)
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
