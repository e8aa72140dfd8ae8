"""Checkpoints that a run can be continued from exactly, and how to tell them from halves.

A checkpoint is good when its files are those its manifest lists (runtime/manifest.py), byte for
byte. One that another Trainer wrote has no manifest: it is taken where there are no others.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import TrainerState
from transformers.trainer_pt_utils import LengthGroupedSampler

from memfit.errors import NoCheckpointError, OutputError
from memfit.messages import t
from memfit.runtime.batching import MicroBatching
from memfit.runtime.manifest import MANIFEST, problem_with

_FOLDER = re.compile(r"checkpoint-(\d{1,18})", re.ASCII)
# The Trainer writes this file last: a checkpoint without it was interrupted while being written.
_WRITTEN_LAST = "trainer_state.json"
_OPTIMIZER = "optimizer.pt"
_OURS = "memfit.json"


@dataclass(frozen=True, slots=True)
class Search:
    """The newest good checkpoint, if there is one, and why each newer one is none."""

    good: Path | None
    passed_over: tuple[tuple[Path, str], ...] = ()

    def notes(self) -> list[str]:
        """One sentence for each that was passed over."""
        return [
            t("{path} is passed over: {why}", path=path, why=why) for path, why in self.passed_over
        ]


def step_of(checkpoint: Path) -> int | None:
    """The step a folder of this name was written after; None where it is no checkpoint."""
    match = _FOLDER.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """All folders that are called checkpoints, newest first, whatever is in them."""
    folder = Path(output_dir)
    try:
        found = [item for item in folder.iterdir() if item.is_dir() and step_of(item) is not None]
    except OSError:
        return []
    return sorted(found, key=lambda item: (step_of(item) or 0, item.name), reverse=True)


def newest_good(output_dir: str | Path) -> Search:
    """Looks from the newest on; every byte of the one that is taken has been read."""
    found = checkpoints_in(output_dir)
    if found and all(_is_foreign(item) for item in found):
        whole = [item for item in found if not state_problem(item)]
        return Search(whole[0] if whole else None, tuple(_passed_over(found, whole)))
    passed_over: list[tuple[Path, str]] = []
    for item in found:
        problem = damage(item)
        if not problem:
            return Search(item, tuple(passed_over))
        passed_over.append((item, problem))
    return Search(None, tuple(passed_over))


def damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint, whoever wrote it; empty where nothing is."""
    listed = "" if _is_foreign(checkpoint) else problem_with(checkpoint)
    return listed or state_problem(checkpoint)


def newest_listed(output_dir: str | Path) -> Path | None:
    """The newest that has a manifest, unread: for a sentence, not to go on from."""
    return next((item for item in checkpoints_in(output_dir) if (item / MANIFEST).is_file()), None)


def _passed_over(found: list[Path], whole: list[Path]) -> Iterator[tuple[Path, str]]:
    for item in found[: found.index(whole[0])] if whole else found:
        yield item, state_problem(item)


def _is_foreign(checkpoint: Path) -> bool:
    """Whether another Trainer wrote it: one of ours that lost its manifest is damaged."""
    return not (checkpoint / MANIFEST).exists() and not (checkpoint / _OURS).exists()


def state_problem(checkpoint: Path) -> str:
    """Why nothing can be continued from the state: not there, cut off, or not one at all.

    Of a checkpoint without manifest this is all that can be told.
    """
    try:
        state = TrainerState.load_from_json(str(checkpoint / _WRITTEN_LAST))
        if not isinstance(state.global_step, int) or not isinstance(state.log_history, list):
            raise TypeError("it counts no steps")
    except FileNotFoundError:
        return t("{file}, which is written last, is missing", file=_WRITTEN_LAST)
    except Exception as error:  # whatever half a file makes of JSON and of the state's fields
        return t("{file} cannot be read: {reason}", file=_WRITTEN_LAST, reason=error)
    return ""


def checkpoint_to_resume(output_dir: str | Path, wanted: str | Path | Search) -> Path:
    """The checkpoint to continue from: the one named, or the one found."""
    if not isinstance(wanted, Search):
        found = Path(wanted)
        if not found.is_dir():
            raise NoCheckpointError(
                t("Can't find a valid checkpoint at {path}: there is no such folder", path=wanted)
            )
        if problem := damage(found.resolve()):
            raise OutputError(
                t("{path} is not a complete checkpoint: {problem}", path=wanted, problem=problem)
            )
    elif wanted.good is None:
        raise NoCheckpointError(nothing_good(output_dir, wanted))
    else:
        found = wanted.good
    if _is_foreign(found):
        _warn(
            t(
                "{checkpoint} has no {file}, since another Trainer wrote it: it is taken unchecked",
                checkpoint=found,
                file=MANIFEST,
            )
        )
    if not (found / _OPTIMIZER).is_file():
        _warn(
            t(
                "{checkpoint} has no optimizer state (save_only_model): the run goes on from its "
                "weights, not exactly",
                checkpoint=found,
            )
        )
    return found


def nothing_good(output_dir: str | Path, search: Search) -> str:
    """Why a run cannot be resumed."""
    if not search.passed_over:
        return t(
            "nothing to resume: No valid checkpoint found in output directory ({folder})",
            folder=output_dir,
        )
    damaged = "; ".join(search.notes())
    return t(
        "nothing to resume: no checkpoint in {folder} is whole. {damaged}",
        folder=output_dir,
        damaged=damaged,
    )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=4)


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
