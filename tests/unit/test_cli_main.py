"""The command itself: quick to start, one sentence for every failure, the right exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from memfit import api
from memfit._version import __version__
from memfit.cli import app, run
from memfit.errors import DoesNotFitError, MemfitError

COMMANDS = (
    "train", "plan", "evaluate", "predict", "estimate", "report", "compare", "doctor", "push",
    "login", "ladder", "export", "serve",
)  # fmt: skip


def test_help_takes_less_than_three_tenths_of_a_second() -> None:
    seconds = []
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-m", "memfit", "--help"], stdout=subprocess.DEVNULL
        ) as process:
            # The processor's time, which other tests on the same cores do not stretch.
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        seconds.append(used.ru_utime + used.ru_stime)
    assert min(seconds) < 0.3


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys; from memfit.cli import run;"
        f"code = run({words!r});"
        "heavy = {'torch', 'transformers', 'datasets', 'pandas', 'numpy', 'rich'};"
        "print(code, sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "0 []\n"
    assert done.stdout.startswith("Usage: memfit")


def test_help_names_every_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert len(app.registered_commands) == len(COMMANDS)
    assert run(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for flag in ("--model", "--budget", "--output-dir", "--text-column", "--label-names", "--json"):
        assert flag in shown
    assert "--path" not in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"memfit {__version__}\n"


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(api, "finetune", fail)
    return run(["train", "a.csv"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemfitError("the run failed"), 1),
        (DoesNotFitError("nothing fits"), 3),
    ],
)
def test_errors_raised_on_purpose_have_their_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: MemfitError,
    code: int,
) -> None:
    assert fail_with(monkeypatch, error) == code
    assert capsys.readouterr().err == f"memfit: {error}\n"


def test_an_unexpected_error_is_a_sentence_and_a_traceback_only_when_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MEMFIT_DEBUG", raising=False)
    assert fail_with(monkeypatch, RuntimeError("broken")) == 1
    said = capsys.readouterr().err
    assert "RuntimeError: broken" in said
    assert "MEMFIT_DEBUG=1" in said
    assert "Traceback" not in said
    monkeypatch.setenv("MEMFIT_DEBUG", "1")
    assert fail_with(monkeypatch, RuntimeError("broken")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_what_a_library_refuses_is_told_in_its_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    def refused(*_: Any, **__: Any) -> None:
        torch.optim.AdamW([torch.zeros(1)], betas=(1.5, 0.9))

    monkeypatch.setattr(api, "finetune", refused)
    assert run(["train", "a.csv", "--model", "m", "--output-dir", "o"]) == 2
    said = capsys.readouterr().err
    assert said == "memfit: torch refuses what was given: Invalid beta parameter at index 0: 1.5\n"


def test_ctrl_c_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail_with(monkeypatch, KeyboardInterrupt()) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_command_in_a_pipe_writes_utf8_whatever_the_streams_were(tmp_path: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "report", "沒有這個資料夾", "--json"],
        capture_output=True,
        cwd=tmp_path,
        env={"PATH": "", "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert done.returncode == 2
    assert "沒有這個資料夾" in done.stderr.decode("utf-8")
