"""What is being done is said while it is done: once, soon, and never in anybody's way."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import transformers
from strategy_fixtures import arguments, build, collate, rows_of

from memfit import BudgetTrainer, waiting
from memfit.cli import run
from memfit.data.working_files import progress_bar
from memfit.errors import MemfitError
from memfit.run.announcements import voice
from memfit.training import trainer as trainer_module

LINE, DOT = 0.05, 0.1


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "_LINE_AFTER_SECONDS", LINE)
    monkeypatch.setattr(waiting, "_DOT_AFTER_SECONDS", DOT)


def until(capsys: pytest.CaptureFixture[str], said: str, seconds: float = 20.0) -> str:
    """What was written to stderr up to and with these words."""
    written, deadline = "", time.monotonic() + seconds
    while said not in written and time.monotonic() < deadline:
        time.sleep(0.01)
        written += capsys.readouterr().err
    assert said in written
    return written


def test_work_is_named_in_a_pipe_and_dots_follow(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting.telling():
        with waiting.doing("planning"):
            written = until(capsys, "..")
        written += capsys.readouterr().err
    written += capsys.readouterr().err
    assert written.startswith("planning\n..")
    assert written.count("planning") == 1
    assert written.endswith(" s\n")
    assert all(char == "\n" or char.isprintable() for char in written)


def test_work_that_is_over_at_once_is_not_mentioned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_LINE_AFTER_SECONDS", 30.0)
    with waiting.telling():
        for _ in range(5):
            with waiting.doing("a moment"):
                pass
    assert capsys.readouterr().err == ""


def test_the_innermost_work_is_named_and_then_the_outer_one_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with waiting.telling(), waiting.doing("all"):
        with waiting.doing("a part"):
            assert "all" not in until(capsys, "a part\n")
        until(capsys, "all\n")
        with waiting.doing(""):
            capsys.readouterr()
            assert set(until(capsys, "..")) <= {".", "\n"}


def test_who_speaks_begins_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    say = voice(quiet=False)
    with waiting.telling(), waiting.doing("planning"):
        until(capsys, ".")
        say("a note")
        written = until(capsys, "a note\n")
    assert written.lstrip(".").startswith("\na note\n")


def test_nothing_is_said_where_quiet_is_asked_for_or_nobody_listens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with waiting.telling(quiet=True), waiting.doing("quiet"):
        time.sleep(3 * DOT)
    with waiting.doing("alone"):
        time.sleep(3 * DOT)
    waiting.make_way()
    assert capsys.readouterr().err == ""
    assert waiting.sentence() == ""


def test_a_bar_has_the_terminal_for_itself_and_is_told_what_to_show(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with waiting.telling(), waiting.doing("evaluating"):
        waiting.shown_by_bar(True)
        capsys.readouterr()
        time.sleep(3 * DOT)
        assert capsys.readouterr().err == ""
        assert waiting.sentence() == "evaluating"
        waiting.shown_by_bar(False)
        until(capsys, "evaluating\n")


def test_rows_are_counted_in_lines_of_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_ROWS_LINE_AFTER_SECONDS", 2 * DOT)
    with waiting.telling(), waiting.doing("evaluating"):
        bar = progress_bar("predicting", 2400)
        bar.update(1200)
        written = until(capsys, " left\n")
        bar.close()
        capsys.readouterr()
        assert "rows" not in until(capsys, "..")
    assert written.startswith("evaluating\n")
    assert re.search(r"^1,200/2,400 rows  [\d,]+ rows/s  \d.\d s left$", written, re.MULTILINE)


class Screen(io.StringIO):
    """A terminal that keeps all it was sent."""

    def isatty(self) -> bool:
        return True


def test_rows_are_a_bar_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    deadline = time.monotonic() + 20
    with waiting.telling(), waiting.doing("evaluating"):
        bar = progress_bar("predicting", 2400)
        bar.update(1200)
        while " left" not in screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert re.search(r"evaluating .*━.* 1,200/2,400 rows  [\d,]+ rows/s", screen.getvalue())


def test_it_ends_with_what_interrupts_it(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        with waiting.telling(), waiting.doing("planning"):
            until(capsys, ".")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    written = capsys.readouterr().err
    assert written.endswith("\n")
    time.sleep(3 * DOT)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("works", "words"),
    [
        ("memfit.api.evaluate", ["evaluate", "run", "table.csv"]),
        ("memfit.api.load", ["predict", "run", "早餐"]),
        ("memfit.api.estimate", ["estimate", "--model", "m", "--gpu", "T4"]),
        ("memfit.run.prepare.prepare_to_plan", ["plan", "table.csv", "--model", "m"]),
        ("memfit.doctor.diagnosis.diagnose", ["doctor"]),
    ],
)
def test_a_command_says_that_it_loads_libraries(
    works: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(*_: object, **__: object) -> None:
        until(capsys, "loading libraries …\n")
        raise MemfitError("heard")

    monkeypatch.setattr(works, work)
    assert run(words) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("memfit: heard\n")


class Gone(io.StringIO):
    """A pipe that nobody reads any more."""

    tries = 0

    def write(self, text: str) -> int:
        del text
        self.tries += 1
        raise BrokenPipeError


def test_a_stream_that_is_closed_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Gone()
    monkeypatch.setattr(sys, "stderr", gone)
    deadline = time.monotonic() + 20
    with waiting.telling(), waiting.doing("planning"):
        while gone.tries < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert gone.tries >= 2


@pytest.mark.parametrize("resumed", [False, True])
def test_what_comes_before_the_first_step_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """Loading a checkpoint of XLM-R-large takes 4 s, and a terminal shows nothing without it."""
    monkeypatch.setattr(waiting, "_LINE_AFTER_SECONDS", 0.0)
    said: dict[str, str] = {}
    allocate = trainer_module.allocate_state

    def allocated(*args: Any) -> None:
        said["allocating"] = waiting.sentence()
        allocate(*args)

    class Listener(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            said["first step"] = waiting.sentence()

    def trained(steps: int, resume: bool) -> None:
        args = arguments(tmp_path, max_steps=steps, save_strategy="steps", save_steps=1)
        trainer = BudgetTrainer(
            build("bert"), args, train_dataset=rows_of(16), data_collator=collate,
            callbacks=[Listener()],
        )  # fmt: skip
        with waiting.telling():
            trainer.train(resume_from_checkpoint=resume)

    if resumed:
        trained(1, resume=False)
    monkeypatch.setattr(trainer_module, "allocate_state", allocated)
    trained(2, resume=resumed)
    name = "loading checkpoint-1 …" if resumed else "preparing the first step …"
    assert said["allocating"].startswith(name)
    assert said["first step"] == ""
