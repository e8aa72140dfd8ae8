"""Processes that plan beside a command find the same as it does, and end with it."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import psutil
import pytest

_BEGIN = """
import os, signal
from memfit.run import preloading

if __name__ == "__main__":
    if {own}:
        preloading.own_process()
"""

_PRICE = """
    from memfit.doctor.reach import reaches, well_known
    from memfit.memory.cards import find_card

    models = [one for one in well_known() if one.name == "BERT-tiny"] * 2
    card = find_card("RTX 3050 4GB")
    with preloading.other_processes(1) as others:
        beside = list(reaches(card, card.total_bytes, models=models, others=others))
        parent = others[0].submit(os.getppid).result()
    assert parent == os.getpid()
    assert len(beside) == 2
    print(beside == list(reaches(card, card.total_bytes, models=models)))
"""

_DIE = """
    with preloading.other_processes(1) as others:
        print(others[0].submit(os.getpid).result(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run(folder, script: str, *, own: bool) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(_BEGIN.format(own=own) + script)
    return subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_forked_process_prices_the_same_lines(tmp_path) -> None:
    ended = run(tmp_path, _PRICE, own=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, "True"), ended.stderr


@pytest.mark.parametrize("own", [True, False])
def test_a_process_does_not_outlive_the_command_that_was_killed(tmp_path, own: bool) -> None:
    ended = run(tmp_path, _DIE, own=own)
    number = int(ended.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(number).wait(10)
    assert not psutil.pid_exists(number)
