"""What a run keeps in its folder to be resumed from, and what may change when it is."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.announce import line
from memfit.config import RunConfig
from memfit.errors import OutputError
from memfit.messages import t
from memfit.results import RunFolder

if TYPE_CHECKING:
    from memfit.runtime.checkpoint import Search

# It changes how the run is done, or what happens where it could not have gone on.
RESUME_MAY_CHANGE = ("budget:", "output_dir:", "on_nan:")


def last_checkpoint(folder: RunFolder, say: Callable[[Any], None]) -> Search:
    """Where a resumed run goes on; damaged checkpoints are named, never quietly started over."""
    from memfit.runtime.checkpoint import newest_good, nothing_good
    from memfit.runtime.scratch import tidy

    tidy(folder.checkpoints_dir)
    found = newest_good(folder.checkpoints_dir)
    if found.good is None and found.passed_over:
        why = nothing_good(folder.checkpoints_dir, found)
        raise OutputError(t("{why}; start anew in another --output-dir", why=why))
    for note in found.notes():
        say(line("note", note))
    return found


def resumed_config(
    output_dir: str, config: str | os.PathLike[str] | None, options: dict[str, Any]
) -> RunConfig:
    """The stored configuration; what is given beside it may not say anything else."""
    stored_file = RunFolder(Path(output_dir)).config
    if not stored_file.is_file():
        raise OutputError(
            t(
                "there is no run to resume in {folder}; leave --resume out to start one",
                folder=output_dir,
            )
        )
    stored = RunConfig.from_toml(stored_file)
    given = with_absolute_paths(RunConfig.build(config or stored_file, **options))
    changed = [
        difference
        for difference in given.differences(stored)
        if not difference.startswith(RESUME_MAY_CHANGE)
    ]
    if changed:
        raise OutputError(
            t(
                "--resume continues the run in {folder} as it was begun, but now {changed}; "
                "leave that out, or start anew in another --output-dir",
                folder=output_dir,
                changed="; ".join(changed),
            )
        )
    return given


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Local paths in full, so that run.toml reruns from anywhere."""
    data, model = config.data, config.model
    checked = _absolute(data.validation_file) if data.validation_file else None
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, path=_absolute(data.path), validation_file=checked),
        model=dataclasses.replace(model, model=_absolute(model.model)),
        plan=None if config.plan is None else os.path.abspath(Path(config.plan).expanduser()),
        output_dir=os.path.abspath(Path(config.output_dir).expanduser())
        if config.output_dir
        else None,
    )


def _absolute(path: str) -> str:
    """A hub id stays as it is."""
    local = Path(path).expanduser()
    return os.path.abspath(local) if local.exists() else path
