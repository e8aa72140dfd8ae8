"""Saves checkpoints that are good or not there at all, and checks before step 1 that it can.

torch.save runs over every part as it will at the first save, into a file that only counts; the
bytes of tensors are left out (`torch.serialization.skip_data`), so nothing is copied from the
device and BERT-Large takes some hundredths of a second. What cannot be saved is known then, and
how large a checkpoint will be.

written beside  ->  listed with checksums  ->  on the disk  ->  renamed  ->  older ones go

A save that fails ends the run. Going on would be worse: the best model could no longer be
loaded at the end, and hours of work would have nowhere to go; what was saved before is intact,
and one command goes on from there once there is room.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from memfit.config.files import why_not_written
from memfit.config.training_fields import SECRET_FIELDS
from memfit.errors import DeviceLostError, MemfitError, OutputError, RunStoppedError, SaveError
from memfit.memory.out_of_memory import is_out_of_memory, let_go
from memfit.text import N_, doing, t
from memfit.training.checkpoints import (
    Search,
    checkpoint_to_resume,
    damage,
    newest_good,
    newest_listed,
    place_for,
    publish,
    rotate,
    step_of,
    tidy,
    write_manifest,
)
from memfit.training.loaders import EffectiveLoading
from memfit.units import format_bytes

_BY_SAFETENSORS = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
        torch.bfloat16, torch.float32, torch.float64, torch.uint16, torch.uint32, torch.uint64,
        torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
    }
)  # fmt: skip


def check_savable(trainer: SafeSaving) -> int:
    """The bytes of a checkpoint, 0 where none is to be written.

    SaveError names what cannot be saved; OutputError says that a checkpoint has no room.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    writes_none = trainer.args.save_strategy == SaveStrategy.NO
    if writes_none and not _is_exported(model):
        return 0  # how such a model is kept in the end is its owner's business
    with _named("model"):
        size_bytes = _model_bytes(model)
    if writes_none:
        return 0
    for part, content in _parts(trainer):
        with _named(part):
            size_bytes += _serialised_bytes(content())
    size_bytes += _state_bytes(trainer)
    _check_room(Path(str(trainer.args.output_dir)), size_bytes)
    return size_bytes


