"""Goes on with a run that a folder holds: its settings, its last checkpoint, its result."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config import RunConfig
from memfit.errors import MemfitError, OutputError
from memfit.records.results import RunFolder
from memfit.records.run_log import read_log
from memfit.report.terminal import fact_line

if TYPE_CHECKING:
    from memfit.memory.cards import CardPlace
    from memfit.training.checkpoints import CheckpointSearch

# These change how the run is done, or what happens where it could not have gone on.
RESUME_MAY_CHANGE = ("budget:", "gpus:", "output_dir:", "on_nan:", "plan.")


def is_begun(output_dir: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a run that can be resumed."""
    return RunFolder(Path(output_dir)).config.is_file()


def is_finished(output_dir: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a run that came to its end; its summary is written last."""
    return RunFolder(Path(output_dir)).summary.is_file()


def resumed_config(
    output_dir: str, config: str | os.PathLike[str] | None, options: dict[str, Any]
) -> RunConfig:
    """The stored configuration; options given beside it must agree with it."""
    stored_file = RunFolder(Path(output_dir)).config
    if not stored_file.is_file():
        raise OutputError(
            "there is no run to resume in {folder}; leave --resume out to start one",
            folder=output_dir,
        )
    stored = RunConfig.from_toml(stored_file)
    # A folder may come from somebody else: what it permits itself counts for nothing.
    asked_again = bool(options.get("trust_remote_code")) or (
        config is not None and Path(config).resolve() != stored_file.resolve()
    )
    if stored.model.trust_remote_code and not asked_again:
        raise OutputError(
            "the run in {folder} runs code that comes with its model, {model}; if you trust that "
            "code, say so again with --trust-remote-code",
            folder=output_dir,
            model=stored.model.model,
        )
    given = with_absolute_paths(RunConfig.build(config or stored_file, **options))
    changed = [
        difference
        for difference in given.differences(stored)
        if not difference.startswith(RESUME_MAY_CHANGE)
    ]
    if changed:
        raise OutputError(
            "--resume continues the run in {folder} as it was begun, but now {changed}; "
            "leave that out, or start anew in another --output-dir",
            folder=output_dir,
            changed="; ".join(changed),
        )
    return given


def resume_command(folder: Path) -> str:
    """The command that goes on with the run in a folder; code of its model is permitted again."""
    command = f"memfit train --resume --output-dir {shlex.quote(str(folder))}"
    with suppress(OSError, MemfitError):
        if RunConfig.from_toml(RunFolder(folder).config).model.trust_remote_code:
            command += " --trust-remote-code"
    return command


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Local paths in full, so that run.toml reruns from anywhere."""

    def absolute(path: str) -> str:
        local = Path(path).expanduser()
        return os.path.abspath(local) if local.exists() else path  # a hub id stays as it is

    data, model = config.data, config.model
    checked = absolute(data.validation_file) if data.validation_file else None
    return replace(
        config,
        data=replace(data, path=absolute(data.path), validation_file=checked),
        model=replace(model, model=absolute(model.model)),
        plan=None if config.plan is None else os.path.abspath(Path(config.plan).expanduser()),
        output_dir=os.path.abspath(Path(config.output_dir).expanduser())
        if config.output_dir
        else None,
    )


def stored_options(run: Mapping[str, Any]) -> tuple[dict[str, Any], str | None, CardPlace | None]:
    """The run a plan's file is for, as options, the card it was made for, and where that is."""
    from memfit.memory.cards import CardPlace

    options: dict[str, Any] = {}
    for key, value in run.items():
        if key in ("data", "model", "training") and isinstance(value, Mapping):
            options |= value
        elif key not in ("gpu", "place", "output_dir", "plan"):
            options[key] = value
    options.pop("trust_remote_code", None)  # asked for again, whoever made the file
    gpu, place = run.get("gpu"), run.get("place")
    there = CardPlace.read(place) if isinstance(place, Mapping) else None
    return options, None if gpu is None else str(gpu), there


def last_checkpoint(folder: RunFolder, say: Callable[[Any], None]) -> CheckpointSearch:
    """Finds the checkpoint to go on from; damaged ones are named, never quietly started over."""
    from memfit.training.checkpoints import newest_good, nothing_good, tidy

    tidy(folder.checkpoints_dir)
    found = newest_good(folder.checkpoints_dir)
    if found.good is None and found.passed_over:
        why = nothing_good(folder.checkpoints_dir, found)
        raise OutputError("{why}; start anew in another --output-dir", why=why)
    for note in found.notes():
        say(fact_line("note", note))
    return found


def trained_seconds(folder: Path, checkpoint: Path | None) -> float:
    """How long earlier sessions trained up to the checkpoint, as the run's log says."""
    from memfit.training.checkpoints import step_of

    step = 0 if checkpoint is None else step_of(checkpoint) or 0
    samples = read_log(folder).samples if step else []
    return max((sample.seconds for sample in samples if sample.step <= step), default=0.0)
