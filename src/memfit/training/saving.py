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
import copy
import dataclasses
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from memfit.config.files import why_not_written
from memfit.config.training_fields import SECRET_FIELDS
from memfit.errors import DeviceLostError, MemfitError, OutputError, RunStoppedError, SaveError
from memfit.i18n import N_, t
from memfit.memory.out_of_memory import is_out_of_memory, let_go
from memfit.training.checkpoints import (
    CheckpointSearch,
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
from memfit.training.guard.updates import unwrapped
from memfit.units import format_bytes
from memfit.waiting import doing

if TYPE_CHECKING:
    from memfit.training.trainer import BudgetTrainer

_BY_SAFETENSORS = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
        torch.bfloat16, torch.float32, torch.float64, torch.uint16, torch.uint32, torch.uint64,
        torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
    }
)  # fmt: skip


_Loaded = TypeVar("_Loaded")


def check_savable(trainer: BudgetTrainer, *, saves_model: bool = False) -> int:
    """Returns the bytes of a checkpoint, 0 if none is to be written.

    SaveError names what cannot be saved; OutputError says that a checkpoint has no room, or the
    whole model, if the caller saves it in the end.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    writes_none = trainer.args.save_strategy == SaveStrategy.NO
    exported = isinstance(model, PreTrainedModel) or hasattr(model, "peft_config")
    if writes_none and not exported:
        return 0  # how such a model is kept in the end is its owner's business
    with _named(N_("the model")):
        size_bytes = _model_bytes(model, exported=exported)
    folder = Path(str(trainer.args.output_dir))
    if saves_model:  # adapters are merged into it
        whole = (*model.parameters(), *model.buffers())
        _check_room(folder, sum(tensor.nbytes for tensor in whole), _NO_ROOM_FOR_MODEL)
    if writes_none:
        return 0
    for part, content in _pickled_parts(trainer):
        with _named(part):
            size_bytes += _serialised_bytes(content())
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            with _named(N_("the state of the callback {name}"), name=type(callback).__name__):
                size_bytes += len(json.dumps(callback.state()))
    with _named(N_("the Trainer's state")):
        size_bytes += len(json.dumps(dataclasses.asdict(trainer.state)))
    _check_room(folder, size_bytes, _NO_ROOM_FOR_CHECKPOINT)
    return size_bytes


def _pickled_parts(trainer: BudgetTrainer) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the parts that the Trainer pickles, by their names in messages."""
    yield N_("what the training arguments hold"), lambda: trainer.args
    if trainer.args.save_only_model:
        return
    for part, owner in (
        (N_("the optimizer's state"), trainer.optimizer),
        (N_("the learning rate schedule's state"), trainer.lr_scheduler),
        (N_("the loss scale"), getattr(trainer.accelerator, "scaler", None)),
    ):
        if owner is not None:
            yield part, owner.state_dict
    states = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    yield N_("the state of the random numbers"), lambda: states


