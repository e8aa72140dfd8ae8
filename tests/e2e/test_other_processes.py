"""Processes that plan beside a command find the same as it does, and end with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

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
        os.environ["FORKED"] = "yes"  # which a process that has begun already does not see
        beside = list(reaches(card, card.total_bytes, models=models, others=others))
        forked = others[0].submit(os.getenv, "FORKED").result()
    assert len(beside) == 2
    print(forked, beside == list(reaches(card, card.total_bytes, models=models)))
"""

_FIND = """
    from concurrent.futures import wait

    preloading.load_to_plan()
    from planner_fixtures import bert, task, to_plan
    from memfit.planner import advice
    from memfit.planner.search import ask

    workload = task(bert(2, 64, 100), lengths=(16,) * 8, per_device_train_batch_size=4)
    asked = to_plan(workload, 10**9, None)
    wanted, pricer = ask(workload, None, None, exact=False, allow=frozenset())
    expected = advice.other_ways(wanted, pricer, asked.budget_bytes)
    with preloading.other_processes(2) as others:
        for process in others:
            finder = advice.FoundBeside(process, asked)
            finder.begin(pricer.known)
            wait([*finder._sent.values()])
            assert finder(wanted, pricer, asked.budget_bytes) == expected
            dying = advice.FoundBeside(process, asked)
            process.submit(os._exit, 1)
            dying.begin(pricer.known)
            assert dying(wanted, pricer, asked.budget_bytes) == expected
    print("same", len(expected.allow))
"""

_DIE = """
    with preloading.other_processes(1) as others:
        print(others[0].submit(os.getpid).result(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run(folder, script: str, *, own: bool) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(_BEGIN.format(own=own) + script)
    tests = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(tests), str(tests / "unit")])
    return subprocess.run(
        [sys.executable, str(file)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_forked_process_prices_the_same_lines(tmp_path) -> None:
    ended = run(tmp_path, _PRICE, own=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, "yes True"), ended.stderr


def test_other_ways_are_found_beside_and_not_missed_when_the_process_dies(tmp_path) -> None:
    ended = run(tmp_path, _FIND, own=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("same ")


@pytest.mark.parametrize("own", [True, False])
def test_a_process_does_not_outlive_the_command_that_was_killed(tmp_path, own: bool) -> None:
    ended = run(tmp_path, _DIE, own=own)
    number = int(ended.stdout)
    assert wait_for_end(number)


def wait_for_end(number: int) -> bool:
    """A process whose parent has died may stay in the table of processes as a zombie."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(number).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False
