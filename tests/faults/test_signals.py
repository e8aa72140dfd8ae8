"""SIGTERM and Ctrl-C: the step is finished, a checkpoint saved, the exit code says which it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_run import STEPS_AN_EPOCH, in_child, names_in, same_weights, trainer_in
from transformers import TrainerCallback

from memfit.cli import run
from memfit.run.callbacks import StopAfterStep
from memfit.run.signals import Stopped, handled, stop_at_once
from memfit.training.checkpoints import problem_with
from waits import without_waits


class Signal(TrainerCallback):
    """Sends this process a signal in the middle of a step, as often as asked."""

    def __init__(self, number: int, step: int, times: int = 1) -> None:
        self.number, self.step, self.times = number, step, times

    def on_pre_optimizer_step(self, args, state, control, **kwargs):  # noqa: ARG002
        if state.global_step == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


def signalled(root: Path, words: list[str], number: int, step: int, times: int) -> None:
    """`memfit train`, which a signal meets in a step."""
    import memfit
    from memfit import api

    real = memfit.finetune

    def with_signal(*args: object, **kwargs: object) -> object:
        return real(*args, **kwargs, callbacks=[Signal(number, step, times)])

    api.finetune = with_signal
    raise SystemExit(run([*words, "--epochs", "3", "--output-dir", str(root / "out")]))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_with_its_own_code(
    tmp_path: Path, by_plan: list[str], number: int, code: int
) -> None:
    root = tmp_path / "root"
    process = in_child(signalled, root, by_plan, number, 9, 1)
    process.join(600)
    said = (root / "said.txt").read_text()
    assert process.exitcode == code, said
    assert "stopping after this step" in said
    assert "stopped at step 10 of 21" in said
    assert f"memfit train --resume --output-dir {root / 'out'}" in said
    assert "Traceback" not in said
    checkpoints = root / "out" / "checkpoints"
    assert names_in(checkpoints)[0] == "checkpoint-10"
    assert problem_with(checkpoints / "checkpoint-10") == ""
    assert run(["train", "--resume", "--output-dir", str(root / "out"), "--quiet"]) == 0
    whole = tmp_path / "whole"
    assert run([*by_plan, "--epochs", "3", "--output-dir", str(whole), "--quiet"]) == 0
    assert same_weights(root / "out" / "model.safetensors", whole / "model.safetensors")


def test_a_second_one_ends_at_once_and_leaves_the_last_checkpoint(
    tmp_path: Path, by_plan: list[str]
) -> None:
    root = tmp_path / "root"
    process = in_child(signalled, root, by_plan, signal.SIGINT, 9, 2)
    process.join(600)
    assert process.exitcode == 130
    assert [item.name for item in (root / "out" / "checkpoints").iterdir()] == ["checkpoint-7"]


def test_a_signal_in_the_last_step_of_an_epoch_does_not_lose_its_evaluation(tmp_path: Path) -> None:
    stop = StopAfterStep(lambda _: None)
    last = Signal(signal.SIGTERM, STEPS_AN_EPOCH - 1)
    trainer = trainer_in(tmp_path / "run", stop, last)
    with pytest.raises(Stopped) as stopped, stop.listening():
        trainer.train()
    assert stopped.value.exit_code == 143
    assert trainer.state.global_step == STEPS_AN_EPOCH
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated == [STEPS_AN_EPOCH]
    assert problem_with(tmp_path / "run" / f"checkpoint-{STEPS_AN_EPOCH}") == ""


def test_sigterm_before_training_leaves_no_folder(
    tmp_path: Path, reviews: Path, tiny_model_dir: Path
) -> None:
    """A real process, with nothing warm: the signal meets it while it loads."""
    code = "import memfit.cli; memfit.cli.main()"
    words = ["train", str(reviews), "--model", str(tiny_model_dir), "--output-dir", "out"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        for _ in range(600):
            time.sleep(0.05)
            if (tmp_path / "out").exists():
                break
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 143, said
    assert without_waits(said).splitlines() == ["memfit: interrupted"]
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with handled(stop_at_once):
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) is stop_at_once
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
