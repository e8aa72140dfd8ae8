"""Runs on a CPU that advertises AMX and traps on it, each in a process of its own.

tests/lying_cpu/sitecustomize.py makes this machine such a one: the process really dies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SENTENCE = "when it was tried on this CPU"

LATE = """
import sys, torch, warnings
torch.mm(torch.ones(9, 9), torch.ones(9, 9))  # torch has begun to multiply
from transformers import TrainingArguments
from memfit import BudgetTrainer
from small_training import collate, model_of, texts
args = TrainingArguments(sys.argv[1], use_cpu=True, bf16=True, max_steps=2, report_to="none",
                         per_device_train_batch_size=8, save_strategy="no", disable_tqdm=True)
rows = {"train_dataset": texts(), "data_collator": collate}
trainer = BudgetTrainer(model_of(), args, budget="1GB", **rows)
trainer.train()
print(trainer.state.global_step, trainer.args.bf16, args.bf16)
try:
    BudgetTrainer(model_of().bfloat16(), args, **rows)
except Exception as error:
    print(type(error).__name__, error)
"""


class LyingCpu:
    """What starts Python on such a machine."""

    def __init__(self, kind: str, cache: Path) -> None:
        paths = [TESTS / "lying_cpu", TESTS.parent / "src", TESTS]
        self.environment = {
            **os.environ,
            "LYING_CPU": kind,
            "MEMFIT_CACHE": str(cache),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        }
        self.environment.pop("ONEDNN_MAX_CPU_ISA", None)
        self.cache = cache

    def python(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, words)]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )

    def memfit(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "memfit", *words)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "reviews.csv"
    rows = [f"{i % 2},{('早餐難吃', '早餐好吃')[i % 2]}{'床' * (i % 7)}" for i in range(48)]
    path.write_text("\n".join(["label,review", *rows]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def lying(tmp_path_factory: pytest.TempPathFactory) -> LyingCpu:
    return LyingCpu("helps", tmp_path_factory.mktemp("cache"))


def short_run(reviews: Path, model: Path, output: Path) -> list[str | Path]:
    return [
        "train", reviews, "--model", model, "--output-dir", output, "--budget", "1GB",
        "--batch-size", "8", "--max-steps", "3", "--max-length", "32", "--use-cpu", "--bf16",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_product_in_half_precision_ends_the_process_there(lying: LyingCpu) -> None:
    product = "import torch; x = torch.ones(9, 9).bfloat16(); torch.mm(x, x)"
    assert lying.python("-c", product).returncode == -signal.SIGILL


@pytest.mark.slow
def test_a_run_goes_on_without_half_precision(
    lying: LyingCpu, reviews: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    done = lying.memfit(*short_run(reviews, tiny_model_dir, tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SENTENCE) == 1
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in done.stderr
    assert (tmp_path / "run" / "model.safetensors").is_file()
    [kept] = lying.cache.glob("half-on-cpu-*")
    before = kept.stat().st_mtime_ns

    told = lying.memfit("doctor", "--json")
    found = json.loads(told.stdout)
    assert found["half_on_cpu"]["instruction_set"] == "AVX512_CORE_FP16"
    assert sum(SENTENCE in one["text"] for one in found["findings"]) == 1
    assert not found["strategies"]["half_precision"]["ready"]
    assert [one.stat().st_mtime_ns for one in lying.cache.glob("half-on-cpu-*")] == [before]
    short = ("--budget", "1GB", "--max-length", "32", "--json")
    planned = lying.memfit("plan", reviews, "--model", tiny_model_dir, *short)
    assert planned.returncode == 0, planned.stderr
    reason = json.loads(planned.stdout)["left_out"]["half_precision"]
    assert reason == "bfloat16 does not run on this CPU"


@pytest.mark.slow
def test_a_trainer_trains_in_float32_and_refuses_half_weights(
    lying: LyingCpu, tmp_path: Path
) -> None:
    done = lying.python("-c", LATE, tmp_path)
    assert done.returncode == 0, done.stderr
    steps, refused = done.stdout.strip().splitlines()[-2:]
    assert steps == "2 False True"  # the user's own arguments stay as they are
    assert refused.startswith("ConfigError the weights are bfloat16, and bfloat16 does not run")
    assert done.stderr.count(SENTENCE) == 1
    assert "before Python starts" in done.stderr