def _model_bytes(model: nn.Module, *, exported: bool) -> int:
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
    if not exported:  # save_pretrained handles a weight with two names, safetensors does not
        owners: dict[nn.Parameter, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if (owner := owners.setdefault(parameter, name)) != name:
                raise ValueError(
                    f"{owner} and {name} are one weight, and the model is no PreTrainedModel that "
                    "knows it"
                )
    return sum(tensor.nbytes for _, tensor in named)


def _serialised_bytes(content: Any) -> int:
    """Returns how large torch.save's file would be."""
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


@contextmanager
def _named(part: str, **fields: str) -> Iterator[None]:
    """An error inside names this part of the checkpoint."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        what = t(
            "{what} cannot be saved, so no training was begun: {reason}; mend it, or write "
            "no checkpoints with --save-strategy no",
            what=t(part, **fields),
            reason=_first_line(error),
        )
        raise SaveError(what) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(" .:")


_NO_ROOM_FOR_MODEL = N_(
    "the trained model takes {needs} and {folder} has {free} free, so no training was begun; make "
    "room, or name another --output-dir"
)

_NO_ROOM_FOR_CHECKPOINT = N_(
    "a checkpoint takes {needs} and {folder} has {free} free, so no training was begun; make room, "
    "name another --output-dir, or write no checkpoints with --save-strategy no"
)


def _check_room(folder: Path, size_bytes: int, otherwise: str) -> None:
    there = next(one for one in (folder, *folder.resolve().parents) if one.exists())
    free_bytes = shutil.disk_usage(there).free
    if size_bytes > free_bytes:
        needs, free = format_bytes(size_bytes), format_bytes(free_bytes)
        raise OutputError(otherwise, folder=there, needs=needs, free=free)


_STATE_FILE = "trainer_state.json"

# After one of these every further call to the device fails, whatever it is.
_DEVICE_IS_GONE = (
    "unspecified launch failure", "device-side assert", "illegal memory access",
    "illegal instruction", "misaligned address", "device lost", "gpu is lost", "unknown error",
    "uncorrectable ecc", "hardware stack error", "driver shutting down", "launch timed out",
    "devices unavailable", "no cuda-capable device",
)  # fmt: skip


class CheckpointSaver:
    """The checkpoints of one trainer: written whole, rotated, found again and loaded.

    `make_room` is called when a checkpoint found no memory on the device; it is then written once
    more. Whatever a checkpoint needs there is worth more than what makes steps faster.
    """

    def __init__(
        self, trainer: BudgetTrainer, make_room: Callable[[], None], *, saves_model: bool = False
    ) -> None:
        self._trainer = trainer
        self._make_room = make_room
        self._saves_model = saves_model
        self.size_bytes = 0
        """Bytes of one checkpoint on disk, known before the first step; 0 if none is written."""
        self.writing = False
        self.push_due = False
        """Whether the checkpoint is to be uploaded once it has its name."""
        self.loading_best = False
        """Whether the weights are half replaced by the best ones."""
        self._last_good: Path | None = None
        self._damaged: tuple[Path, ...] = ()
        self._written: Path | None = None
        """The checkpoint this process wrote last."""

    @property
    def last_good(self) -> Path | None:
        """The last checkpoint this run wrote or continued from; else the newest there is."""
        return self._last_good or newest_listed(str(self._trainer.args.output_dir))

    def check(self) -> None:
        """Raises what would go wrong at the first save; notes how large a checkpoint will be."""
        if self._trainer.args.should_save:
            self.size_bytes = check_savable(self._trainer, saves_model=self._saves_model)

    # ---- writing ----

    def save(self, folder: Path, write: Callable[[], None], check: Callable[[], None]) -> Path:
        """Has a checkpoint written by the Trainer; `check` raises to keep it from being written."""
        trainer, state = self._trainer, self._trainer.state
        final = folder / f"checkpoint-{state.global_step}"
        best_before = state.best_model_checkpoint
        with doing(t("writing a checkpoint …")):
            self._with_room(check)
            try:
                self._with_room(lambda: self._write_beside(final, write))
                if trainer.args.should_save:
                    write_manifest(place_for(final))
                    publish(final)
            except BaseException as error:
                self._written = None
                state.best_model_checkpoint = best_before
                with contextlib.suppress(OSError):
                    tidy(final.parent)
                if isinstance(error, MemfitError) or not isinstance(error, Exception):
                    raise
                what = t(
                    "{name} could not be written: {reason}",
                    name=final.name,
                    reason=why_not_written(error, final.parent),
                )
                raise SaveError(what, self.last_good) from error
            self._written = final  # by one rank for all: they hold the same weights
            if trainer.args.should_save:
                self._last_good = final
                self._damaged = tuple(item for item in self._damaged if item != final)
                self._rotate(final)
            trainer.accelerator.wait_for_everyone()
        return final

    def folder_for(self, folder: str) -> str:
        """Where the Trainer writes what belongs into this folder: beside it, until it is whole."""
        return str(place_for(Path(folder) / "x").parent) if self.writing else folder

    def _with_room(self, work: Callable[[], None]) -> None:
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            let_go(error)
        self._make_room()
        return work()

    def _write_beside(self, final: Path, write: Callable[[], None]) -> None:
        """Makes the Trainer write everything into the folder of unfinished checkpoints."""
        trainer, state = self._trainer, self._trainer.state
        if trainer.args.should_save:
            tidy(final.parent)
        trainer.accelerator.wait_for_everyone()
        self.writing, self.push_due = True, False
        # The CRC takes as long as the writing. The manifest has a stronger checksum of each file.
        crc = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            write()
        finally:
            self.writing = False
            torch.serialization.set_crc32_options(crc)
        trainer.accelerator.wait_for_everyone()  # every rank has written its random state
        best = final.with_name(f"checkpoint-{state.best_global_step}")
        if best.is_dir() or best == final:  # its path after the renaming, on every rank
            state.best_model_checkpoint = str(best)
            if trainer.args.should_save:
                state.save_to_json(str(place_for(final) / _STATE_FILE))

    def _rotate(self, newest: Path) -> None:
        best, limit = self._trainer.state.best_model_checkpoint, self._trainer.args.save_total_limit
        rotate(newest.parent, limit, newest=newest, best=best, damaged=self._damaged)

    # ---- going on ----

    def continue_from(self, wanted: str | Path | bool | CheckpointSearch | None) -> Path | None:
        """Removes unfinished checkpoints, checks the others, returns the one to load."""
        folder = Path(str(self._trainer.args.output_dir))
        if self._trainer.args.should_save:
            tidy(folder)
        self._last_good, self._damaged, self._written = None, (), None
        if wanted is None or wanted is False:
            return None
        if wanted is True:
            wanted = newest_good(folder)
            for note in wanted.notes() if wanted.good is not None else ():
                warnings.warn(note, UserWarning, stacklevel=3)
        if isinstance(wanted, CheckpointSearch):
            self._damaged = tuple(path for path, _ in wanted.passed_over)
        self._last_good = checkpoint_to_resume(folder, wanted)
        return self._last_good

    def load_state(self, load: Callable[[], _Loaded]) -> _Loaded:
        """Loads the state; the best checkpoint is looked up beside this one, not by its path."""
        if self._last_good is None:
            return load()
        with reading(str(self._last_good)):
            loaded = load()
        state = self._trainer.state
        best = self._last_good.with_name(f"checkpoint-{state.best_global_step}")
        found = best.is_dir() and not best.is_symlink()
        state.best_model_checkpoint = str(best) if found else None
        # A process killed between its last save and the rotation after it left one too many,
        # and where that was the last step no further save would see to it.
        is_newest = self._last_good == newest_listed(self._last_good.parent)
        if self._trainer.args.should_save and is_newest:
            self._rotate(self._last_good)
        return loaded

    # ---- the weights the model holds ----

    def held(self) -> Path | None:
        """The checkpoint whose weights the model holds: written here, and no step since.

        None where the weights that train are not those that are saved (schedule-free optimizers).
        """
        two_sets = callable(getattr(unwrapped(self._trainer.optimizer), "eval", None))
        written = self._written
        if written is None or two_sets or step_of(written) != self._trainer.state.global_step:
            return None
        return written

    def load_best(self, load: Callable[[], None], load_masters: Callable[[Path], None]) -> None:
        """Loads the best weights, from a whole checkpoint, unless the model holds them already."""
        state, held = self._trainer.state, self.held()
        if held is not None and str(held) == state.best_model_checkpoint:
            return
        self.loading_best = True
        self._written = None
        self._trainer.accelerator.wait_for_everyone()
        with doing(t("loading the best model …")):
            best = Path(str(state.best_model_checkpoint))
            if problem := damage(best):
                warnings.warn(
                    t(
                        "the best model cannot be loaded, {best} is damaged: {problem}; the "
                        "weights of the last step, {step}, are kept instead",
                        best=best,
                        problem=problem,
                        step=state.global_step,
                    ),
                    UserWarning,
                    stacklevel=2,
                )
                state.best_model_checkpoint = None
            else:
                with same_parameters(self._trainer.model):
                    load()
                load_masters(best)
        self.loading_best = False

    # ---- the end ----

    @contextlib.contextmanager
    def ending_in_words(self) -> Iterator[None]:
        """An error inside names the last good checkpoint; a lost device is not used again."""
        try:
            yield
        except RunStoppedError as error:
            error.last_good = error.last_good or self.last_good
            raise
        except (RuntimeError, MemoryError) as error:
            step = self._trainer.state.global_step
            if is_out_of_memory(error):
                what = t(
                    "out of memory beside step {step}, after memory was given back and the "
                    "call repeated: {failed}; give it a larger --budget, or close what "
                    "else uses the memory",
                    step=step + 1,
                    failed=let_go(error),
                )
                raise RunStoppedError(what, self.last_good) from None
            if not is_device_lost(error):
                raise
            reason = str(error).strip().splitlines()[0]
            what = t(
                "the GPU no longer answers, after step {step}: {reason}", step=step, reason=reason
            )
            raise DeviceLostError(what, self.last_good) from error


def is_device_lost(error: BaseException) -> bool:
    """Whether the process can do nothing more with its GPU; out of memory is another matter.

    Torch's advice below the first line of any CUDA error names device-side assertions.
    """
    text = str(error).strip().partition("\n")[0].lower()
    return any(name in text for name in ("cuda", "hip", "cudnn", "cublas", "device lost")) and any(
        reason in text for reason in _DEVICE_IS_GONE
    )


@contextlib.contextmanager
def arguments_as_given(trainer: Any) -> Iterator[None]:
    """Inside, `trainer.args` are pickled as the user gave them, without tokens."""
    used, written = trainer.args, copy.copy(trainer.user_args)
    for name in SECRET_FIELDS:
        if getattr(written, name, None) is not None:
            setattr(written, name, None)

    class AsGiven(type(used)):  # type: ignore[misc]
        def __reduce_ex__(self, _: Any) -> Any:
            return written.__reduce_ex__(1)  # later protocols insist on the object's own class

    trainer.args = copy.copy(used)
    trainer.args.__class__ = AsGiven
    try:
        yield
    finally:
        trainer.args = used


@contextlib.contextmanager
def same_parameters(model: nn.Module | None) -> Iterator[None]:
    """Inside, weights are loaded into the existing parameters, in their types.

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
def reading(checkpoint: str | None) -> Iterator[None]:
    """An error inside names the checkpoint that is read."""
    try:
        yield
    except (MemfitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise OutputError(
            "cannot go on from {path}: {reason}", path=str(checkpoint), reason=_first_line(error)
        ) from error
