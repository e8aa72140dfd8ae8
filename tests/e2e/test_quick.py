"""A run is quick from the first second: it always says something, and does nothing twice."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import transformers
from test_train_command import write_reviews
from transformers import TrainerCallback

import memfit
from memfit.cli import run
from memfit.training import checkpoints

SILENT_SECONDS = 2.0
LIMIT_SECONDS = 240


@dataclass
class Told:
    """What a process said and when, seconds since its start."""

    code: int = -1
    text: str = ""
    at: list[float] = field(default_factory=list)
    late_seconds: float = 0.0
    """The most this machine made a thread wait that only wanted to sleep."""

    @property
    def longest_silence_seconds(self) -> float:
        return max(after - before for before, after in zip(self.at, self.at[1:], strict=False))


class Lateness:
    """How late a sleeping thread is woken: on a busy machine, so is every other."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            before = time.monotonic()
            time.sleep(0.02)
            self.seconds = max(self.seconds, time.monotonic() - before - 0.02)


def listen(command: list[str], env: dict[str, str], *, terminal: bool) -> Told:
    """Runs a command at a terminal or with pipes, both streams together."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    told, started = Told(), time.monotonic()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    told.at.append(0.0)
    with Lateness() as lateness:
        while time.monotonic() - started < LIMIT_SECONDS:
            if not select.select([ours], [], [], 0.5)[0]:
                continue
            try:
                read = os.read(ours, 1 << 16)
            except OSError:  # the other side of a terminal is closed
                read = b""
            told.at.append(time.monotonic() - started)
            if not read:
                break
            told.text += read.decode("utf-8", errors="replace")
        process.kill()
    told.code, told.late_seconds = process.wait(), lateness.seconds
    os.close(ours)
    return told


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reviews(tmp_path_factory.mktemp("data") / "reviews.csv", rows=120)


@pytest.fixture(scope="module")
def runs(
    reviews: Path, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Told, Path]]:
    """The same task three times: through a pipe, at a terminal, and here, with nothing kept."""
    folder = tmp_path_factory.mktemp("quick")
    cache = str(folder / "cache")
    env = {**os.environ, "MEMFIT_CACHE": cache, "TERM": "xterm", "COLUMNS": "80"}
    made = {}
    words = [
        "train", str(reviews), "--model", str(tiny_model_dir), "--budget", "1GB",
        "--max-length", "64", "--batch-size", "8", "--epochs", "1", "--exact", "--output-dir",
    ]  # fmt: skip
    for name in ("pipe", "terminal"):
        command = [sys.executable, "-m", "memfit", *words, str(folder / name)]
        made[name] = listen(command, env, terminal=name == "terminal"), folder / name
    fresh, said = folder / "fresh", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setenv("MEMFIT_CACHE", cache)
        code = run([*words, str(fresh), "--no-cache"])
    made["fresh"] = Told(code, said.getvalue()), fresh
    return made


def summary_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("name", ["pipe", "terminal"])
def test_never_two_seconds_without_a_word(runs: dict[str, tuple[Told, Path]], name: str) -> None:
    told, _ = runs[name]
    assert told.code == 0, told.text
    # The mechanism speaks well before; the rest is what the machine itself takes.
    assert told.longest_silence_seconds <= SILENT_SECONDS + told.late_seconds, told.text


def test_a_pipe_gets_plain_lines_and_a_terminal_one_that_moves(
    runs: dict[str, tuple[Told, Path]],
) -> None:
    piped, shown = runs["pipe"][0].text, runs["terminal"][0].text
    assert all(char == "\n" or char.isprintable() for char in piped)
    assert "loading libraries …\n" in piped
    assert re.search(r"\r\x1b\[2K\S loading libraries …", shown)


@pytest.mark.parametrize("name", ["pipe", "terminal"])
def test_how_long_it_takes_is_said_once(runs: dict[str, tuple[Told, Path]], name: str) -> None:
    told = runs[name][0].text
    assert len(re.findall(r"training: \d+ steps, about [\d.]+ m?s", told)) == 1
    assert told.count("about ") == 1
    assert "the whole run" not in told


def test_a_second_run_of_the_same_task_is_not_planned_again(
    runs: dict[str, tuple[Told, Path]],
) -> None:
    assert runs["fresh"][0].code == 0, runs["fresh"][0].text
    kept = "kept from an earlier run"
    assert kept not in runs["pipe"][0].text
    assert kept in runs["terminal"][0].text
    assert kept not in runs["fresh"][0].text
    first, second, fresh = (
        (folder / "plan.toml").read_text(encoding="utf-8").replace(folder.name, "run")
        for _, folder in runs.values()
    )
    assert first == second
    assert fresh.partition("[predicted]")[0] == first.partition("[predicted]")[0]
    seconds = {name: summary_of(folder)["seconds"]["plan"] for name, (_, folder) in runs.items()}
    assert seconds["terminal"] < 0.5 * min(seconds["pipe"], seconds["fresh"])


class Counting(TrainerCallback):
    """Batches that were predicted."""

    predicted = 0

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self.predicted += 1


@pytest.mark.usefixtures("undrawn")
def test_after_the_last_step_nothing_is_done_twice(
    reviews: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    loaded: list[str] = []
    digest, load = hashlib.file_digest, transformers.Trainer._load_best_model

    def count_digest(file: Any, name: Any) -> Any:
        hashed.append(Path(file.name).name)
        return digest(file, name)

    def count_load(trainer: Any) -> None:
        loaded.append(str(trainer.state.best_model_checkpoint))
        load(trainer)

    monkeypatch.setattr(hashlib, "file_digest", count_digest)
    monkeypatch.setattr(transformers.Trainer, "_load_best_model", count_load)
    counting, output = Counting(), tmp_path / "run"
    result = memfit.finetune(
        reviews, model=tiny_model_dir, output_dir=output, budget="1GB", exact=True, quiet=True,
        max_length=64, per_device_train_batch_size=8, per_device_eval_batch_size=6, max_steps=2,
        callbacks=[counting],
    )  # fmt: skip
    (checkpoint,) = (output / "checkpoints").iterdir()
    assert result.summary.best_checkpoint == checkpoint.name
    assert loaded == []
    assert counting.predicted == 2  # twelve rows, evaluated once
    assert result.evaluation.rows == 12
    assert sorted(hashed) == sorted(set(hashed))
    assert {"model.safetensors", "optimizer.pt"} <= set(hashed)
    assert (output / "model.safetensors").samefile(checkpoint / "model.safetensors")
    assert checkpoints.problem_with(checkpoint) == ""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(output)
    assert model.config.id2label == {0: "0", 1: "1"}


@pytest.mark.usefixtures("undrawn")
def test_a_best_model_that_is_not_the_last_is_loaded_and_not_evaluated_again(
    reviews: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    counting, output = Counting(), tmp_path / "run"
    validated = write_reviews(tmp_path / "validated.csv", rows=12)
    result = memfit.finetune(
        reviews, model=tiny_model_dir, output_dir=output, budget="1GB", exact=True, quiet=True,
        max_length=64, per_device_train_batch_size=8, per_device_eval_batch_size=6,
        num_train_epochs=3, learning_rate=1e-7, validation_file=str(validated),
        callbacks=[counting],
    )  # fmt: skip
    # Nothing was learnt: the first evaluation stays the best.
    assert result.summary.best_checkpoint == "checkpoint-15"
    assert counting.predicted == 3 * 2
    assert result.metrics == pytest.approx(memfit.evaluate(output, validated).metrics)
    best = output / "checkpoints" / "checkpoint-15" / "model.safetensors"
    assert (output / "model.safetensors").samefile(best)