def _parts(trainer: SafeSaving) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What the Trainer pickles, by the name it has in a sentence."""
    yield "arguments", lambda: trainer.args
    if trainer.args.save_only_model:
        return
    optimizer, schedule = trainer.optimizer, trainer.lr_scheduler
    if optimizer is not None:
        yield "optimizer", optimizer.state_dict
    if schedule is not None:
        yield "schedule", schedule.state_dict
    scaler = getattr(trainer.accelerator, "scaler", None)
    if scaler is not None:
        yield "scaler", scaler.state_dict
    yield "random", lambda: [random.getstate(), np.random.get_state(), torch.get_rng_state()]


def _state_bytes(trainer: SafeSaving) -> int:
    """The Trainer's own state, with what callbacks keep in it."""
    kept = [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
    size_bytes = 0
    for callback in kept:
        with _named("callback", name=type(callback).__name__):
            size_bytes += len(json.dumps(callback.state()))
    with _named("state"):
        size_bytes += len(json.dumps(dataclasses.asdict(trainer.state)))
    return size_bytes


def _model_bytes(model: nn.Module) -> int:
    """Weights as safetensors writes them, beside a configuration that becomes JSON."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        config.to_json_string()
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if tensor.dtype not in _BY_SAFETENSORS:
            raise TypeError(f"{name} is of {tensor.dtype}, which safetensors does not know")
    if hasattr(model, "peft_config"):  # of adapters only what learns is saved
        return sum(tensor.nbytes for _, tensor in named if tensor.requires_grad)
    if not _is_exported(model):
        _check_nothing_shared(model)
    return sum(tensor.nbytes for _, tensor in named)


def _is_exported(model: nn.Module) -> bool:
    """Whether it is saved by `save_pretrained`."""
    return isinstance(model, PreTrainedModel) or hasattr(model, "peft_config")


def _check_nothing_shared(model: nn.Module) -> None:
    """Two names of one weight: save_pretrained knows such pairs, safetensors alone refuses them."""
    owners: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in owners:
            raise ValueError(
                f"{owners[parameter]} and {name} are one weight, and the model is no "
                "PreTrainedModel that knows it"
            )
        owners[parameter] = name


def _serialised_bytes(content: Any) -> int:
    """How large the file would be."""
    counter = _Counter()
    with torch.serialization.skip_data():
        torch.save(content, counter)  # type: ignore[arg-type]  # it writes and seeks, no more
    return counter.end


class _Counter:
    """A file that keeps nothing but its size."""

    def __init__(self) -> None:
        self._position = 0
        self.end = 0

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self.seek(count, os.SEEK_CUR)
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.end}[whence]
        self._position = start + offset
        self.end = max(self.end, self._position)
        return self._position

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        pass


_PARTS = {
    "model": N_("the model"),
    "arguments": N_("what the training arguments hold"),
    "optimizer": N_("the optimizer's state"),
    "schedule": N_("the learning rate schedule's state"),
    "scaler": N_("the loss scale"),
    "random": N_("the state of the random numbers"),
    "callback": N_("the state of the callback {name}"),
    "state": N_("the Trainer's state"),
}


@contextmanager
def _named(part: str, **fields: str) -> Iterator[None]:
    """Whatever goes wrong inside is the fault of this part."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        lines = (str(error).strip() or type(error).__name__).splitlines()
        what = t(_PARTS[part], **fields)
        raise SaveError(
            t(
                "{what} cannot be saved, so no training was begun: {reason}; mend it, or write "
                "no checkpoints with --save-strategy no",
                what=what,
                reason=lines[0].rstrip(" .:"),
            )
        ) from error


def _check_room(folder: Path, size_bytes: int) -> None:
    there = next(one for one in (folder, *folder.resolve().parents) if one.exists())
    free_bytes = shutil.disk_usage(there).free
    if size_bytes > free_bytes:
        sizes = {"needs": format_bytes(size_bytes), "free": format_bytes(free_bytes)}
        raise OutputError(
            t(
                "a checkpoint takes {needs} and {folder} has {free} free, so no training was "
                "begun; make room, name another --output-dir, or write no checkpoints with "
                "--save-strategy no",
                folder=there,
                **sizes,
            )
        )


_STATE_FILE = "trainer_state.json"

# After one of these every further call to the device fails, whatever it is.
_DEVICE_IS_GONE = (
    "unspecified launch failure", "device-side assert", "illegal memory access",
    "illegal instruction", "misaligned address", "device lost", "gpu is lost", "unknown error",
    "uncorrectable ecc", "hardware stack error", "driver shutting down", "launch timed out",
    "devices unavailable", "no cuda-capable device",
)  # fmt: skip


class SafeSaving(EffectiveLoading):
    """What BudgetTrainer changes in how checkpoints are written, removed and read."""

    user_args: transformers.TrainingArguments
    _last_good: Path | None = None
    _writing: bool = False
    _push_due: bool = False
    _damaged: tuple[Path, ...] = ()
    _written: Path | None = None
    """The checkpoint this process wrote last."""
    seals_last_later: bool = False
    """The last step's checkpoint gets its checksums and its name beside what follows the training;
    `settle_checkpoint` waits for them."""
    _sealing: Future[None] | None = None

    def before_saving(self) -> None:
        """Called before each checkpoint; raise to keep one from being written."""

    @property
    def last_good_checkpoint(self) -> Path | None:
        """Written or continued from by this run; else the newest that is there."""
        return self._last_good or newest_listed(str(self.args.output_dir))

    def make_room(self) -> None:
        """Called when a checkpoint found no memory on the device; it is then written once more."""

    def _with_room(self, work: Callable[[], None]) -> None:
        """Whatever a checkpoint needs on the device is worth more than what makes steps faster."""
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            let_go(error)
        self.make_room()
        return work()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with doing(t("writing a checkpoint …")):
            self._save_whole(model, trial)

    def _save_whole(self, model: nn.Module, trial: Any) -> None:
        self.settle_checkpoint()
        self._with_room(self.before_saving)
        final = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        best_before = self.state.best_model_checkpoint
        with self._undone_if_it_fails(final, best_before):
            self._with_room(lambda: self._write_beside(final, model, trial))
        if self.args.should_save:
            self._written = final
            last = self.state.global_step >= self.state.max_steps
            if self.seals_last_later and last and not self._push_due:
                pool = ThreadPoolExecutor(1, "memfit-sealing")
                speaking = contextvars.copy_context()  # an error is said in the run's language
                self._sealing = pool.submit(speaking.run, self._seal, final, best_before)
                pool.shutdown(wait=False)
            else:
                self._seal(final, best_before)
        self.accelerator.wait_for_everyone()
        if self._push_due:
            self._push_from_checkpoint(str(final))

    def _seal(self, final: Path, best_before: str | None) -> None:
        """Lists the files with their checksums, brings them to the disk, gives the folder its name.

        Needs no device and, for most of its time, no interpreter.
        """
        with self._undone_if_it_fails(final, best_before):
            write_manifest(place_for(final))
            publish(final)
        self._last_good = final
        self._damaged = tuple(item for item in self._damaged if item != final)
        self._rotate(final)

    @contextlib.contextmanager
    def _undone_if_it_fails(self, final: Path, best_before: str | None) -> Iterator[None]:
        """Removes what a failed save left, and says why it failed."""
        try:
            yield
        except BaseException as error:
            self._written = None
            self.state.best_model_checkpoint = best_before
            with contextlib.suppress(OSError):
                tidy(final.parent)
            if isinstance(error, MemfitError) or not isinstance(error, Exception):
                raise
            what = t(
                "{name} could not be written: {reason}",
                name=final.name,
                reason=why_not_written(error, final.parent),
            )
            raise SaveError(what, self.last_good_checkpoint) from error

    def settle_checkpoint(self) -> None:
        """Waits until the last checkpoint has its name. Raises, each time, why it has none."""
        if self._sealing is not None:
            self._sealing.result()

    def _rotate(self, newest: Path) -> None:
        best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
        rotate(newest.parent, limit, newest=newest, best=best, damaged=self._damaged)

    def _write_beside(self, final: Path, model: nn.Module, trial: Any) -> None:
        """All the Trainer writes, in the place of what is unfinished."""
        if self.args.should_save:
            tidy(final.parent)
        self.accelerator.wait_for_everyone()
        self._writing, self._push_due = True, False
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._writing = False
        self.accelerator.wait_for_everyone()  # every rank has written its random state
        if self.args.should_save:
            unfinished = place_for(final)
            self._note_best(final, unfinished)

    def _note_best(self, final: Path, unfinished: Path) -> None:
        """The state names the best checkpoint by the place it will have."""
        named = final.with_name(f"checkpoint-{self.state.best_global_step}")
        if named.is_dir() or named == final:
            self.state.best_model_checkpoint = str(named)
            self.state.save_to_json(str(unfinished / _STATE_FILE))

    def _get_output_dir(self, trial: Any) -> str:
        folder = str(super()._get_output_dir(trial))
        return str(place_for(Path(folder) / "x").parent) if self._writing else folder

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploaded in the background, so only under the name that stays."""
        if self._writing:
            self._push_due = True
            return
        with self._arguments_as_given():
            super()._push_from_checkpoint(checkpoint_folder)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        with self._arguments_as_given():
            super()._save(*args, **kwargs)

    @contextlib.contextmanager
    def _arguments_as_given(self) -> Iterator[None]:
        """Whoever pickles `self.args` inside writes the user's own, and no token."""
        used = self.args
        self.args = _pickled_as(used, without_secrets(self.user_args))
        try:
            yield
        finally:
            self.args = used

    # ---- going on ----

    def _continued_from(self, wanted: str | Path | bool | Search | None) -> Path | None:
        """The checkpoint to load, once what was cut off is removed and the others are looked at."""
        folder = Path(str(self.args.output_dir))
        if self.args.should_save:
            tidy(folder)
        self._last_good, self._damaged, self._written = None, (), None
        if wanted is None or wanted is False:
            return None
        if wanted is True:
            wanted = newest_good(folder)
            for note in wanted.notes() if wanted.good is not None else ():
                warnings.warn(note, UserWarning, stacklevel=3)
        if isinstance(wanted, Search):
            self._damaged = tuple(path for path, _ in wanted.passed_over)
        self._last_good = checkpoint_to_resume(folder, wanted)
        return self._last_good

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        with _reading(resume_from_checkpoint), _same_parameters(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with _reading(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _reading(checkpoint):
            super()._load_rng_state(checkpoint)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        """No stored path is followed: the best checkpoint lies beside the one continued from."""
        with _reading(str(self._last_good)) if self._last_good else contextlib.nullcontext():
            started = super()._init_training_state(*args, **kwargs)
        if self._last_good is not None:
            best = self._last_good.with_name(f"checkpoint-{self.state.best_global_step}")
            found = best.is_dir() and not best.is_symlink()
            self.state.best_model_checkpoint = str(best) if found else None
            # A process killed between its last save and the rotation after it left one too many,
            # and where that was the last step no further save would see to it.
            if self.args.should_save and self._last_good == newest_listed(self._last_good.parent):
                self._rotate(self._last_good)
        return started

    def held_checkpoint(self) -> Path | None:
        """The checkpoint whose weights the model holds: written here, and no step since.

        None where the weights that train are not those that are saved (schedule-free optimizers).
        """
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        two_sets = callable(getattr(inner, "eval", None))
        written = self._written
        if written is None or two_sets or step_of(written) != self.state.global_step:
            return None
        return written

    def _load_best_model(self) -> None:
        """Only from a checkpoint that is whole, and not where the model holds it already."""
        held = self.held_checkpoint()
        if held is not None and str(held) == self.state.best_model_checkpoint:
            return
        self._written = None
        self.settle_checkpoint()
        with doing(t("loading the best model …")):
            self._load_whole()

    def _load_whole(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        if problem := damage(best):
            warnings.warn(
                t(
                    "the best model cannot be loaded, {best} is damaged: {problem}; the "
                    "weights of the last step, {step}, are kept instead",
                    best=best,
                    problem=problem,
                    step=self.state.global_step,
                ),
                UserWarning,
                stacklevel=2,
            )
            self.state.best_model_checkpoint = None
            return
        with _same_parameters(self.model):
            super()._load_best_model()

    @contextlib.contextmanager
    def _ending_in_words(self) -> Iterator[None]:
        """What ends the run names the last good checkpoint; of a lost device nothing is asked."""
        try:
            yield
        except RunStoppedError as error:
            error.last_good = error.last_good or self.last_good_checkpoint
            raise
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                said = {"step": self.state.global_step + 1, "failed": let_go(error)}
                what = t(
                    "out of memory beside step {step}, after memory was given back and the "
                    "call repeated: {failed}; give it a larger --budget, or close what "
                    "else uses the card",
                    **said,
                )
                raise RunStoppedError(what, self.last_good_checkpoint) from None
            if not is_device_lost(error):
                raise
            reason = str(error).strip().splitlines()[0]
            raise DeviceLostError(
                t(
                    "the GPU no longer answers, after step {step}: {reason}",
                    step=self.state.global_step,
                    reason=reason,
                ),
                self.last_good_checkpoint,
            ) from error


def is_device_lost(error: BaseException) -> bool:
    """Whether the process can do nothing more with its GPU; out of memory is another matter."""
    text = str(error).lower()
    return any(name in text for name in ("cuda", "hip", "cudnn", "cublas", "device lost")) and any(
        reason in text for reason in _DEVICE_IS_GONE
    )


def without_secrets(args: transformers.TrainingArguments) -> transformers.TrainingArguments:
    """What may be written to a file: a copy without tokens."""
    copied = copy.copy(args)
    for name in SECRET_FIELDS:
        if getattr(copied, name, None) is not None:
            setattr(copied, name, None)
    return copied


def _pickled_as(
    args: transformers.TrainingArguments, written: transformers.TrainingArguments
) -> transformers.TrainingArguments:
    """A copy to work with, in whose place others are pickled."""

    class AsGiven(type(args)):  # type: ignore[misc]
        def __reduce_ex__(self, _: Any) -> Any:
            return written.__reduce_ex__(1)  # later protocols insist on the object's own class

    copied = copy.copy(args)
    copied.__class__ = AsGiven
    return copied


@contextlib.contextmanager
def _same_parameters(model: nn.Module | None) -> Iterator[None]:
    """Weights are loaded into the parameters that are there, in the type these have.

    peft replaces adapters by float32 ones while it loads them (`autocast_adapter_dtype`, which
    the Trainer leaves on): the optimizer would know nothing of these.
    """
    assert model is not None
    before = [
        (module, name, parameter, parameter.data)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    yield
    with torch.no_grad():
        for module, name, parameter, data in before:
            loaded = module._parameters[name]
            if loaded is not None and (loaded is not parameter or loaded.dtype != data.dtype):
                parameter.data = data.copy_(loaded)
                module._parameters[name] = parameter


@contextlib.contextmanager
def _reading(checkpoint: str | None) -> Iterator[None]:
    try:
        yield
    except (MemfitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        lines = (str(error).strip() or type(error).__name__).splitlines()
        said = {"path": checkpoint, "reason": lines[0].rstrip(" .:")}
        raise OutputError(t("cannot go on from {path}: {reason}", **said)) from error
