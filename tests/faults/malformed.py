"""How an input is spoilt: a case writes into a folder and returns the words of the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOOD = "label,review\n" + "1,服務人員都很親切\n0,服務人員都不親切\n" * 8


@dataclass(frozen=True)
class Place:
    """Where a case may write, and what it may spoil."""

    folder: Path
    model: Path
    run: Path

    def spoilt_model(self) -> Path:
        return shutil.copytree(self.model, self.folder / "model")

    def spoilt_run(self) -> Path:
        return shutil.copytree(self.run, self.folder / "run")

    def train(self, data: Path | str, *more: str, model: Path | str | None = None) -> list[str]:
        # The model has few positions: the usual length would be what is refused.
        return ["train", str(data), "--model", str(model or self.model), "--output-dir",
                str(self.folder / "out"), "--max-length", "16", *more]  # fmt: skip

    def good(self) -> Path:
        path = self.folder / "good.csv"
        path.write_text(GOOD, encoding="utf-8")
        return path


Case = Callable[[Place], list[str]]


def table(name: str, content: bytes | str, *more: str) -> Case:
    """A data file with this content."""

    def write(place: Place) -> list[str]:
        path = place.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return place.train(path, *more)

    return write


def option(*words: str) -> Case:
    """A good table, and these words."""
    return lambda place: place.train(place.good(), *words)


def toml(content: str) -> Case:
    """A good table, and this configuration."""

    def write(place: Place) -> list[str]:
        path = place.folder / "run.toml"
        path.write_text(content, encoding="utf-8")
        words = ["train", str(place.good()), "--model", str(place.model), "--config", str(path)]
        # An option would win over what the file says.
        if "output_dir" not in content:
            words += ["--output-dir", str(place.folder / "out")]
        return words if "max_length" in content else [*words, "--max-length", "16"]

    return write


Content = bytes | str | Callable[[bytes], bytes] | None
"""What a file becomes: something else, what is made of what it was, or nothing at all."""


def spoil(path: Path, content: Content) -> None:
    """Write a file anew, change it, or take it away."""
    if content is None:
        path.unlink()
    elif callable(content):
        path.write_bytes(content(path.read_bytes()))
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def model_file(name: str, content: Content) -> Case:
    """The model with one of its files written anew, changed or taken away."""

    def write(place: Place) -> list[str]:
        model = place.spoilt_model()
        spoil(model / name, content)
        return place.train(place.good(), model=model)

    return write


def model_config(**changed: Any) -> Case:
    """The model with other values in its config.json; `None` takes a key away."""

    def change(content: bytes) -> bytes:
        values = {**json.loads(content), **changed}
        kept = {key: value for key, value in values.items() if value is not None}
        return json.dumps(kept).encode()

    return model_file("config.json", change)


def run_file(name: str, content: Content, *command: str) -> Case:
    """A finished run with one file spoilt, and a command that reads it."""

    def write(place: Place) -> list[str]:
        run = place.spoilt_run()
        spoil(run / name, content)
        return [word.replace("RUN", str(run)) for word in command]

    return write


def checkpoint_file(name: str, content: Content) -> Case:
    """A run that has not finished, whose only checkpoint has one file spoilt."""

    def write(place: Place) -> list[str]:
        run = place.spoilt_run()
        (run / "summary.json").unlink()
        spoil(only_checkpoint(run) / name, content)
        return ["train", "--resume", "--output-dir", str(run)]

    return write


def signed_state(**changed: Any) -> Case:
    """A checkpoint that is whole, but whose state says what cannot be."""

    def write(place: Place) -> list[str]:
        from memfit.training.checkpoints import write_manifest

        run = place.spoilt_run()
        (run / "summary.json").unlink()
        checkpoint = only_checkpoint(run)
        path = checkpoint / "trainer_state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
        write_manifest(checkpoint)
        return ["train", "--resume", "--output-dir", str(run)]

    return write


def only_checkpoint(run: Path) -> Path:
    """The others are taken away."""
    newest, *others = sorted(
        (run / "checkpoints").iterdir(), key=lambda item: -int(item.name.split("-")[1])
    )
    for other in others:
        shutil.rmtree(other)
    return newest
