"""A checkpoint serialised before the first step, without being written.

torch.save runs over every part as it will at the first save, into a file that only counts; the
bytes of tensors are left out (`torch.serialization.skip_data`), so nothing is copied from the
device and BERT-Large takes some hundredths of a second. What cannot be saved is known then, and
how large a checkpoint will be.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from memfit.errors import OutputError, SaveError
from memfit.messages import N_, t
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.runtime.saving import SafeSaving

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
