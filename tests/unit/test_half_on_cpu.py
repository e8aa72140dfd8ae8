"""A CPU is asked for half precision in a child process, once, and its answer is kept.

The children here are real processes that end as on such a CPU, without the seconds that torch's
import takes; tests/e2e/test_lying_cpu.py has whole runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from memfit.engine import half_on_cpu
from memfit.engine.half_on_cpu import VARIABLE, HalfOnCpu
from memfit.i18n import shown, speaking
from memfit.strategies import HalfPrecision, LowBitAdamW, Setup

TRAP = "import os, signal\nprint('ready', flush=True)\n"
DIES = TRAP + "os.kill(os.getpid(), signal.SIGILL)\n"
NEEDS = TRAP + (
    "with open(os.environ['COUNTED'], 'a') as file:\n"
    "    file.write('x')\n"
    "if os.environ.get('ONEDNN_MAX_CPU_ISA') not in LIMITS:\n"
    "    os.kill(os.getpid(), signal.SIGILL)\n"
    "print('bfloat16 float16')\n"
)


class Machine:
    """A CPU that advertises AMX, with a cache folder of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, monkeypatch
        self.counted = folder / "children"
        monkeypatch.setenv("MEMFIT_CACHE", str(folder / "cache"))
        monkeypatch.setenv("COUNTED", str(self.counted))
        # Set, so that it is put back; oneDNN of this process has read it long ago.
        monkeypatch.setenv(VARIABLE, "")
        monkeypatch.setattr(half_on_cpu, "_has_amx", lambda: True)

    def trial(self, source: str) -> None:
        path = self.folder / "trial.py"
        path.write_text(source, encoding="utf-8")
        self.patch.setattr(half_on_cpu, "_TRIAL", path)

    def ask(self) -> HalfOnCpu:
        """As a process that has just started."""
        half_on_cpu._answer.cache_clear()
        half_on_cpu._said.clear()
        return half_on_cpu.half_on_cpu()

    def children(self) -> int:
        return len(self.counted.read_text()) if self.counted.exists() else 0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    said = half_on_cpu._said.copy()
    half_on_cpu._answer.cache_clear()
    yield Machine(tmp_path, monkeypatch)
    half_on_cpu._answer.cache_clear()
    half_on_cpu._said.clear()
    half_on_cpu._said.update(said)


