"""BudgetTrainer on several ranks: one training, whatever the strategy; it survives what may happen.

tests/differential/test_several_ranks.py has the breadth: random trainings beside the stock Trainer.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks_program import EVALUATING, leave

PROGRAM = Path(__file__).parents[1] / "ranks_program.py"
WAYS = (
    "plain",
    "kept",
    "packed",
    "recomputed",
    "divided",
    "divided_half",
    "overridden",
)


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")
ACCELERATE = (
    "accelerate.commands.launch", "--multi_gpu", "--main_process_port", "0", "--num_processes",
)  # fmt: skip


def train(ranks: int, folder: Path, *names: str, launcher: tuple[str, ...] = TORCHRUN) -> None:
    """Runs trainings on so many ranks, each in its own process; on one rank they run here."""
    if ranks == 1:
        leave(folder, *names)
        return
    command = [sys.executable, "-m", *launcher, str(ranks), str(PROGRAM), str(folder), *names]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def environment() -> dict[str, str]:
    paths = [str(PROGRAM.parent), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def found(folder: Path, name: str, ranks: int, rank: int = 0) -> dict[str, Any]:
    seen: dict[str, Any] = torch.load(folder / f"{name}-{ranks}-{rank}", weights_only=True)
    return seen


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    train(1, folder, *WAYS, "saved")
    train(2, folder, *WAYS, "saved", "split")
    return folder


def test_a_script_under_accelerate_launch_trains_as_under_torchrun(
    runs: Path, tmp_path: Path
) -> None:
    train(2, tmp_path, "plain", launcher=ACCELERATE)
    for rank in (0, 1):
        here, there = found(tmp_path, "plain", 2, rank), found(runs, "plain", 2, rank)
        assert here["losses"] == there["losses"]


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_learn_as_one(runs: Path, way: str) -> None:
    alone, first, second = found(runs, way, 1), found(runs, way, 2), found(runs, way, 2, 1)
    exact = way in ("plain", "recomputed", "divided", "overridden")
    assert alone["losses"].keys() == first["losses"].keys()
    for step, loss in alone["losses"].items():
        assert first["losses"][step] == pytest.approx(loss, rel=1e-5 if exact else 5e-3), step
        assert second["losses"][step] == first["losses"][step]
    assert bool(alone["eval_losses"]) == (way in EVALUATING)
    for rank in (first, second):
        assert rank["eval_losses"] == pytest.approx(
            alone["eval_losses"], rel=1e-5 if exact else 5e-3
        )
    for name, weight in alone["weights"].items():
        shared = first["weights"][name]
        torch.testing.assert_close(
            shared, weight, rtol=0, atol=5e-6 if exact else 2e-2, check_dtype=False
        )
        assert torch.equal(shared, second["weights"][name]), f"{name} is not one on both ranks"


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_checkpoint_of_two_ranks_goes_on_with_another_number(runs: Path, ranks: int) -> None:
    names = ["resumed:2", "divided_resumed:2"]
    names += ["divided"] if ranks > 1 else []
    train(ranks, runs, *names)
    for name in names:
        before = "divided" if "divided" in name else "saved"
        whole, rest = found(runs, before, 1), found(runs, name.replace(":", "-"), ranks)
        assert len(rest["losses"]) == len(whole["losses"])
        for step, loss in whole["losses"].items():
            assert rest["losses"][step] == pytest.approx(loss, rel=1e-5), step
        for one, weight in whole["weights"].items():
            torch.testing.assert_close(rest["weights"][one], weight, rtol=0, atol=5e-6)
    if ranks > 1:
        for resumed in ("", "_resumed-2"):
            assert_all_divided(runs, ranks, resumed)


def assert_all_divided(runs: Path, ranks: int, resumed: str = "") -> None:
    """Every rank keeps a part of every weight and of its state, and together they keep it once."""
    for what in ("weight_bytes", "state_bytes"):
        whole = found(runs, "divided", 1)[what]
        each = [found(runs, f"divided{resumed}", ranks, rank)[what] for rank in range(ranks)]
        assert all(whole.values())
        for name, size in whole.items():
            assert sum(one[name] for one in each) == size, name
        largest = max(sum(one.values()) for one in each)
        assert largest == pytest.approx(sum(whole.values()) / ranks, rel=0.01)


def test_split_batches_leave_the_effective_batch_as_it_is(runs: Path) -> None:
    plain, split = found(runs, "plain", 2), found(runs, "split", 2)
    assert split["rows"] == plain["rows"] == 8
    assert split["losses"] == plain["losses"]


def test_weights_are_divided(runs: Path) -> None:
    assert_all_divided(runs, 2)


def test_a_rank_that_dies_ends_the_others_in_words(tmp_path: Path) -> None:
    """Without torchrun, which ends them by a signal before they can say anything."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env = {**environment(), **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(PROGRAM), str(tmp_path), "killed"]
        ranks.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL]
    assert "another process of this training has ended" in said[0], said[0][-3000:]
    assert (tmp_path / "saved" / "checkpoint-2" / "model.safetensors").is_file()
