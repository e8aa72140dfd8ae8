"""Saves the model of a training, and what to do when a run fails near its end."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config.files import is_disk_problem, staged_files, why_not_written
from memfit.errors import (
    DeviceLostError,
    LossError,
    RankLostError,
    RunStoppedError,
    SaveError,
    StepMemoryError,
)
from memfit.i18n import t
from memfit.records.results import OutputClaim
from memfit.records.scoring import Scoring, keep_scoring
from memfit.run.resume import resume_command

if TYPE_CHECKING:
    from memfit.training.trainer import BudgetTrainer


def save_model(
    trainer: BudgetTrainer, target: Path, scoring: Scoring, weights: dict[str, Any] | None = None
) -> None:
    """Saves the best model as pipeline() reads it: adapters merged, tokenizer beside it.

    `weights` are all weights of a model that is divided among the ranks.
    """
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    adapted = hasattr(model, "merge_and_unload")
    if adapted:
        trainer.masters.widen()
        model = model.merge_and_unload()
    tokenizer: Any = trainer.processing_class
    with staged_files(target) as folder:
        if adapted or not trainer.masters.export(folder):
            best = trainer.state.best_model_checkpoint
            checkpoint = trainer.checkpoints.held()
            if best and trainer.args.load_best_model_at_end:
                checkpoint = Path(best)
            if adapted or checkpoint is None or not _linked(checkpoint, folder):
                model.save_pretrained(folder, state_dict=weights)
        keep_scoring(folder / "config.json", scoring)
        for file in folder.glob("*.safetensors"):
            # Written as a private file; the result should be as readable as the rest of it.
            file.chmod((folder / "config.json").stat().st_mode)
        tokenizer.save_pretrained(folder)
        trainer.state.save_to_json(str(folder / "trainer_state.json"))


def _linked(checkpoint: Path, folder: Path) -> bool:
    """Gives the files of a checkpoint's model a second name. Returns whether that worked.

    Nothing is written twice. Where the disk has no links the model is saved once more.
    """
    weights = checkpoint / "model.safetensors"
    config = checkpoint / "config.json"
    if not weights.is_file() or weights.is_symlink() or not config.is_file():
        return False
    try:
        shutil.copyfile(config, folder / config.name)
        os.link(weights, folder / weights.name)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def model_saved_on_failure(
    trainer: BudgetTrainer, claim: OutputClaim, scoring: Scoring, *, ended: bool = False
) -> Iterator[None]:
    """Saves the model of a training that has `ended` or done all steps, if the block fails."""
    try:
        yield
    except (LossError, DeviceLostError):
        raise  # there is no model worth saving, or nothing to read it from
    except Exception as error:
        # Of a divided model all ranks have a part, and this may be one rank's failure.
        is_whole = trainer.is_world_process_zero() and not trainer.setup.sharded
        saved = False
        if is_whole and (ended or trainer.is_trained):
            with contextlib.suppress(Exception):  # what went wrong first says more
                save_model(trainer, claim.path, scoring)
                saved = True
        if not saved:
            raise
        if isinstance(error, RunStoppedError):
            error.model_in = claim.path
            raise
        what = f"{type(error).__name__}: {error}"
        if is_disk_problem(error):
            what = _not_written(error, claim)
        stopped = RunStoppedError(what, _last_good(claim))
        stopped.model_in = claim.path
        raise stopped from error


@contextlib.contextmanager
def command_in_errors(claim: OutputClaim) -> Iterator[None]:
    """Adds the command that goes on to the errors that stop a run."""
    try:
        yield
    except RunStoppedError as error:
        if isinstance(error, RankLostError) and claim.kept:
            error.last_good = _last_good(claim)
        raise _resumable(error, claim) from error
    except Exception as error:
        if not is_disk_problem(error):
            raise
        stopped = SaveError(_not_written(error, claim), _last_good(claim))
        raise _resumable(stopped, claim) from error


def _resumable(error: RunStoppedError, claim: OutputClaim) -> RunStoppedError:
    error.resume_with = resume_command(claim.path)
    if isinstance(error, StepMemoryError):
        error.resume_with += f" --budget {error.smaller_budget}"
    if isinstance(error, LossError):
        error.resume_with += " --on-nan skip"
    return error


def _not_written(error: Exception, claim: OutputClaim) -> str:
    return t("the run could not be written: {why}", why=why_not_written(error, claim.path))


def _last_good(claim: OutputClaim) -> Path | None:
    from memfit.training.checkpoints import newest_listed

    return newest_listed(claim.folder.checkpoints_dir)