def test_a_cpu_without_amx_starts_no_child(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.trial(DIES)
    monkeypatch.setattr(half_on_cpu, "_has_amx", lambda: False)
    assert machine.ask() == HalfOnCpu()
    assert machine.ask().sentence() == ""
    assert not (machine.folder / "cache").exists()


def test_the_first_smaller_instruction_set_that_helps_is_used_and_said_once(
    machine: Machine,
) -> None:
    machine.trial(NEEDS.replace("LIMITS", "('AVX512_CORE', 'AVX512_CORE_FP16')"))
    with pytest.warns(UserWarning, match=r"AMX .*ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16") as said:
        found = machine.ask()
    assert found == HalfOnCpu(instruction_set="AVX512_CORE_FP16")
    assert len(said) == 1
    assert os.environ[VARIABLE] == "AVX512_CORE_FP16"
    assert half_on_cpu.half_on_cpu() is found  # without a warning, which would be an error here
    assert machine.children() == 2


def test_the_smallest_is_tried_too(machine: Machine) -> None:
    machine.trial(NEEDS.replace("LIMITS", "('AVX512_CORE',)"))
    with pytest.warns(UserWarning, match="ONEDNN_MAX_CPU_ISA=AVX512_CORE"):
        assert machine.ask() == HalfOnCpu(instruction_set="AVX512_CORE")


def test_the_answer_is_remembered_for_the_next_process(machine: Machine) -> None:
    machine.trial(NEEDS.replace("LIMITS", "('AVX512_CORE_FP16',)"))
    with pytest.warns(UserWarning, match="AMX"):
        first = machine.ask()
    machine.patch.setenv(VARIABLE, "")
    with pytest.warns(UserWarning, match="AMX"):
        assert machine.ask() == first
    assert machine.children() == 2


def test_a_process_that_inherits_the_limit_asks_and_says_nothing(machine: Machine) -> None:
    machine.trial(NEEDS.replace("LIMITS", "('AVX512_CORE_FP16',)"))
    with pytest.warns(UserWarning, match="AMX"):
        machine.ask()
    assert machine.ask() == HalfOnCpu()  # the first has set the variable
    assert machine.children() == 2


@pytest.mark.parametrize("damage", ["", "{}", '{"bfloat16": 1, "float16": true}', "limit"])
def test_an_answer_that_cannot_be_read_is_found_out_again(machine: Machine, damage: str) -> None:
    machine.trial(NEEDS.replace("LIMITS", "('AVX512_CORE_FP16',)"))
    with pytest.warns(UserWarning, match="AMX"):
        first = machine.ask()
    [kept] = (machine.folder / "cache").iterdir()
    wrong = kept.read_text(encoding="utf-8").replace("AVX512_CORE_FP16", "$(rm -r ~)")
    kept.write_text(wrong if damage == "limit" else damage, encoding="utf-8")
    machine.patch.setenv(VARIABLE, "")
    with pytest.warns(UserWarning, match="AMX"):
        assert machine.ask() == first
    assert machine.children() == 4


def test_where_nothing_helps_strategies_refuse_with_the_reason(machine: Machine) -> None:
    machine.trial(DIES)
    with pytest.warns(UserWarning, match="goes on without bfloat16, float16"):
        found = machine.ask()
    assert found == HalfOnCpu(bfloat16=False, float16=False)
    assert found.works("float32")
    args = TrainingArguments(str(machine.folder), use_cpu=True, report_to="none")
    setup = Setup(model=torch.nn.Linear(2, 2), args=args, device=torch.device("cpu"))
    for strategy in (HalfPrecision(), LowBitAdamW()):
        reason = strategy.unavailable(setup)
        assert reason == "this CPU advertises bfloat16 instructions that it does not run"
        assert shown(reason, "zh") == "这个 CPU 声称支持 bfloat16 指令，却不能执行"
    assert "float16" in LowBitAdamW(dtype="float16").unavailable(setup)


def test_products_that_come_out_wrong_are_as_bad_as_a_trap(machine: Machine) -> None:
    machine.trial(TRAP + "print('bfloat16', flush=True)\nraise ArithmeticError\n")
    with pytest.warns(UserWarning, match="goes on without float16"):
        assert machine.ask() == HalfOnCpu(float16=False)


@pytest.mark.parametrize("child", ["raise ImportError('torch')", "import time\ntime.sleep(60)"])
def test_a_child_that_tells_nothing_of_the_cpu_is_not_remembered(
    machine: Machine, child: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.trial(child)
    monkeypatch.setattr(half_on_cpu, "_TRIAL_SECONDS", 2.0)
    with pytest.warns(UserWarning, match="could not be tried"):
        found = machine.ask()
    assert (found.bfloat16, found.problem) == (False, "untried")
    assert not (machine.folder / "cache").exists()


def test_the_sentences_are_spoken_in_chinese() -> None:
    late = HalfOnCpu(False, False, "AVX512_CORE", "late")
    for found in (HalfOnCpu(False), HalfOnCpu(instruction_set="AVX512_CORE"), late):
        with speaking("zh"):
            assert found.sentence().startswith("这个 CPU 声称支持")
        with speaking("en"):
            assert found.sentence().startswith("this CPU advertises")


def test_the_products_of_the_trial_come_out_right_here() -> None:
    trial = subprocess.run(
        [sys.executable, "-P", str(half_on_cpu._TRIAL)], capture_output=True, text=True, check=True
    )
    assert trial.stdout.split() == ["ready", "bfloat16", "float16"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_product_in_a_fork_tells_of_this_process() -> None:
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert half_on_cpu._product_works_in_fork()
