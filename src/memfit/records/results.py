"""The result folder: what lies where, who may write there, and the summary of a run.

model.safetensors, config.json, tokenizer*   the best model, ready for pipeline()
run.toml           the configuration that reruns it
plan.toml          how it was trained inside the budget, and why
summary.json       metrics, times, memory, versions, data counts
evaluation.json    per-class rows, confusion matrix, the most wrong texts
trainer_state.json every logged loss and metric
report.html        all of it on one page
checkpoints/       for --resume
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from memfit._version import __version__
from memfit.config.files import leftovers, plain, read_json, read_toml, write_json
from memfit.errors import OutputError
from memfit.i18n import N_, Message, message_of
from memfit.memory.components import MemoryPeak
from memfit.records.evaluation import Evaluation, Mistake
from memfit.records.run_warnings import RunWarning, warnings_from

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "peft")

# What file managers and version control leave in a folder nobody has used yet.
_WRITTEN = (
    "run.toml",
    "plan.toml",
    "summary.json",
    "evaluation.json",
    "report.html",
    "trainer_state.json",
)

_NOT_A_RUN = frozenset({".DS_Store", "Thumbs.db", "desktop.ini", ".gitkeep", ".gitignore"})


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """The budget, and the peak as predicted and as measured."""

    budget_bytes: int | None = None
    predicted: MemoryPeak | None = None
    measured: MemoryPeak | None = None
    measured_step: int | None = None
    """The step measured; None where the height is that of the whole run, as on CUDA."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """What one of several ranks held and did in the steps of a training."""

    rank: int
    device: str
    peak_bytes: int | None
    step_seconds: float
    """All steps together."""
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """What ran and how it ended; `summary.json` in memory."""

    model: str
    task: str
    status: str = "finished"
    labels: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    averaging: str = ""
    positive: str = ""
    why: str = ""
    """Why this class is the positive one, or why the mean over both leads (`Scoring.why`)."""
    threshold: float | None = None
    warnings: tuple[RunWarning, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    lengths: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    memory: MemorySummary = field(default_factory=MemorySummary)
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Fidelity, strategies, micro-batches, reasons, and the price as predicted."""
    device: str = ""
    ranks: tuple[RankFigures, ...] = ()
    """The ranks of a training on several; empty for a single process."""
    best_checkpoint: str | None = None
    config_digest: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    finished_at: str = ""
    language: str = ""
    """What the run spoke; its report speaks it wherever it is drawn again."""

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and text, for JSON."""
        values: dict[str, Any] = plain(self)
        return values | {"warnings": plain([one.to_dict() for one in self.warnings])}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunSummary:
        """The inverse of `to_dict`; keys of another version are passed over."""
        known = {item.name for item in fields(cls)}
        kept = {key: value for key, value in values.items() if key in known}
        for key in ("metrics", "training", "data", "lengths", "seconds", "versions"):
            if not isinstance(kept.get(key, {}), Mapping):
                raise TypeError(f"its {key} is no object")
        kept["labels"] = tuple(kept.get("labels", ()))
        ours = {item.name for item in fields(RankFigures)}
        kept["ranks"] = tuple(
            RankFigures(**{key: value for key, value in one.items() if key in ours})
            for one in kept.get("ranks") or ()
        )
        kept["warnings"] = warnings_from(kept.get("warnings"))
        memory = kept.get("memory") or {}
        kept["memory"] = MemorySummary(
            budget_bytes=memory.get("budget_bytes"),
            predicted=stored_peak(memory, "predicted"),
            measured=stored_peak(memory, "measured"),
            measured_step=memory.get("measured_step"),
        )
        return cls(**kept)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run, and what of them is there."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "run.toml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.toml"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def checkpoints_dir(self) -> Path:
        """The Trainer's own output folder."""
        return self.path / "checkpoints"

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first.

        The Trainer writes trainer_state.json last, so one without it was cut off.
        """
        found = [
            state.parent
            for state in self.checkpoints_dir.glob("checkpoint-*/trainer_state.json")
            if state.parent.name.removeprefix("checkpoint-").isdecimal()
        ]
        return sorted(found, key=lambda folder: int(folder.name.removeprefix("checkpoint-")))

    def trainer_state(self) -> dict[str, Any]:
        """The Trainer's state at the run's end, or else in its last checkpoint."""
        states = [self.path / "trainer_state.json", self.checkpoints_dir / "trainer_state.json"]
        states += [folder / "trainer_state.json" for folder in reversed(self.checkpoints())]
        for state in states:
            if state.is_file():
                return read_json(state)
        return {}


class OutputClaim:
    """The right to write into an output folder; `keep()` once there is something worth keeping."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.path = path
        self.kept = False

    def keep(self) -> None:
        """From now on a failure leaves the folder as it is, for --resume."""
        self.kept = True


