"""A CPU is asked for half precision in a child process, once, and its answer is remembered.

The children here are real processes that end as on such a CPU, without the seconds that torch's
import takes; tests/faults/test_lying_cpu.py has whole runs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from memfit.engine import half_on_cpu
from memfit.engine.half_on_cpu import VARIABLE, WITHOUT_AMX, HalfOnCpu
from memfit.strategies import HalfPrecision, LowBitAdamW, Setup

READY = (
    "import os, signal\n"
    "with open(os.environ['COUNTED'], 'a') as file:\n"
    "    file.write('x')\n"
    "print('ready', flush=True)\n"
)
DIES = READY + "os.kill(os.getpid(), signal.SIGILL)\n"
LOST = HalfOnCpu(bfloat16=False, float16=False, instruction_set=WITHOUT_AMX)


class Machine:
    """A CPU that advertises AMX, with its own cache folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, monkeypatch
        self.counted = folder / "children"
        monkeypatch.setenv("MEMFIT_CACHE", str(folder / "cache"))
        monkeypatch.setenv("COUNTED", str(self.counted))
        monkeypatch.setenv(VARIABLE, "")
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)

    def trial(self, source: str) -> None:
        path = self.folder / "trial.py"
        path.write_text(source, encoding="utf-8")
        self.patch.setattr(half_on_cpu, "_TRIAL", path)

    def ask(self) -> HalfOnCpu:
        """As a process that has just started."""
        forget()
        return half_on_cpu.half_on_cpu()

    def children(self) -> int:
        return len(self.counted.read_text()) if self.counted.exists() else 0


def forget() -> None:
    half_on_cpu.half_on_cpu.cache_clear()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(tmp_path, monkeypatch)
    forget()


def test_a_cpu_without_amx_starts_no_child(machine: Machine) -> None:
    machine.trial(DIES)
    machine.patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert machine.ask() == HalfOnCpu()
    assert machine.ask().sentence() == ""
    assert machine.children() == 0
    assert not (machine.folder / "cache").exists()


def test_a_cpu_that_runs_it_is_asked_once(machine: Machine) -> None:
    machine.trial(READY + "print('bfloat16 float16')\n")
    assert machine.ask() == machine.ask() == HalfOnCpu()
    assert machine.children() == 1


def test_a_trap_is_remembered_and_said_once_a_process(machine: Machine) -> None:
    machine.trial(DIES)
    for _ in range(2):
        with pytest.warns(UserWarning, match="ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before") as said:
            assert machine.ask() == LOST
        assert len(said) == 1
        half_on_cpu.half_on_cpu()  # without a warning, which would be an error here
    assert machine.children() == 1


def test_a_process_that_limits_onednn_is_asked_by_itself(machine: Machine) -> None:
    machine.trial(
        READY + f"if not os.environ.get('{VARIABLE}'):\n    os.kill(os.getpid(), signal.SIGILL)\n"
        "print('bfloat16 float16')\n"
    )
    with pytest.warns(UserWarning, match="did not run"):
        assert machine.ask() == LOST
    machine.patch.setenv(VARIABLE, WITHOUT_AMX)
    assert machine.ask() == HalfOnCpu()
    assert machine.children() == 2


@pytest.mark.parametrize("damage", ["", "{}", '{"bfloat16": 1, "float16": true}'])
def test_an_answer_that_cannot_be_read_is_found_out_again(machine: Machine, damage: str) -> None:
    machine.trial(DIES)
    with pytest.warns(UserWarning, match="did not run"):
        first = machine.ask()
    [kept] = (machine.folder / "cache").iterdir()
    kept.write_text(damage, encoding="utf-8")
    with pytest.warns(UserWarning, match="did not run"):
        assert machine.ask() == first
    assert machine.children() == 2


def test_strategies_refuse_with_the_reason(machine: Machine) -> None:
    machine.trial(DIES)
    with pytest.warns(UserWarning, match="bfloat16, float16 did not run"):
        found = machine.ask()
    assert found.works("float32")
    args = TrainingArguments(str(machine.folder), use_cpu=True, report_to="none")
    setup = Setup(model=torch.nn.Linear(2, 2), args=args, device=torch.device("cpu"))
    for strategy in (HalfPrecision(), LowBitAdamW()):
        assert strategy.unavailable(setup) == "bfloat16 does not run on this CPU"
    assert "float16" in LowBitAdamW(dtype="float16").unavailable(setup)


def test_products_that_come_out_wrong_are_as_bad_as_a_trap(machine: Machine) -> None:
    machine.trial(READY + "print('bfloat16', flush=True)\nraise ArithmeticError\n")
    with pytest.warns(UserWarning, match="^float16 did not run"):
        assert machine.ask() == HalfOnCpu(float16=False, instruction_set=WITHOUT_AMX)


@pytest.mark.parametrize("child", ["raise ImportError('torch')", "import time\ntime.sleep(60)"])
def test_a_child_that_tells_nothing_of_the_cpu_is_not_remembered(
    machine: Machine, child: str
) -> None:
    machine.trial(child)
    machine.patch.setattr(half_on_cpu, "_TRIAL_SECONDS", 2.0)
    with pytest.warns(UserWarning, match="did not run"):
        assert machine.ask() == LOST
    assert not (machine.folder / "cache").exists()


def test_the_products_of_the_trial_come_out_right_here() -> None:
    trial = subprocess.run(
        [sys.executable, "-P", str(half_on_cpu._TRIAL)], capture_output=True, text=True, check=True
    )
    assert trial.stdout.split() == ["ready", "bfloat16", "float16"]