@contextmanager
def claim_output_folder(
    path: str | os.PathLike[str], *, resume: bool = False
) -> Iterator[OutputClaim]:
    """Makes the folder, or refuses one that holds another run.

    A run that fails before `keep()` leaves the disk as it found it.
    """
    folder = Path(path)
    for item in leftovers(folder, _WRITTEN):  # what a killed run left half written
        with suppress(OSError):
            _remove(item)
    before = _entries(folder)
    if resume:
        if "run.toml" not in before and "checkpoints" not in before:
            raise OutputError(
                "there is no run to resume in {folder}; leave --resume out to start one, or "
                "name the folder of the interrupted run with --output-dir",
                folder=folder,
            )
        if (linked := RunFolder(folder).checkpoints_dir).is_symlink():
            raise OutputError(  # a resumed run removes old checkpoints there
                "{path} is a link to somewhere else; put the folder itself in its place, or start "
                "anew in another --output-dir",
                path=linked,
            )
    elif before & {"run.toml", "summary.json", "checkpoints", "model.safetensors"}:
        raise OutputError(
            "the output folder {folder} already holds another run; name another "
            "--output-dir, or continue it with --resume",
            folder=folder,
        )
    elif occupied := sorted(before - _NOT_A_RUN):
        raise OutputError(
            "the output folder {folder} already holds files ({names}); name another --output-dir",
            folder=folder,
            names=", ".join(occupied[:3]),
        )
    made = [item for item in (folder, *folder.parents) if not item.exists()]
    claim = OutputClaim(folder)
    try:
        _check_writable(folder)
        yield claim
    except BaseException:
        if not claim.kept and not resume:
            _clean(folder, before, made)
        raise


def _entries(folder: Path) -> set[str]:
    try:
        return {item.name for item in folder.iterdir()}
    except FileNotFoundError:
        return set()
    except NotADirectoryError:
        kind = N_("the output folder {folder} is or lies under a file; name another --output-dir")
        raise OutputError(kind, folder=folder) from None
    except OSError as error:
        kind = N_("cannot read the output folder {folder}: {reason}; name another --output-dir")
        raise OutputError(kind, folder=folder, reason=error.strerror) from None


def _check_writable(folder: Path) -> None:
    """Creates the folder, so that a place nobody may write to fails before anything loads."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            "cannot write to the output folder {folder}: {reason}; name another with --output-dir",
            folder=folder,
            reason=error.strerror,
        ) from None


def _clean(folder: Path, before: set[str], made: list[Path]) -> None:
    """Removes what is new in the folder, then the folders made for it, deepest first."""
    for item in folder.iterdir() if folder.is_dir() else ():
        if item.name not in before:
            with suppress(OSError):
                _remove(item)
    for item in made:
        with suppress(OSError):
            item.rmdir()


def _remove(item: Path) -> None:
    if item.is_dir() and not item.is_symlink():
        shutil.rmtree(item)
    else:
        item.unlink(missing_ok=True)


def write_summary(run_dir: str | os.PathLike[str], summary: RunSummary) -> Path:
    """Writes summary.json."""
    return write_json(RunFolder(Path(run_dir)).summary, summary.to_dict())


def read_summary(run_dir: str | os.PathLike[str]) -> RunSummary:
    """Reads summary.json back."""
    path = RunFolder(Path(run_dir)).summary
    try:
        return RunSummary.from_dict(read_json(path))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise OutputError(
            "{path} is not a summary that memfit wrote: {reason}", path=path, reason=error
        ) from None


def kept_messages(messages: Mapping[str, str]) -> dict[str, Any]:
    """Sentences by name for a file, such that each is told in the reader's language later."""
    return {
        name: one.as_json() if isinstance(one, Message) else one for name, one in messages.items()
    }


def kept_reasons(summary: RunSummary) -> dict[str, str]:
    """The plan's reasons by name, as messages; none in runs of older versions."""
    messages = summary.plan.get("messages")
    if not isinstance(messages, Mapping):
        return {}
    return {name: message_of(one) for name, one in messages.items()}


def trained_with_weights(model: str | os.PathLike[str]) -> bool:
    """Whether a run folder's training weighed its classes; no of a model from elsewhere."""
    has_summary = RunFolder(Path(model)).summary.is_file()
    return has_summary and bool(read_summary(model).training.get("class_weights"))


def trained_label_names(model: str | os.PathLike[str]) -> dict[str, str]:
    """The names a run folder's training gave its labels; none of a model from elsewhere."""
    config = RunFolder(Path(model)).config
    values = read_toml(config) if config.is_file() else {}
    found = values.get("data", {}).get("label_names", {})
    return found if isinstance(found, dict) else {}


def write_evaluation(
    run_dir: str | os.PathLike[str], evaluation: Evaluation, mistakes: tuple[Mistake, ...] = ()
) -> Path:
    """Writes evaluation.json, which the report draws its tables from."""
    values = {**evaluation.to_dict(), "mistakes": mistakes}
    return write_json(RunFolder(Path(run_dir)).evaluation, values)


def read_evaluation(
    run_dir: str | os.PathLike[str],
) -> tuple[Evaluation, tuple[Mistake, ...]] | None:
    """Reads evaluation.json back; None where a run has none."""
    path = RunFolder(Path(run_dir)).evaluation
    if not path.is_file():
        return None
    values = read_json(path)
    try:
        mistakes = tuple(Mistake(**item) for item in values.pop("mistakes", ()))
        return Evaluation.from_dict(values), mistakes
    except (TypeError, AttributeError) as error:
        raise OutputError(
            "{path} is not an evaluation that memfit wrote: {reason}", path=path, reason=error
        ) from None


def config_digest(toml_text: str) -> str:
    """Twelve characters that change with the configuration."""
    return hashlib.sha256(toml_text.encode()).hexdigest()[:12]


def versions() -> dict[str, str]:
    """What the run was made with; packages that are not installed are left out."""
    found = {"memfit": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def stored_peak(values: Mapping[str, Any], name: str) -> MemoryPeak | None:
    """The peak of that name in a file's values; None where there is none."""
    return MemoryPeak.from_json(values[name]) if values.get(name) else None


@dataclass(frozen=True, kw_only=True)
class RunSeconds:
    """How long a run takes, as predicted."""

    training: float
    evaluation: float
    evaluations: int

    @property
    def total(self) -> float:
        """Training and evaluation together."""
        return self.training + self.evaluation
